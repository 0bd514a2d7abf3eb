"""Your own TracerProvider: a request is a live span of it, below the span you are in; its stages follow afterwards.

    python own_provider.py MODEL

Your ids, sampler, span processors and exporters; here one that prints a line for each span.
"""

from __future__ import annotations

import sys

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

import stagetrace


def line(span: ReadableSpan) -> str:
    parent = f"{span.parent.span_id:016x}" if span.parent else "-"
    took_ms = ((span.end_time or 0) - (span.start_time or 0)) / 1e6
    return f"{span.context.span_id:016x} below {parent:16} {took_ms:9.3f} ms {span.name}\n"


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(formatter=line)))
    stagetrace.instrument(store="traces.db", tracer_provider=provider)

    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], max_model_len=1024)
    with provider.get_tracer("mine").start_as_current_span("nightly batch"):
        llm.generate(["Hello", "Good evening"], SamplingParams(max_tokens=16))
    stagetrace.flush()  # the last requests' spans end a moment after the requests
    provider.shutdown()


if __name__ == "__main__":  # the engine may start its processes by importing this file again
    main()
