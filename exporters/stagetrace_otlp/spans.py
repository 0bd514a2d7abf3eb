"""Request records → OpenTelemetry spans, finished and with explicit times: a root, twelve stages, nothing invented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from stagetrace.exporting import RequestRecord, StageRecord

from .pipeline import weight
from .policy import refused

Value = str | bool | int | float
SCOPE = InstrumentationScope("stagetrace")
#: Viewers get slow beyond this.
MAX_SPANS = 300
#: Estimated, and without what all sequences share. Tempo drops a trace of more than 5 MB as a whole.
MAX_BYTES = 4_000_000
#: Longest string on the wire, in characters.
MAX_TEXT = 1024
#: What is said of each request whose prefill stalled another one's decode.
_CULPRIT = ("request_id", "tokens", "ms")
#: Stages of the call itself, which its sequences share.
SHARED = ("http_receive", "chat_template", "tokenize")
#: Stage facts that have a name in the GenAI conventions; they go on the root under it.
_GEN_AI = {
    "temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p", "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
}  # fmt: skip


def trace(
    records: Sequence[RequestRecord], resource: Resource, provider: str | None = None,
    limits: SpanLimits | None = None, dropped: Counter[str] | None = None,
) -> list[ReadableSpan]:  # fmt: skip
    """The spans of one call: ``records`` are its sequences, of which there is one unless ``n`` > 1.

    ``limits`` are those of the environment (``OTEL_SPAN_*_LIMIT``, ``OTEL_ATTRIBUTE_*``) where None. Sequences that
    would lead beyond ``MAX_SPANS`` or ``MAX_BYTES`` are left out: the root says how many, ``dropped`` counts their
    spans by reason.
    """
    first = records[0]
    build = _Builder(resource, int(first.trace_id, 16), int(first.span_id, 16), _state(first), limits or SpanLimits())
    spans = [build.stage(row, first, build.root, "") for row in first.stages if row.key in SHARED and _timed(row)]
    several = len(records) > 1
    size, sequences, left_out = 0, 0, Counter[str]()
    for record in records:
        rows = [row for row in record.stages if row.key not in SHARED and _timed(row)]
        count = len(rows) + several
        reason = "trace_spans" if 1 + len(spans) + count > MAX_SPANS else ""
        made = [] if reason else _sequence(build, record, rows, several)
        # One sequence alone is a dozen spans, and weighing takes time.
        size += (more := sum(map(weight, made)) if several else 0)
        if size > MAX_BYTES:
            reason, size = "trace_bytes", size - more
        if reason:
            sequences, left_out[reason] = sequences + 1, left_out[reason] + count
        else:
            spans += made
    if dropped is not None:
        dropped.update(left_out)
    cut = {"sequences_left_out": sequences or None, "spans_left_out": left_out.total() or None}
    return [_root(build, records, provider, flat("stagetrace", cut)), *spans]


@dataclass(frozen=True)
class _Builder:
    """Makes spans of one trace."""

    resource: Resource
    trace_id: int
    root: int
    state: TraceState | None
    limits: SpanLimits

    def id(self, above: int, name: str) -> int:
        """A span id, never 0, that is the same whenever the same trace is exported."""
        digest = blake2b(above.to_bytes(8, "big") + name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") or 1

    def context(self, span_id: int, remote: bool = False) -> SpanContext:
        return SpanContext(self.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED), self.state)

    def span(
        self, name: str, span_id: int, parent: SpanContext | None, times: tuple[int, int], values: dict[str, Any],
        events: Sequence[Event] = (), links: Sequence[Link] = (), **more: Any,
    ) -> ReadableSpan:  # fmt: skip
        most = self.limits
        return ReadableSpan(
            name[:MAX_TEXT], self.context(span_id), parent, self.resource,
            attributes=bounded(values, most.max_span_attributes, most.max_span_attribute_length),
            events=BoundedList.from_seq(most.max_events, events) if events else (),
            links=BoundedList.from_seq(most.max_links, links) if links else (),
            start_time=times[0], end_time=max(times[1], times[0] + 1), instrumentation_scope=SCOPE, **more,
        )  # fmt: skip

    def event(self, name: str, time: int, values: dict[str, Any]) -> Event:
        return Event(name, bounded(values, self.limits.max_event_attributes, self.limits.max_attribute_length), time)

    def link(self, context: SpanContext, values: dict[str, Any]) -> Link:
        return Link(context, bounded(values, self.limits.max_link_attributes, self.limits.max_attribute_length))

    def stage(self, row: StageRecord, record: RequestRecord, above: int, salt: str) -> ReadableSpan:
        """A stage's span covers it from its first to its last moment; what it took is ``stagetrace.duration_ms``."""
        start = record.start_unix_ns + round((row.start_ms or 0.0) * 1e6)
        values: dict[str, Any] = {
            "stagetrace.stage.number": row.number, "stagetrace.state": row.state, "stagetrace.source": row.source,
            "stagetrace.duration_ms": row.duration_ms, **flat("stagetrace", row.attributes),
        }  # fmt: skip
        times = (start, start + round(_extent(row, record) * 1e6))
        decode = row.key == "decode"
        return self.span(
            row.key, self.id(above, row.key + salt), self.context(above), times, values,
            events=slow_steps(self, record) if decode else (), links=culprits(self, record) if decode else (),
        )  # fmt: skip


def slow_steps(build: _Builder, record: RequestRecord) -> list[Event]:
    """The steps of its decode that were waited for longest, in order, each when its first token arrived."""
    return [
        build.event(
            "stagetrace.slow_step",
            record.start_unix_ns + round(step["at_ms"] * 1e6),
            {
                "stagetrace.token.index": step["token"], "stagetrace.token.gap_ms": step["gap_ms"],
                **flat("stagetrace.step", {k: v for k, v in step.items() if k not in ("token", "gap_ms", "at_ms")}),
            },
        )
        for step in record.stage("decode").attributes.get("worst_steps") or ()
    ]  # fmt: skip


def culprits(build: _Builder, record: RequestRecord) -> list[Link]:
    """The requests whose prefill stalled its decode, by their roots."""
    return [
        build.link(
            SpanContext(int(one["trace_id"], 16), int(one["span_id"], 16), True),
            {"stagetrace.link": "stalled_by", **flat("stagetrace.stalled_by", {k: one[k] for k in _CULPRIT})},
        )
        for one in record.stage("decode").attributes.get("stalled_by") or ()
    ]


def _root(
    build: _Builder, records: Sequence[RequestRecord], provider: str | None, cut: dict[str, Value]
) -> ReadableSpan:
    first = records[0]
    parent = build.context(int(first.parent_span_id, 16), remote=True) if first.parent_span_id else None
    # What matters most comes first: a limit to the number of attributes takes the last.
    values = {"error.type": _error(records), **cut, "gen_ai.provider.name": provider, **_root_values(records)}
    return build.span(
        f"{first.operation} {first.model}" if first.model else first.operation,
        build.root, parent, (first.start_unix_ns, max(_end(record) for record in records)), values,
        links=_links(build, first), kind=SpanKind.SERVER, status=_status(records),
    )  # fmt: skip


def _links(build: _Builder, record: RequestRecord) -> list[Link]:
    """The caller that is not trusted to be a parent."""
    if not record.link_trace_id or not record.link_span_id:
        return []
    ids = int(record.link_trace_id, 16), int(record.link_span_id, 16)
    caller = SpanContext(*ids, True, trace_state=_parsed(record.tracestate))
    return [build.link(caller, {"stagetrace.link": "caller"})]


def _state(record: RequestRecord) -> TraceState | None:
    """The trace's ``tracestate``: the caller's, if it is the caller's trace."""
    return _parsed(record.tracestate) if record.parent_span_id else None


def _parsed(tracestate: str | None) -> TraceState | None:
    return TraceState.from_header([tracestate]) if tracestate else None


def _error(records: Sequence[RequestRecord]) -> str | None:
    return next((record.error_type for record in records if record.error_type), None)


def _status(records: Sequence[RequestRecord]) -> Status:
    """``Error`` where the answer did not get out in full, unless the request was to blame for it (4xx).

    The HTTP conventions want it so of a server's span, see docs/decisions/0009-errors-on-the-wire.md.
    """
    return Status(StatusCode.ERROR if _error(records) and not refused(records) else StatusCode.UNSET)


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
        "http.response.status_code": first.http_status,
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
        "preemptions": record.preemptions, "active_stage": record.active_stage, "gpu": record.gpu,
    }  # fmt: skip
    return flat("stagetrace", values)


def _sequence(build: _Builder, record: RequestRecord, rows: Sequence[StageRecord], several: bool) -> list[ReadableSpan]:
    """The spans of one sequence's own stages; below one for itself where there are several."""
    salt = str(record.sequence)
    if not several:
        return [build.stage(row, record, build.root, salt) for row in rows]
    above = build.id(build.root, f"sequence {record.sequence}")
    return [_subroot(build, record, above), *(build.stage(row, record, above, salt) for row in rows)]


def _subroot(build: _Builder, record: RequestRecord, span_id: int) -> ReadableSpan:
    starts = [r.start_ms for r in record.stages if r.key not in SHARED and r.start_ms is not None]
    times = (record.start_unix_ns + round(min(starts, default=0.0) * 1e6), _end(record))
    values = {
        "error.type": record.error_type, "stagetrace.sequence": record.sequence, "stagetrace.status": record.status,
        "stagetrace.internal_id": record.internal_id, "gen_ai.usage.output_tokens": record.output_tokens,
        **_timers(record),
    }  # fmt: skip
    name, above = f"sequence {record.sequence}", build.context(build.root)
    return build.span(name, span_id, above, times, values, status=_status([record]))


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


def bounded(values: dict[str, Any], most: int | None, length: int | None) -> Mapping[str, Any]:
    """The first ``most`` attributes, texts cut to ``length``."""
    cleaned = clean(values)
    if length is None and (most is None or len(cleaned) <= most):
        return cleaned
    # The SDK's own type, which tells exporters how many are missing. Left to itself it would keep the last ones.
    kept = BoundedAttributes(most, dict(islice(cleaned.items(), most)), max_value_len=length)
    kept.dropped = len(cleaned) - len(kept)
    return kept


def clean(values: dict[str, Any]) -> dict[str, Any]:
    """Attributes as receivers take them: nothing unknown or empty, no lone surrogates, no integer beyond 64 bits."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, str):
            value = value.encode("utf-8", "replace").decode()[:MAX_TEXT]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            value = float(value)
        elif isinstance(value, float):
            value = round(value, 9)  # 13.32246 rather than 13.322460000000035, a difference of two times
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
