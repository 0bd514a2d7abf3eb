"""The engine's own tracing beside ours: one trace per request, its span a child of our root."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from stagetrace.exporting import chosen
from tests.engine.conftest import Live, Starter
from tests.engine.serving import run_many
from tests.engine.ways import COMPLETION, came_in
from tests.receivers import Receiver, check_rules, receiver

CALLER, SILENT = ("c" * 32, "d" * 16), ("e" * 32, "f" * 16)


@pytest.fixture(scope="module")
def sink() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture(scope="module")
def live(starter: Starter, sink: Receiver) -> Iterator[Live]:
    """A server that traces by itself, and half of whose records are exported to the same place."""
    settings = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200",
    }  # fmt: skip
    flag = ("--otlp-traces-endpoint", f"{sink.url}/v1/traces")
    with closing(starter.start("plain", traced=True, extra=flag, options=("--sample", "0.5"), **settings)) as serving:
        yield next(serving)


def test_one_trace_with_the_engine_s_span_below_ours_and_no_orphans(live: Live, sink: Receiver) -> None:
    bodies = [live.body(60, 6, seed=n, chat=n % 2 == 0, stream=n % 3 > 0) for n in range(16)]
    brought = [
        {"traceparent": f"00-{CALLER[0]}-{CALLER[1]}-01", "tracestate": "v=1"},
        {"traceparent": f"00-{SILENT[0]}-{SILENT[1]}-00"},
        *[{} for _ in bodies[2:]],
    ]
    records = live.records(run_many(live.port, bodies, 3, brought))
    sampled, unsampled, *others = records
    for n, record in enumerate(records):  # never the child of a span that the engine starts with
        came_in([record], *(COMPLETION if n % 2 else ()), parent={0: CALLER, 1: SILENT}.get(n))
    sent = [sampled, *(r for r in others if chosen(r.trace_id, 0.5))]
    unsent = [r for r in others if not chosen(r.trace_id, 0.5)]
    assert len(sent) > 1 and unsent, "once in 8,000 times"
    until = time.monotonic() + 30
    while len(theirs(sink)) < len(records) - 1 or len(roots(sink)) < len(sent):
        assert time.monotonic() < until, [span.name for span in sink.spans()]
        time.sleep(0.1)
    for record in sent:
        (native,) = [span for span in theirs(sink) if span.trace_id.hex() == record.trace_id]
        assert native.parent_span_id.hex() == record.span_id
        (root,) = [span for span in roots(sink) if span.trace_id.hex() == record.trace_id]
        assert (root.span_id.hex(), root.parent_span_id.hex()) == (record.span_id, record.parent_span_id or "")
        assert root.trace_state == (record.tracestate or "")
        # Theirs starts at the engine's door and ends with the last output: within ours, by two clocks.
        assert root.start_time_unix_nano - 5e6 <= native.start_time_unix_nano
        assert native.end_time_unix_nano <= root.end_time_unix_nano + 5e6
    # Of the rest, the engine's span is what it is without us: nobody's child, or not there where the caller said so.
    free = [span for span in theirs(sink) if not span.parent_span_id]
    assert len(theirs(sink)) == len(sent) + len(free) and len(free) == len(unsent)
    assert not {span.trace_id.hex() for span in sink.spans()} & {r.trace_id for r in (unsampled, *unsent)}
    check_rules([message for message in sink.traces() if b"stagetrace" in message.SerializeToString()])


def theirs(sink: Receiver) -> list[Any]:
    """The engine's spans among those that came."""
    return [span for span in sink.spans() if span.name == "llm_request"]


def roots(sink: Receiver) -> list[Any]:
    """Our roots among the spans that came."""
    return [s for s in sink.spans() if any(a.key == "stagetrace.status" for a in s.attributes)]
