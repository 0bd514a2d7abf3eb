"""A host with a TracerProvider of its own, and what is peculiar about it."""

from __future__ import annotations

import itertools

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import IdGenerator, ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from stagetrace import parents
from stagetrace.exporting import Health
from stagetrace_otlp.live import LiveRoot, LiveSpans

START = 1_700_000_000 * 10**9


class Counted(IdGenerator):
    """Ids that nobody else would give."""

    def __init__(self, step: int = 1) -> None:
        self._next = itertools.count(0x1000, step)

    def generate_trace_id(self) -> int:
        return 0xABC

    def generate_span_id(self) -> int:
        return next(self._next)


class Noting(SpanProcessor):
    """Notes what it is told, and raises for spans whose name is in ``raises``."""

    def __init__(self, *raises: str, at: str = "start") -> None:
        self.started: list[str] = []
        self._raises, self._at = raises, at

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.started.append(span.name)
        self._raise("start", span)

    def on_end(self, span: ReadableSpan) -> None:
        self._raise("end", span)

    def _raise(self, at: str, span: ReadableSpan) -> None:
        if at == self._at and span.name in self._raises:
            raise ZeroDivisionError


class Host:
    """A provider of the host's, and what it has exported."""

    def __init__(
        self, *processors: SpanProcessor, sampler: Sampler = ALWAYS_ON, ids: IdGenerator | None = None
    ) -> None:
        self.provider = TracerProvider(
            sampler=sampler, resource=Resource({"service.name": "host"}), id_generator=ids or Counted(),
            shutdown_on_exit=False,
        )  # fmt: skip
        self._memory = InMemorySpanExporter()
        for processor in processors:
            self.provider.add_span_processor(processor)
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.health = Health()
        self.live = LiveSpans(self.provider, self.health)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._memory.get_finished_spans()

    def begin(self, caller: parents.Caller | None = None) -> LiveRoot:
        root = self.live.begin("chat", caller, START)
        assert root is not None
        return root
