"""A mark against an OpenTelemetry span, and against reading the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from stagetrace import marks
from stagetrace.runtime import recorder

from .clocks import per_call, settle_heap
from .figures import Options, Outcome, Progress
from .recording import private_session
from .stats import Spread, interleave, median, ratios

ROUNDS = 150
MARKS, SPANS, CLOCKS = 4000, 200, 20000
SPAN_LIMIT = 1 / 30
CLOCK_LIMIT = 15.0


class Nowhere(SpanExporter):
    """Takes spans and drops them: the export itself is not what is measured."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Count as exported."""
        return SpanExportResult.SUCCESS


def run(_options: Options, progress: Progress) -> Outcome:
    """Measure the three side by side."""
    progress.of(ROUNDS)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    tracer = provider.get_tracer("benchmarks")
    arms = (per_call(write_marks, MARKS), per_call(lambda n: make_spans(tracer, n), SPANS), per_call(clock, CLOCKS))
    with private_session():
        interleave(arms, 3, lambda: None)
        settle_heap()
        mark, span, bare = interleave(arms, ROUNDS, progress.tick)
    provider.shutdown()
    outcome = Outcome()
    outcome.add(
        "a mark against an OpenTelemetry span", "fraction", Spread.of(ratios(mark, span)), SPAN_LIMIT,
        f"{median(mark):,.0f} ns against {median(span):,.0f} ns",
    )  # fmt: skip
    outcome.add(
        "a mark against a bare time.monotonic_ns()", "ratio", Spread.of(ratios(mark, bare)), CLOCK_LIMIT,
        f"{median(mark):,.0f} ns against {median(bare):,.0f} ns",
    )  # fmt: skip
    outcome.notes.append(
        "A span: start_span, three attributes, end, a BatchSpanProcessor whose exporter drops everything. Counted is "
        "the CPU of the calling thread only; the span's export thread, which shares its interpreter, comes on top."
    )
    return outcome


def write_marks(count: int) -> None:
    """Write marks as a hook does."""
    mark = recorder.mark
    for _ in range(count):
        mark(marks.STEP, 0x12345678_00000001, 1_000_000, 64 | 64 << 32, 64, 500_000)


def make_spans(tracer: Any, count: int) -> None:
    """Make spans as an instrumented engine would."""
    start = tracer.start_span
    for _ in range(count):
        span = start("step")
        span.set_attribute("batch", 64)
        span.set_attribute("tokens", 64)
        span.set_attribute("running", 64)
        span.end()


def clock(count: int) -> None:
    """Read the clock."""
    read = time.monotonic_ns
    for _ in range(count):
        read()
