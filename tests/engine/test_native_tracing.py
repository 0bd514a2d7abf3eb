"""The engine's own tracing beside ours: one trace per request, its span a child of our root."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.engine.conftest import Live, Starter
from tests.engine.serving import run_many
from tests.invariants import violations
from tests.receivers import Receiver, check_rules, receiver

CALLER = ("c" * 32, "d" * 16)


@pytest.fixture(scope="module")
def sink() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture(scope="module")
def live(starter: Starter, sink: Receiver) -> Iterator[Live]:
    """A server that traces by itself, and whose records are exported to the same place."""
    settings = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200",
    }  # fmt: skip
    flag = ("--otlp-traces-endpoint", f"{sink.url}/v1/traces")
    with closing(starter.start("plain", traced=True, extra=flag, **settings)) as serving:
        yield next(serving)


def test_one_trace_with_the_engine_s_span_below_ours(live: Live, sink: Receiver) -> None:
    bodies = [live.body(60, 6, seed=1), live.body(60, 6, seed=2, chat=False, stream=False), live.body(60, 6, seed=3)]
    brought = [{"traceparent": f"00-{CALLER[0]}-{CALLER[1]}-01", "tracestate": "v=1"}, {}, {}]
    results = run_many(live.port, bodies, 3, brought)
    records = live.records(results)
    until = time.monotonic() + 30
    while sum(span.name == "llm_request" for span in sink.spans()) < 3 or len(roots(sink)) < 3:
        assert time.monotonic() < until, [span.name for span in sink.spans()]
        time.sleep(0.1)
    assert (records[0].trace_id, records[0].parent_span_id) == CALLER
    assert [r.parent_span_id for r in records[1:]] == [None, None], "start-up spans of the engine's are no parents"
    theirs = [span for span in sink.spans() if span.name == "llm_request"]
    assert len(theirs) == 3
    for record in records:
        assert violations(record, complete=True) == []
        (native,) = [span for span in theirs if span.trace_id.hex() == record.trace_id]
        assert native.parent_span_id.hex() == record.span_id
        (root,) = [span for span in roots(sink) if span.trace_id.hex() == record.trace_id]
        assert (root.span_id.hex(), root.parent_span_id.hex()) == (record.span_id, record.parent_span_id or "")
        # Theirs starts at the engine's door and ends with the last output: within ours, by two clocks.
        assert root.start_time_unix_nano - 5e6 <= native.start_time_unix_nano
        assert native.end_time_unix_nano <= root.end_time_unix_nano + 5e6
    check_rules([message for message in sink.traces() if b"stagetrace" in message.SerializeToString()])


def roots(sink: Receiver) -> list[object]:
    """Our roots among the spans that came."""
    return [s for s in sink.spans() if any(a.key == "stagetrace.status" for a in s.attributes)]
