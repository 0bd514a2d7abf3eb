"""Roots as live spans of the host's own TracerProvider; what is known only afterwards is added when a call is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stagetrace.exporting import Caller, GpuSample, Health, RequestRecord, RunRecord, StepRecord, calls

from . import spans

#: A running call is heard of every second. One that is not has lost its marks: its span ends without stages.
LOST_S = 60.0
#: The provider has its own: nothing is cut before it gets there.
_NO_RESOURCE, _NO_LIMITS = Resource({}), SpanLimits(*[SpanLimits.UNSET] * 8)
_propagator = TraceContextTextMapPropagator()


class LiveRoot:
    """See :class:`stagetrace.exporting.LiveRoot`."""

    def __init__(self, span: Span, above: Context) -> None:
        ids = span.get_span_context()
        self.trace_id, self.span_id, self.sampled = ids.trace_id, ids.span_id, ids.trace_flags.sampled
        self.span = span
        self.context = set_span_in_context(span, above)
        #: The latest that was heard of it, and when.
        self.records: Sequence[RequestRecord] = ()
        self.heard_s = time.monotonic()

    def attach(self) -> object:
        """Make it the current span of the running code."""
        return contexts.attach(self.context)

    def detach(self, token: Any) -> None:
        """Undo that."""
        contexts.detach(token)


class LiveSpans:
    """See :class:`stagetrace.exporting.LiveSink`. Its sink's half runs in the collector's thread."""

    def __init__(self, provider: TracerProvider, health: Health) -> None:
        self._tracer = provider.get_tracer(spans.SCOPE.name)
        self._health = health
        self._open: dict[int, LiveRoot] = {}
        self._engine: str | None = None
        self._model: str | None = None

    def begin(self, operation: str, caller: Caller | None, start_unix_ns: int) -> LiveRoot | None:
        """Start the span of a call."""
        above = _above(caller)
        known = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": self._engine,
            "gen_ai.request.model": self._model,
        }
        name = f"{operation} {self._model}" if self._model else operation
        span = self._tracer.start_span(name, above, SpanKind.SERVER, spans.clean(known), start_time=start_unix_ns)
        root = LiveRoot(span, above)
        if not self._usable(root, caller):
            return None
        if span.is_recording():
            self._open[root.span_id] = root
        return root

    def run(self, run: RunRecord) -> None:
        """Note whose records these are."""
        self._engine, self._model = run.engine, run.model

    def requests(self, records: list[RequestRecord]) -> None:
        """End the spans of the calls that are over."""
        for call in calls(records):
            root = self._open.get(int(call[0].span_id, 16))
            if root is None or f"{root.trace_id:032x}" != call[0].trace_id:
                continue
            root.records, root.heard_s = call, time.monotonic()
            if all(record.status != "in_flight" for record in call):
                self._end(root)

    def steps(self, records: list[StepRecord]) -> None:
        """No span is about these."""

    def gpu(self, samples: list[GpuSample]) -> None:
        """Nor about these."""

    def flush(self) -> None:
        """End what has not been heard of for too long."""
        for root in list(self._open.values()):
            if time.monotonic() - root.heard_s > LOST_S:
                self._end(root)

    def close(self) -> None:
        """End the spans of the calls that still run, with what is known of them by now."""
        for root in list(self._open.values()):
            self._end(root)

    def _usable(self, root: LiveRoot, caller: Caller | None) -> bool:
        """Whether it has ids of its own: a provider that does nothing hands back the caller's, or none."""
        if not root.span.get_span_context().is_valid or (caller and f"{root.span_id:016x}" == caller.span.span_id):
            return False
        if root.span_id in self._open or (caller and f"{root.trace_id:032x}" != caller.span.trace_id):
            root.span.end()
            return False
        return True

    def _end(self, root: LiveRoot) -> None:
        """Add what is known of a call to its span, and end it. A host's span processor may raise in any of this."""
        self._open.pop(root.span_id, None)
        lost, over = self._health.spans_dropped, all(record.status != "in_flight" for record in root.records)
        made: list[ReadableSpan] = []
        try:
            try:
                if root.records:
                    made = spans.trace(root.records, _NO_RESOURCE, self._engine, _NO_LIMITS, lost)
                    self._fill(root, made)
            finally:
                root.span.end(made[0].end_time if made and over else None)
        except Exception as error:
            lost[type(error).__name__] += max(len(made), 1)

    def _fill(self, root: LiveRoot, made: Sequence[ReadableSpan]) -> None:
        """Give the root what the exported one has, and the same children."""
        first, *rest = made
        root.span.update_name(first.name)
        root.span.set_attributes(dict(first.attributes or {}))
        for link in first.links:
            root.span.add_link(link.context, link.attributes)
        _say(root.span, first)
        below = {first.context.span_id: root.context}
        for each in rest:
            above = below[each.parent.span_id if each.parent else first.context.span_id]
            child = self._tracer.start_span(
                each.name, above, each.kind, dict(each.attributes or {}), each.links, each.start_time
            )
            _say(child, each)
            below[each.context.span_id] = set_span_in_context(child, root.context)
            child.end(each.end_time)


def _say(span: Span, made: ReadableSpan) -> None:
    """What is added to spans that have begun, whatever they are."""
    for event in made.events:
        span.add_event(event.name, event.attributes, event.timestamp)
    span.set_status(made.status)


def _above(caller: Caller | None) -> Context:
    """The context a root begins in: the caller's span in it, or none; what else the host put there stays."""
    here = contexts.get_current()
    if caller is None:
        return set_span_in_context(INVALID_SPAN, here)
    if not caller.explicit:
        return here
    headers = {"traceparent": caller.traceparent, "tracestate": caller.tracestate}
    return _propagator.extract(headers, here)
