"""Runs as servers have them: noise that a whole run shares, requests with heavy tails, and drift; no server needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stagetrace.gate.decide import Effect, Judged, Outcome, decide
from stagetrace.gate.estimate import Array, Flags, estimate, interleaved
from stagetrace.gate.measures import BY_KEY, MEASURES
from stagetrace.gate.runs import Request, Run
from stagetrace.gate.settings import Wishes

#: A request of 1,055 ms with a first text after 100 ms.
BASE_MS = {
    "ttft_ms": 100.0, "itl_ms": 3.2, "prefill_ms": 68.0, "queue_ms": 5.0, "e2e_ms": 1055.0, "http_receive": 0.5,
    "chat_template": 0.8, "tokenize": 7.0, "admission": 5.0, "kv_allocate": 0.1, "embedding": 0.3, "prefill": 67.0,
    "lm_head": 0.6, "sample": 0.2, "detokenize": 9.0, "decode": 950.0, "teardown": 1.5, "unattributed": 5.0,
}  # fmt: skip
JUDGED = [measure.key for measure in MEASURES if measure.judged]


@dataclass(frozen=True)
class Noise:
    """``run``: standard deviation of a run, half of its variance common to all stages; ``drift`` over the whole time.

    ``request`` scales Student's t with three degrees: now and then one is far out; one in a hundred is slow by a lot.
    """

    run: float
    drift: float = 0.03
    request: float = 0.05


def abba(runs: int) -> Flags:
    """Which of 2 × ``runs`` interleaved runs are of the current side."""
    return np.array(([False, True, True, False] * runs)[: 2 * runs])


def times(
    rng: np.random.Generator, current: Flags, noise: Noise, slower: Mapping[str, float], prompts: int = 50
) -> dict[str, Array]:
    """Measure → runs × prompts, in ms; ``slower``: measure → by which share the current side is slower."""
    runs = len(current)
    common = rng.normal(0, noise.run / 2**0.5, runs) + noise.drift * rng.normal() * np.linspace(-1, 1, runs)
    lengths = rng.normal(0, 0.5, prompts)
    found = {}
    for key, base in BASE_MS.items():
        of_run = common + rng.normal(0, noise.run / 2**0.5, runs)
        of_request = noise.request * rng.standard_t(3, (runs, prompts))
        of_request += (rng.random((runs, prompts)) < 0.01) * rng.exponential(1.0, (runs, prompts))
        logs = lengths + of_run[:, None] + of_request
        logs[current] += np.log1p(slower.get(key, 0.0))
        found[key] = base * np.exp(logs)
    return found


def judged(found: dict[str, Array], current: Flags) -> dict[str, Judged]:
    """The estimates of a comparison, as :func:`stagetrace.gate.compare.compare` has them."""
    order = interleaved(current, np.arange(len(current), dtype=np.float64))
    out = {}
    for key in JUDGED:
        of = BY_KEY[key].of
        timer_ms = BASE_MS[of] if of else None
        effect: Effect = Wishes().effect(BY_KEY[key], timer_ms)
        share = BASE_MS[key] / timer_ms if timer_ms else None
        out[key] = Judged(estimate(found[key], current, order), BASE_MS[key], share, effect)
    return out


def compared(
    rng: np.random.Generator, runs: int, noise: Noise, slower: Mapping[str, float] | None = None
) -> tuple[dict[str, Judged], dict[str, Outcome]]:
    """One whole comparison of ``runs`` interleaved runs a side."""
    current = abba(runs)
    estimates = judged(times(rng, current, noise, slower or {}), current)
    return estimates, decide(estimates)


FINGERPRINT: dict[str, str | int | float | None] = {
    "engine": "paper", "engine_version": "1", "model": "tiny", "device": "cpu", "gpu": None, "max_num_seqs": 8,
    "prefix_caching": 1, "kv_blocks": 100, "concurrency": 1, "request_rate": None, "output_tokens": 300.0,
    "cached_tokens": 0.0, "prompt_mix": "50 prompts of 20-400 tokens (0badcafe)",
}  # fmt: skip


def runs_of(
    seed: int, runs: int, noise: Noise, slower: Mapping[str, float] | None = None, prompts: int = 50
) -> tuple[list[Run], list[Run]]:
    """The same as runs: the baseline's and the current side's."""
    current = abba(runs)
    found = times(np.random.default_rng(seed), current, noise, slower or {}, prompts)
    sides: tuple[list[Run], list[Run]] = [], []
    for number, side in enumerate(current):
        requests = {
            f"{k:06d}": Request(
                100 + k, 300, {key: float(ms[number, k]) for key, ms in found.items()}, f"r{number}-{k}"
            )
            for k in range(prompts)
        }
        started = 1_700_000_000_000_000_000 + number * 60_000_000_000
        sides[int(side)].append(Run(f"run-{number}.db", started, dict(FINGERPRINT), requests))
    return sides
