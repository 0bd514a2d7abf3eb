"""A call's marks → the request record that store, exporters and reports share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from .. import marks
from ..model import RequestRecord, StageRecord
from ..propagation import parse
from ..stats import percentile
from .book import Root, Sequence
from .stopwatch import Case, finished, stages
from .tokens import itl_ms, token_times

Alive = Callable[[int], bool]
#: Gaps before the first token do not include these.
_LATE = ("to_decode", "to_teardown", "end")
_GAP_NAMES = {
    "chat_template": "handler", "tokenize": "handler", "admission": "engine_input", "kv_allocate": "lookup",
    "prefill": "dispatch", "lm_head": "to_head", "sample": "to_sampler", "detokenize": "result",
    "decode": "to_decode", "teardown": "to_teardown",
}  # fmt: skip


def record(case: Case, anchor: tuple[int, int], dead: bool, alive: Alive) -> RequestRecord:
    """Build the record of one sequence (or of a call that never became one).

    ``anchor`` is the process's (monotonic, unix) pair; ``dead`` says that nothing more can come.
    """
    root, sequence = case.root, case.sequence
    rows = stages(case)
    times = token_times(case)
    end = finished(root)
    status, reason = _status(case, dead, alive)
    parent, trace = _parent(root)
    made = RequestRecord(
        request_id=root.texts.get(marks.EXTERNAL_ID, ""),
        external_id=root.texts.get(marks.CLIENT_ID),
        trace_id=trace,
        operation=marks.OPERATIONS.get(root.operation, "unknown"),
        model=case.book.settings.get("model"),
        status=status,
        finish_reason=reason,
        active_stage=_active(rows) if status != "ok" else None,
        prompt_tokens=_prompt(root, sequence),
        cached_tokens=case.chunks[0].computed if case.chunks else None,
        output_tokens=_generated(case),
        start_unix_ns=anchor[1] + root.started - anchor[0],
        e2e_ms=(end - root.started) / 1e6 if end is not None else None,
        ttft_ms=(case.first_text - root.started) / 1e6 if case.first_text is not None else None,
        ttft_kind=case.ttft_kind,
        queue_ms=next(row.duration_ms for row in rows if row.key == "admission"),
        prefill_ms=_prefill_ms(case),
        itl_ms=_quantiles(itl_ms(times)),
        coverage=None,
        coverage_ttft=None,
        unattributed_ms=None,
        preemptions=len(sequence.preempted) if sequence else 0,
        sequence=sequence.index if sequence else 0,
        stages=rows,
        span_id=f"{root.number:016x}",
        parent_span_id=parent,
        internal_id=sequence.internal_id if sequence else None,
        token_times_ms=[(t - root.started) / 1e6 for t in times],
    )
    made.stage("teardown").attributes["finish_reason"] = reason
    _attribute(made)
    return made


def _attribute(made: RequestRecord) -> None:
    """Coverage, and the unattributed remainder by gap."""
    if not made.e2e_ms:
        return
    split = made.stage("decode").attributes.get("split_ms") or {}
    made.gaps_ms = dict(_gaps(made.stages, made.e2e_ms))
    made.unattributed_ms = sum(made.gaps_ms.values())
    made.coverage = 1 - (made.unattributed_ms + split.get("other", 0.0)) / made.e2e_ms
    if made.ttft_ms:
        early = sum(gap for name, gap in made.gaps_ms.items() if name not in _LATE)
        made.coverage_ttft = 1 - early / made.ttft_ms


def _gaps(rows: list[StageRecord], e2e: float) -> Iterator[tuple[str, float]]:
    """(name, ms) of the stretches between one stage's end and the next one's start."""
    found: dict[str, float] = {}
    reached = 0.0
    for row in rows:
        if row.key == "embedding" or row.start_ms is None or row.duration_ms is None:
            continue
        name = _GAP_NAMES.get(row.key, row.key)
        found[name] = found.get(name, 0.0) + row.start_ms - reached
        reached = row.start_ms + row.duration_ms
        if row.key == "prefill":
            # Its duration leaves out the embedding, which is stage 6, and the gaps between chunks, which are nobody's.
            inside = next((r.duration_ms or 0.0 for r in rows if r.key == "embedding"), 0.0)
            found["between_chunks"] = row.attributes["gaps_ms"]
            reached += row.attributes["gaps_ms"] + inside
    found["end"] = e2e - reached
    yield from ((name, gap) for name, gap in found.items() if abs(gap) > 1e-6)


def _status(case: Case, dead: bool, alive: Alive) -> tuple[str, str | None]:
    """(status, finish reason)."""
    root, sequence = case.root, case.sequence
    free = sequence.free if sequence else None
    reason = marks.FINISH.get(free.a) if free else None
    if sequence and sequence.stopped:
        reason = "stop"
    if (root.status is not None and root.status.a >= 400) or reason == "error":
        return "error", reason
    if root.disconnect is not None or reason == "abort":
        return "aborted", reason or "abort"
    if reason is not None:
        return "ok" if root.end is not None and not root.end.a else "error" if dead else "in_flight", reason
    lost = sequence is not None and sequence.engine_pid is not None and not alive(sequence.engine_pid)
    return "error" if root.end is not None or dead or lost else "in_flight", reason


def _active(rows: list[StageRecord]) -> str:
    """The stage a request is in, or was in when it failed: the one after the last that was completed."""
    done = max((row.number for row in rows if row.duration_ms is not None), default=0)
    return next((row.key for row in rows if row.number > done and row.state == "not_reached"), rows[done - 1].key)


def _generated(case: Case) -> int | None:
    """Tokens the client got: the engine's count, unless a stop string cut it short."""
    sequence = case.sequence
    if sequence is None:
        return None
    if sequence.free is not None and sequence.stopped is None:
        return sequence.free.b
    return sum(turn.generated for turn in case.turns)


def _prompt(root: Root, sequence: Sequence | None) -> int | None:
    if sequence is not None and sequence.added is not None:
        return sequence.added.b
    return root.tokenized.a if root.tokenized else None


def _prefill_ms(case: Case) -> float | None:
    """Start of the first chunk's forward to the end of the last one's."""
    spans = [turn.step.forward_ns for turn in case.chunks]
    if case.first is None or not spans or spans[0] is None or spans[-1] is None:
        return None
    return (spans[-1][1] - spans[0][0]) / 1e6


def _quantiles(values: list[float]) -> dict[str, float | None]:
    return {name: percentile(values, q) for name, q in {"p50": 50, "p95": 95, "p99": 99, "max": 100}.items()}


def _parent(root: Root) -> tuple[str | None, str]:
    """(parent span id, trace id): the caller's where its traceparent is sound and trusted, else our own."""
    caller = parse(root.texts.get(marks.TRACEPARENT, ""))
    if caller is None or os.environ.get("STAGETRACE_TRUST_TRACEPARENT") == "0":
        return None, root.trace_id
    return caller.span_id, caller.trace_id
