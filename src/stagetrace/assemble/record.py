"""A call's marks → the request record that store, exporters and reports share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import marks
from ..model import RequestRecord, StageRecord
from ..stats import inter_token, spread
from .book import Root
from .case import Case
from .ending import Alive, error_of, extent_ms, settle, status_of
from .floors import Floors
from .identity import caller_of, name_of
from .stopwatch import stages
from .tokens import deliveries, lag_growth_ms
from .worst import worst_steps

_GAP_NAMES = {
    "chat_template": "handler", "tokenize": "handler", "admission": "engine_input", "kv_allocate": "lookup",
    "prefill": "dispatch", "lm_head": "to_head", "sample": "to_sampler", "detokenize": "result",
    "decode": "to_decode", "teardown": "to_teardown",
}  # fmt: skip


def record(case: Case, anchor: tuple[int, int], alive: Alive, floors: Floors) -> RequestRecord:
    """Build the record of one sequence (or of a call that never became one).

    ``anchor`` is the (monotonic, unix) pair of the call's process.
    """
    root, sequence = case.root, case.sequence
    rows = stages(case)
    status, reason = status_of(case, alive)
    active = settle(case, rows, status)
    tokens = deliveries(case)
    times = [_ms(root, token.arrived) for token in tokens]
    made = RequestRecord(
        **_identity(case),
        status=status,
        finish_reason=reason,
        active_stage=active,
        error_type=error_of(case, status, reason, alive),
        prompt_tokens=_prompt(case, rows),
        cached_tokens=case.chunks[0].computed if case.chunks else None,
        output_tokens=case.generated,
        start_unix_ns=anchor[1] + root.started - anchor[0],
        e2e_ms=_ms(root, case.end) if case.end is not None else None,
        ttft_ms=_ms(root, case.first_text) if case.first_text is not None else None,
        ttft_kind=case.ttft_kind,
        queue_ms=rows[3].duration_ms,
        prefill_ms=_prefill_ms(rows),
        itl_ms=spread(inter_token(times)),
        coverage=None,
        coverage_ttft=None,
        unattributed_ms=None,
        preemptions=len(sequence.preempted) if sequence else 0,
        sequence=case.index,
        stages=rows,
        token_times_ms=times,
    )
    made.stage("teardown").attributes["finish_reason"] = reason
    decode = made.stage("decode")
    if decode.state == "measured":
        lag = lag_growth_ms([token.lag for token in tokens]) if case.ttft_kind == "streamed" else None
        worst = worst_steps(case, tokens)
        decode.attributes |= {"itl_ms": dict(made.itl_ms), "emit_lag_ms": lag, "worst_steps": worst}
    floors.add(case, rows)
    _attribute(made)
    return made


def _identity(case: Case) -> dict[str, Any]:
    """Who asked what of whom."""
    root, sequence = case.root, case.sequence
    return {
        **name_of(root)._asdict(),
        **caller_of(root),
        "external_id": root.texts.get(marks.CLIENT_ID),
        "internal_id": sequence.internal_id if sequence else None,
        "http_status": root.status.a if root.status else None,
        "operation": "pooling" if root.offline and case.pools else marks.OPERATIONS.get(root.operation, "unknown"),
        "model": case.book.settings.get("model"),
        "engine": sequence.joins[0][0] >> 32 if sequence and sequence.joins else None,
        "process": root.pid,
    }


def _ms(root: Root, time: int) -> float:
    return (time - root.started) / 1e6


def _attribute(made: RequestRecord) -> None:
    """Coverage, and the unattributed remainder by gap."""
    if not made.e2e_ms:
        return
    decode = made.stage("decode")
    other = (decode.attributes.get("split_ms") or {}).get("other", 0.0) if decode.state == "measured" else 0.0
    made.gaps_ms = dict(_gaps(made.stages, made.e2e_ms))
    made.unattributed_ms = sum(made.gaps_ms.values())
    made.coverage = 1 - (made.unattributed_ms + other) / made.e2e_ms
    if made.ttft_ms:
        made.coverage_ttft = sum(row.duration_ms or 0.0 for row in made.stages[:10]) / made.ttft_ms


def _gaps(rows: list[StageRecord], e2e: float) -> Iterator[tuple[str, float]]:
    """(name, ms) of the stretches between one stage's end and the next one's start.

    One that hides stages which nobody saw is called after the first of them.
    """
    found: dict[str, float] = {}
    reached, last = 0.0, 0
    for row in rows:
        if row.key == "embedding" or row.start_ms is None or row.duration_ms is None:
            continue
        hidden = (r.key for r in rows[last : row.number - 1] if r.state == "not_observable" and r.key != "embedding")
        # Where nothing was sampled, the result of the forward itself is what comes back.
        usual = "result" if (last, row.key) == (7, "teardown") else _GAP_NAMES.get(row.key, row.key)
        name = next(hidden, usual)
        found[name] = found.get(name, 0.0) + row.start_ms - reached
        reached, last = row.start_ms + row.duration_ms, row.number
        if row.key == "prefill":
            # Its duration leaves out the embedding, which is stage 6, and the gaps between chunks, which are nobody's.
            found["preempted"] = row.attributes.get("preempted_ms") or 0.0
            found["between_chunks"] = (row.attributes.get("gaps_ms") or 0.0) - found["preempted"]
            reached = row.start_ms + extent_ms(row, rows)
    found["end"] = e2e - reached
    yield from ((name, gap) for name, gap in found.items() if abs(gap) > 1e-6)


def _prompt(case: Case, rows: list[StageRecord]) -> int | None:
    """Positions of the prompt. Of a call that the engine never saw, what its text came to."""
    if case.sequence is not None and case.sequence.added is not None:
        return case.sequence.added.b if case.sequence.added.b >= 0 else None
    return rows[2].attributes.get("prompt_tokens")


def _prefill_ms(rows: list[StageRecord]) -> float | None:
    """Start of the first chunk's forward to the end of the last one's; None for a prefill that was cut short."""
    prefill = next(row for row in rows if row.key == "prefill")
    if prefill.duration_ms is None or prefill.attributes.get("interrupted"):
        return None
    return extent_ms(prefill, rows)
