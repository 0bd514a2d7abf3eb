"""The numbers of a run: four timers and four gauges at p50, p95 and p99, and the facts that give them a meaning.

All of it is of requests that were answered (``ok``), but for gauges, which are the engine's; how many others there
were goes with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .gpu.account import account
from .model import SCHEMA, RequestRecord, StepRecord
from .stages import STAGES
from .stats import inter_token, percentile, quantiles, spread
from .store import Trace

Numbers = dict[str, Any]
Root = list[RequestRecord]
#: From here on the cache counts as full; in so many of the steps, with a queue, the run counts as saturated.
FULL = 0.95
SATURATED = 0.1


@dataclass
class Aside:
    """What a person is told beside the document of ``numbers --json``."""

    session: str | None = None
    window_s: float | None = None
    #: Requests that are not in the timers, by status.
    others: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    #: Shares of the steps: cache full while requests wait; all slots taken while requests wait.
    pinned: float = 0.0
    no_slot: float = 0.0
    #: The queue's mean depth in the first and in the last third of the pinned steps.
    queue_from: float | None = None
    queue_to: float | None = None
    max_model_len: int | None = None
    mean_tokens: float | None = None
    #: Requests of the greatest length the model allows that the cache holds at once.
    worst_case_fit: int | None = None

    def left_out(self) -> str:
        """How many requests are not in the timers, and why."""
        parts = ", ".join(f"{count} {status}" for status, count in sorted(self.others.items()))
        count = sum(self.others.values())
        return f"{count} other requests are not in the timers: {parts} (rate, concurrency and time span count them)"


def numbers(trace: Trace) -> Numbers:
    """Compute the document of ``numbers --json`` (times in ms) from what ``trace`` holds: one session's."""
    roots = _roots(trace)
    done = [record for root in roots if _answered(root) for record in root]
    steps = _steps(trace)
    cards = account(trace)
    return {
        "schema": SCHEMA,
        "context": _context(trace, roots, done),
        "timers": {
            "queue_ms": quantiles(r.queue_ms for r in done),
            "prefill_ms": quantiles(r.prefill_ms for r in done),
            "ttft_ms": quantiles(r.ttft_ms for r in done),
            "itl_ms": quantiles(gap for r in done for gap in inter_token(r.token_times_ms)),
        },
        "gauges": {
            "kv_cache_utilization": spread([step.kv_usage for step in steps]),
            "queue_depth": spread([float(step.waiting) for step in steps]),
            "batch_size": spread([float(step.batch_size) for step in steps]),
            "preemptions": sum(r.preemptions for r in trace.requests) if steps or trace.requests else None,
        },
        "saturated": len(_pinned(trace, done)) > len(steps) * SATURATED,
        "stages": _stages(done),
        **({"gpu": cards} if cards else {}),
    }


def aside(trace: Trace) -> Aside:
    """What goes with :func:`numbers` of the same ``trace``."""
    roots = _roots(trace)
    done = [record for root in roots if _answered(root) for record in root]
    config = _config(trace)
    pinned, steps = _pinned(trace, done), _steps(trace)
    longest, third = config.get("max_model_len"), len(pinned) // 3
    lengths = [_length(r) for r in done]
    return Aside(
        session=trace.runs[-1].session if trace.runs else None,
        window_s=_window_s(roots),
        others=dict(Counter(_status(root) for root in roots if not _answered(root))),
        steps=len(steps),
        pinned=len(pinned) / len(steps) if steps else 0.0,
        no_slot=sum(1 for s in steps if s.waiting and _slots_taken(s, config)) / len(steps) if steps else 0.0,
        queue_from=_mean([float(s.waiting) for s in pinned[:third]]),
        queue_to=_mean([float(s.waiting) for s in pinned[-third:]]) if third else None,
        max_model_len=longest,
        mean_tokens=_mean([float(length) for length in lengths]),
        worst_case_fit=_fit(config, [longest]) if longest else None,
    )


def _roots(trace: Trace) -> list[Root]:
    """The records of each request: several where ``n`` > 1."""
    found: dict[tuple[str, str], Root] = {}
    for record in trace.requests:
        found.setdefault((record.trace_id, record.span_id), []).append(record)
    return list(found.values())


def _answered(root: Root) -> bool:
    return all(record.status == "ok" and record.e2e_ms is not None for record in root)


def _status(root: Root) -> str:
    return next((record.status for record in root if record.status != "ok"), "unfinished")


def _e2e_ms(root: Root) -> float:
    return max((record.e2e_ms or 0.0 for record in root), default=0.0)


def _window_s(roots: list[Root]) -> float | None:
    """From the first request's start to the last one's end; those that failed were work for the server, too."""
    if not roots:
        return None
    first, last = (
        f(root[0].start_unix_ns + ms * 1e6 for root in roots for ms in (0.0, _e2e_ms(root))) for f in (min, max)
    )
    return (last - first) / 1e9 or None


def _steps(trace: Trace) -> list[StepRecord]:
    """The steps with somebody in them: an idle engine's say how long it was idle, not how full it is."""
    return [step for step in trace.steps if step.batch_size]


def _config(trace: Trace) -> dict[str, Any]:
    return trace.runs[-1].config if trace.runs else {}


def _context(trace: Trace, roots: list[Root], done: list[RequestRecord]) -> dict[str, Any]:
    run, config = trace.runs[-1] if trace.runs else None, _config(trace)
    window_s = _window_s(roots)
    ended = sum(any(record.e2e_ms is not None for record in root) for root in roots)
    tokens = sum(record.output_tokens or 0 for record in done)
    return {
        "request_rate": ended / window_s if window_s else None,
        "concurrency": sum(map(_e2e_ms, roots)) / 1e3 / window_s if window_s else None,
        "prefix_caching": _flag(config.get("prefix_caching")),
        "chunked_prefill": _flag(config.get("chunked_prefill")),
        "max_num_seqs": config.get("max_num_seqs"),
        "engine": run.engine if run else None,
        "engine_version": run.engine_version if run else None,
        "model": run.model if run else None,
        "gpu": config.get("gpu"),
        "requests": sum(map(_answered, roots)),
        "prompt_tokens": quantiles(float(r.prompt_tokens) for r in done if r.prompt_tokens is not None),
        "output_tokens": quantiles(float(r.output_tokens) for r in done if r.output_tokens is not None),
        "output_tokens_per_s": tokens / window_s if window_s else None,
        "kv_blocks": config.get("kv_blocks"),
        "requests_that_fit": _fit(config, [_length(r) for r in done]),
    }


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _length(record: RequestRecord) -> int:
    return (record.prompt_tokens or 0) + (record.output_tokens or 0)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _fit(config: dict[str, Any], lengths: list[int]) -> int | None:
    """How many requests of these lengths (their mean) the KV cache holds at once, nothing shared."""
    blocks, size = config.get("kv_blocks"), config.get("block_size")
    if not blocks or not size or not lengths:
        return None
    each = sum(-(-length // size) for length in lengths) / len(lengths)
    return int(blocks / each) if each else None


def _pinned(trace: Trace, done: list[RequestRecord]) -> list[StepRecord]:
    """The steps in which requests waited for blocks: the cache full, or without room for one more prompt.

    In the second case nothing else may explain the queue: there is a free slot, and the step has tokens to spare.
    """
    config = _config(trace)
    blocks, size = config.get("kv_blocks"), config.get("block_size")
    prompt = percentile([float(r.prompt_tokens) for r in done if r.prompt_tokens], 50)
    budget = config.get("max_num_batched_tokens")
    roomless = 1 - -(-prompt // size) / blocks if prompt and blocks and size else FULL

    def waits(step: StepRecord) -> bool:
        if not step.waiting or step.kv_usage >= FULL:
            return bool(step.waiting)
        spare = config.get("max_num_seqs") and budget and not _slots_taken(step, config) and step.tokens < budget
        return bool(spare) and step.kv_usage > roomless

    return [step for step in _steps(trace) if waits(step)]


def _slots_taken(step: StepRecord, config: dict[str, Any]) -> bool:
    slots = config.get("max_num_seqs")
    return slots is not None and step.running >= int(slots)


def _stages(done: list[RequestRecord]) -> dict[str, dict[str, float | None]]:
    total = sum(r.e2e_ms or 0.0 for r in done)
    out: dict[str, dict[str, float | None]] = {}
    for stage in STAGES:
        values = [ms for r in done if (ms := r.stage(stage.key).duration_ms) is not None]
        share = sum(values) / total if values and total else None
        out[stage.key] = {f"{name}_ms": value for name, value in quantiles(values).items()} | {"share": share}
    return out


def typical(records: list[RequestRecord]) -> RequestRecord | None:
    """The record whose end-to-end time is the median of ``records``."""
    done = [r for r in records if r.e2e_ms is not None]
    middle = percentile([r.e2e_ms or 0.0 for r in done], 50)
    return min(done, key=lambda r: abs((r.e2e_ms or 0.0) - (middle or 0.0)), default=None)
