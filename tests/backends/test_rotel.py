"""Our OTLP through a collector that others wrote (rotel, in Rust): over gRPC and HTTP, in and out, nothing lost."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagetrace.collect import sinks
from stagetrace.exporting import Health, Options, finished
from stagetrace.model import RequestRecord, RunRecord
from tests.backends.rotel import Rotel, rotel_agent
from tests.receivers import attributes, check_rules
from tests.unit.scripted import MS, Ask, Script

CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def rotel(tmp_path: Path) -> Iterator[Rotel]:
    with rotel_agent(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    """A hundred calls: plain, of several sequences, with a caller, refused, given up."""
    asks = [Ask(at=n * MS, output=4) for n in range(80)]
    asks += [Ask(at=(80 + n) * MS, n=3, output=4) for n in range(8)]
    asks += [Ask(at=(90 + n) * MS, output=4, traceparent=CALLER.replace("a" * 8, f"{n + 1:08x}")) for n in range(6)]
    asks += [Ask(at=(96 + n) * MS, refuse="tokenize") for n in range(3)]
    asks += [Ask(at=(99 + n) * MS, output=200, abort_at=(180 + n) * MS) for n in range(3)]
    return Script(slots=32).run(*asks).records()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_hundred_traces_in_are_a_hundred_out(
    rotel: Rotel, records: list[RequestRecord], protocol: str, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    said: list[str] = []
    health = Health()
    url = rotel.grpc if protocol == "grpc" else rotel.http
    (sink,) = sinks.build(Options(otlp=url, health=health), os.environ, said.append)
    sink.run(RunRecord("s", "paper", "1", "tiny"))
    for call in finished(records):
        sink.requests(call)
    sink.close()
    assert said == [] and not health.spans_dropped
    expected = sum(sum(row.duration_ms is not None for row in r.stages) for r in records if r.sequence == 0) + 100
    expected += sum(1 + sum(row.duration_ms is not None for row in r.stages[3:]) for r in records if r.sequence > 0)
    expected += 8  # the span of the first of several sequences
    found = rotel.sink.wait(expected)
    assert len(found) == expected
    check_rules(rotel.sink.traces())
    roots = [span for span in found if span.kind == 2]
    assert len(roots) == len({root.trace_id for root in roots}) == 100
    assert {root.trace_id.hex() for root in roots} == {record.trace_id for record in records}
    statuses = Counter(attributes(root)["stagetrace.status"] for root in roots)
    assert statuses == {"ok": 94, "error": 3, "aborted": 3}
    assert sum(root.parent_span_id.hex() == "b" * 16 for root in roots) == 6


def test_metrics_get_through_too(rotel: Rotel, records: list[RequestRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    (sink,) = sinks.build(Options(otlp=rotel.grpc), os.environ, lambda line: None)
    sink.run(RunRecord("s", "paper", "1", "tiny"))
    sink.requests(records)
    sink.close()
    until = time.monotonic() + 20
    while "gen_ai.server.request.duration" not in rotel.sink.metrics() and time.monotonic() < until:
        time.sleep(0.05)
    points = rotel.sink.metrics()["gen_ai.server.request.duration"].histogram.data_points
    assert sum(point.count for point in points) == 100
