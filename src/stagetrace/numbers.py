"""The numbers of a run: four timers and four gauges at p50, p95 and p99, and the facts that give them a meaning."""

from __future__ import annotations

from typing import Any

from .model import SCHEMA, RequestRecord
from .stages import STAGES
from .stats import inter_token, percentile, quantiles, spread
from .store import Trace

Numbers = dict[str, Any]


def numbers(trace: Trace) -> Numbers:
    """Compute the document of ``numbers --json`` (times in ms) from what ``trace`` holds."""
    done = [r for r in trace.requests if r.status == "ok" and r.e2e_ms is not None]
    steps = trace.steps
    usage = [step.kv_usage for step in steps]
    waiting = [float(step.waiting) for step in steps]
    batch = [float(step.batch_size) for step in steps]
    return {
        "schema": SCHEMA,
        "context": _context(trace, done),
        "timers": {
            "queue_ms": quantiles(r.queue_ms for r in done),
            "prefill_ms": quantiles(r.prefill_ms for r in done),
            "ttft_ms": quantiles(r.ttft_ms for r in done),
            "itl_ms": quantiles(gap for r in done for gap in inter_token(r.token_times_ms)),
        },
        "gauges": {
            "kv_cache_utilization": spread(usage),
            "queue_depth": spread(waiting),
            "batch_size": spread(batch),
            "preemptions": sum(r.preemptions for r in trace.requests),
        },
        "saturated": _saturated(usage, waiting),
        "stages": _stages(done),
    }


def _saturated(usage: list[float], waiting: list[float]) -> bool:
    """KV pinned while requests wait: more than a tenth of the steps."""
    pinned = sum(1 for u, w in zip(usage, waiting, strict=True) if u >= 0.95 and w > 0)
    return bool(usage) and pinned > len(usage) / 10


def _context(trace: Trace, done: list[RequestRecord]) -> dict[str, Any]:
    run = trace.runs[-1] if trace.runs else None
    config = run.config if run else {}
    starts = [r.start_unix_ns for r in done]
    ends = [r.start_unix_ns + (r.e2e_ms or 0) * 1e6 for r in done]
    window_s = (max(ends) - min(starts)) / 1e9 if done else 0.0
    tokens = sum(r.output_tokens or 0 for r in done)
    roots: dict[tuple[str, str], float] = {}
    for r in done:  # the sequences of one request count once
        root = r.trace_id, r.span_id
        roots[root] = max(roots.get(root, 0.0), r.e2e_ms or 0.0)
    busy_s = sum(roots.values()) / 1e3
    return {
        "request_rate": len(roots) / window_s if window_s else None,
        "concurrency": busy_s / window_s if window_s else None,
        "prefix_caching": _flag(config.get("prefix_caching")),
        "chunked_prefill": _flag(config.get("chunked_prefill")),
        "max_num_seqs": config.get("max_num_seqs"),
        "engine": run.engine if run else None,
        "engine_version": run.engine_version if run else None,
        "model": run.model if run else None,
        "gpu": config.get("gpu"),
        "requests": len(roots),
        "prompt_tokens": quantiles(float(r.prompt_tokens) for r in done if r.prompt_tokens is not None),
        "output_tokens": quantiles(float(r.output_tokens) for r in done if r.output_tokens is not None),
        "output_tokens_per_s": tokens / window_s if window_s else None,
        "kv_blocks": config.get("kv_blocks"),
        "requests_that_fit": _fit(config, done),
    }


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _fit(config: dict[str, Any], done: list[RequestRecord]) -> int | None:
    """How many requests of the lengths really seen (mean) the KV cache holds at once."""
    blocks, size = config.get("kv_blocks"), config.get("block_size")
    lengths = [(r.prompt_tokens or 0) + (r.output_tokens or 0) for r in done]
    if not blocks or not size or not lengths:
        return None
    each = sum(-(-length // size) for length in lengths) / len(lengths)
    return int(blocks / each) if each else None


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
