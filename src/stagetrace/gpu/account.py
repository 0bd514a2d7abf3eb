"""The cards of a run: what they did, and where their energy went."""

from __future__ import annotations

from typing import Any

from ..model import GpuSample
from ..stats import spread
from ..store import Trace
from .energy import intervals
from .history import History
from .nvml import Reading


def account(trace: Trace) -> dict[str, Any] | None:
    """Of one session's ``trace``; None where no card was sampled. Energies are in joules, shares from 0 to 1.

    What the cards used splits into ``computing_j``, while there was a step in work, and ``idle_j``; ``requests_j`` are
    the shares of all requests in the former. What is not known is null.
    """
    if not trace.gpu:
        return None
    cards: dict[str, list[GpuSample]] = {}
    history = History()
    for sample in trace.gpu:
        cards.setdefault(sample.card, []).append(sample)
        history.add([Reading(sample, [])])
    used = [sample.energy_j for sample in trace.gpu if sample.energy_j is not None]
    total = sum(used) if used else None
    computing = _computing(trace, history) if total is not None else None
    shares = [r.gpu["joules"] for r in trace.requests if r.gpu and r.gpu["joules"] is not None]
    tokens = sum(r.output_tokens or 0 for r in trace.requests if r.gpu and r.gpu["joules"] is not None)
    slowed = [r.gpu["throttled"] for r in trace.requests if r.gpu and r.gpu["throttled"] is not None]
    return {
        "energy_j": total,
        "computing_j": computing,
        "idle_j": total - computing if total is not None and computing is not None else None,
        "requests_j": sum(shares) if shares else None,
        "joules_per_output_token": sum(shares) / tokens if tokens else None,
        "throttled_requests": sum(map(bool, slowed)) if slowed else None,
        "cards": [_card(card, samples) for card, samples in cards.items()],
    }


def _computing(trace: Trace, history: History) -> float | None:
    """Joules that went by while there was a step in work: of several engines, each on its own cards.

    None where it cannot be said whose card is whose, or engines share one: then energy would count more than once.
    """
    engines: dict[int, list[str] | None] = dict.fromkeys((step.engine for step in trace.steps), None)
    if len(engines) > 1:
        engines |= {r.engine: r.gpu["cards"].split(",") for r in trace.requests
                    if r.engine is not None and r.gpu and r.gpu["cards"]}  # fmt: skip
        claimed = [card for cards in engines.values() for card in cards or ()]
        if None in engines.values() or len(set(claimed)) < len(claimed):
            return None
    spent = [history.joules(span, engines[step.engine]) for step, span in intervals(trace.steps)]
    return sum(each for each in spent if each is not None)


def _card(card: str, samples: list[GpuSample]) -> dict[str, Any]:
    """What one card said."""
    energy = [each for sample in samples if (each := sample.energy_j) is not None]
    return {
        "id": card,
        "name": samples[-1].name,
        "samples": len(samples),
        "energy_j": sum(energy) if energy else None,
        **{name: spread(_known(samples, name)) for name in ("utilization", "power_w", "memory_used_bytes")},
        "temperature_c": spread(_known(samples, "temperature_c")),
    }


def _known(samples: list[GpuSample], name: str) -> list[float]:
    return [float(value) for sample in samples if (value := getattr(sample, name)) is not None]
