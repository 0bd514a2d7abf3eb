"""Request records → OpenTelemetry spans, finished and with explicit times: a root, twelve stages, nothing invented."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from stagetrace.exporting import RequestRecord, StageRecord, inter_token

Value = str | bool | int | float
SCOPE = InstrumentationScope("stagetrace")
#: Viewers get slow beyond this, and receivers drop what is too large as a whole.
MAX_SPANS = 300
#: Longest string on the wire, in characters.
MAX_TEXT = 1024
#: How many of a request's slowest tokens are events on its decode span.
SLOW_TOKENS = 5
#: Stages of the call itself, which its sequences share.
SHARED = ("http_receive", "chat_template", "tokenize")
#: Stage facts that have a name in the GenAI conventions; they go on the root under it.
_GEN_AI = {
    "temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p", "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
}  # fmt: skip


def trace(records: Sequence[RequestRecord], resource: Resource, provider: str | None = None) -> list[ReadableSpan]:
    """The spans of one call: ``records`` are its sequences, of which there is one unless ``n`` > 1.

    Sequences that would lead beyond ``MAX_SPANS`` are left out; the root says how many.
    """
    first = records[0]
    build = _Builder(resource, int(first.trace_id, 16), int(first.span_id, 16))
    spans = [build.stage(row, first, build.root, "") for row in first.stages if row.key in SHARED and _timed(row)]
    folded = 0
    for record in records:
        rows = [row for row in record.stages if row.key not in SHARED and _timed(row)]
        if len(spans) + len(rows) + 2 > MAX_SPANS:
            folded += 1
            continue
        above, salt = build.root, str(record.sequence)
        if len(records) > 1:
            spans.append(_sequence(build, record))
            above = build.id(build.root, f"sequence {record.sequence}")
        spans += [build.stage(row, record, above, salt) for row in rows]
    return [_root(build, records, provider, folded), *spans]


@dataclass(frozen=True)
class _Builder:
    """Makes spans of one trace."""

    resource: Resource
    trace_id: int
    root: int

    def id(self, above: int, name: str) -> int:
        """A span id, never 0, that is the same whenever the same trace is exported."""
        digest = blake2b(above.to_bytes(8, "big") + name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") or 1

    def context(self, span_id: int, remote: bool = False) -> SpanContext:
        return SpanContext(self.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))

    def span(
        self, name: str, span_id: int, parent: SpanContext | None, times: tuple[int, int], values: dict[str, Any],
        **more: Any,
    ) -> ReadableSpan:  # fmt: skip
        return ReadableSpan(
            name[:MAX_TEXT], self.context(span_id), parent, self.resource, attributes=clean(values),
            start_time=times[0], end_time=max(times[1], times[0] + 1), instrumentation_scope=SCOPE, **more,
        )  # fmt: skip

    def stage(self, row: StageRecord, record: RequestRecord, above: int, salt: str) -> ReadableSpan:
        """A stage's span covers it from its first to its last moment; what it took is ``stagetrace.duration_ms``."""
        start = record.start_unix_ns + round((row.start_ms or 0.0) * 1e6)
        values: dict[str, Any] = {
            "stagetrace.stage.number": row.number, "stagetrace.state": row.state, "stagetrace.source": row.source,
            "stagetrace.duration_ms": row.duration_ms, **flat("stagetrace", row.attributes),
        }  # fmt: skip
        times = (start, start + round(_extent(row, record) * 1e6))
        events = slow_tokens(record) if row.key == "decode" else []
        above_it = self.context(above)
        return self.span(row.key, self.id(above, row.key + salt), above_it, times, values, events=events)


def slow_tokens(record: RequestRecord) -> list[Event]:
    """The tokens after the first that were waited for longest, in order."""
    gaps = list(enumerate(inter_token(record.token_times_ms), 1))
    worst = heapq.nlargest(SLOW_TOKENS, gaps, key=lambda gap: gap[1])
    return [
        Event(
            "stagetrace.slow_token",
            {"stagetrace.token.index": index, "stagetrace.token.gap_ms": gap},
            record.start_unix_ns + round(record.token_times_ms[index] * 1e6),
        )
        for index, gap in sorted(worst)
        if gap > 0
    ]


def _root(build: _Builder, records: Sequence[RequestRecord], provider: str | None, folded: int) -> ReadableSpan:
    first = records[0]
    parent = build.context(int(first.parent_span_id, 16), remote=True) if first.parent_span_id else None
    failed = any(record.status == "error" for record in records)
    values = {
        **_root_values(records),
        "gen_ai.provider.name": provider,
        "error.type": "_OTHER" if failed else None,
        "stagetrace.sequences_left_out": folded or None,
    }
    return build.span(
        f"{first.operation} {first.model}" if first.model else first.operation,
        build.root, parent, (first.start_unix_ns, max(_end(record) for record in records)), values,
        kind=SpanKind.SERVER, status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
    )  # fmt: skip


def _root_values(records: Sequence[RequestRecord]) -> dict[str, Any]:
    first = records[0]
    counted = [record.output_tokens for record in records if record.output_tokens is not None]
    found: dict[str, Any] = {
        "gen_ai.operation.name": first.operation,
        "gen_ai.request.model": first.model,
        "gen_ai.response.model": first.model,
        "gen_ai.response.id": first.request_id,
        "gen_ai.usage.input_tokens": first.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(counted) if counted else None,
        "gen_ai.usage.cache_read.input_tokens": first.cached_tokens,
        "gen_ai.response.finish_reasons": [r.finish_reason for r in records if r.finish_reason],
        "http.route": first.stage("http_receive").attributes.get("route"),
        "stagetrace.status": first.status,
        "stagetrace.request_id": first.external_id,
        "stagetrace.internal_id": first.internal_id,
        **_timers(first),
    }
    for row in first.stages:
        for fact, name in _GEN_AI.items():
            value = row.attributes.get(fact)
            if value is not None and (fact, value) != ("top_k", 0):  # which stands for none
                found[name] = value
        if not _timed(row):
            found[f"stagetrace.stage.{row.key}.state"] = row.state
    return found


def _timers(record: RequestRecord) -> dict[str, Value]:
    """The timers of a sequence, under our own names: no convention defines them on spans."""
    values: dict[str, Any] = {
        "ttft_ms": record.ttft_ms, "ttft_kind": record.ttft_kind, "queue_ms": record.queue_ms,
        "prefill_ms": record.prefill_ms, "itl_ms": record.itl_ms, "coverage": record.coverage,
        "coverage_ttft": record.coverage_ttft, "unattributed_ms": record.unattributed_ms, "gaps_ms": record.gaps_ms,
        "preemptions": record.preemptions, "active_stage": record.active_stage,
    }  # fmt: skip
    return flat("stagetrace", values)


def _sequence(build: _Builder, record: RequestRecord) -> ReadableSpan:
    name = f"sequence {record.sequence}"
    starts = [r.start_ms for r in record.stages if r.key not in SHARED and r.start_ms is not None]
    times = (record.start_unix_ns + round(min(starts, default=0.0) * 1e6), _end(record))
    values = {
        "stagetrace.sequence": record.sequence, "stagetrace.status": record.status,
        "stagetrace.internal_id": record.internal_id, "gen_ai.usage.output_tokens": record.output_tokens,
        **_timers(record),
    }  # fmt: skip
    return build.span(name, build.id(build.root, name), build.context(build.root), times, values)


def flat(prefix: str, values: dict[str, Any]) -> dict[str, Value]:
    """Dictionaries become dotted names; what no attribute can hold is left out."""
    found: dict[str, Value] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            found.update(flat(name, value))
        elif isinstance(value, str | bool | int | float):
            found[name] = value
    return found


def clean(values: dict[str, Any]) -> dict[str, Any]:
    """Attributes as receivers take them: nothing unknown or empty, no lone surrogates, no integer beyond 64 bits."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode()[:MAX_TEXT]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            value = float(value)
        if value not in (None, "", []):
            found[name] = value
    return found


def _timed(row: StageRecord) -> bool:
    return row.start_ms is not None and row.duration_ms is not None


def _extent(row: StageRecord, record: RequestRecord) -> float:
    """From a stage's first to its last moment, ms. Prefill's duration leaves out the embedding and others' steps."""
    took = row.duration_ms or 0.0
    if row.key == "prefill":
        took += (row.attributes.get("gaps_ms") or 0.0) + (record.stage("embedding").duration_ms or 0.0)
    return took


def _end(record: RequestRecord) -> int:
    """The end of a call, or of the last thing known of one that never ended."""
    last = max(((r.start_ms or 0.0) + _extent(r, record) for r in record.stages if _timed(r)), default=0.0)
    return record.start_unix_ns + round((last if record.e2e_ms is None else record.e2e_ms) * 1e6)
