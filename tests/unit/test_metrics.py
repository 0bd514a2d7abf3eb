"""The table of instruments, what records say to them, and that both ways out say the same."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from stagetrace import marks
from stagetrace.collect import sinks
from stagetrace.collect.loop import Collector
from stagetrace.exporting import INSTRUMENTS, Engines, Health, Options, finished, of_requests, of_steps
from stagetrace.model import GpuSample, RequestRecord, RunRecord, StepRecord
from stagetrace.recorder import Recorder
from stagetrace.stages import STAGES
from stagetrace.stats import inter_token
from tests.receivers import attributes, receiver
from tests.unit.helpers import wait_until
from tests.unit.scripted import MS, Ask, Script
from tests.unit.stored import card_sample

#: The documented names.
NAMES = {
    "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    "stagetrace.queue.duration", "stagetrace.prefill.duration", "stagetrace.inter_token.duration",
    "stagetrace.stage.duration", "stagetrace.kv_cache.utilization", "stagetrace.queue.depth", "stagetrace.batch.size",
    "stagetrace.preemptions", "stagetrace.marks.dropped", "stagetrace.spans.dropped", "stagetrace.hook.errors",
    "hw.gpu.utilization", "hw.gpu.memory.usage", "hw.gpu.memory.limit", "hw.gpu.memory.utilization", "hw.power",
    "hw.energy", "hw.temperature", "stagetrace.gpu.memory.bandwidth.utilization", "stagetrace.gpu.clock.frequency",
    "stagetrace.gpu.throttled", "stagetrace.gpu.activity",
}  # fmt: skip


def values(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    engines, found = Engines("tiny"), defaultdict(list)
    for call in finished(records):
        for seen in of_requests(call, engines):
            assert set(seen.labels) == set(INSTRUMENTS[seen.name].labels)
            assert seen.labels["model"] == "tiny"
            found[seen.name].append(seen.value)
    return found


def step(number: int, engine: int = 7, **more: int) -> StepRecord:
    return StepRecord(
        step=engine << 32 | number, engine=engine, schedule_ns=(1, 2), batch_size=number, tokens=1, prefill_tokens=0,
        running=1, waiting=number * 2, kv_usage=0.5, **more,
    )  # fmt: skip


def test_the_table_has_the_documented_names_and_buckets_below_ten_milliseconds() -> None:
    assert set(INSTRUMENTS) == NAMES
    for each in INSTRUMENTS.values():
        assert (each.kind == "histogram") == (each.unit == "s") == bool(each.buckets)
        assert list(each.buckets) == sorted(set(each.buckets))
        assert each.kind != "histogram" or sum(bucket < 0.01 for bucket in each.buckets) >= 1
    for name in ("time_to_first_token", "inter_token", "stage.duration"):
        (each,) = (e for e in INSTRUMENTS.values() if name in e.name)
        assert sum(bucket < 0.01 for bucket in each.buckets) >= 5


def test_a_finished_request_says_each_of_its_times_once_in_seconds() -> None:
    (record,) = Script().run(Ask(output=6)).records()
    assert record.e2e_ms and record.ttft_ms and record.queue_ms and record.prefill_ms
    found = values([record])
    assert found["gen_ai.server.request.duration"] == [record.e2e_ms / 1e3]
    assert found["gen_ai.server.time_to_first_token"] == [record.ttft_ms / 1e3]
    assert found["stagetrace.queue.duration"] == [record.queue_ms / 1e3]
    assert found["stagetrace.prefill.duration"] == [record.prefill_ms / 1e3]
    assert found["gen_ai.server.time_per_output_token"] == [(record.e2e_ms - record.ttft_ms) / 5 / 1e3]
    assert found["stagetrace.inter_token.duration"] == [gap / 1e3 for gap in inter_token(record.token_times_ms)]
    assert len(found["stagetrace.stage.duration"]) == len(STAGES)


def test_gauges_fall_when_the_engine_comes_to_rest() -> None:
    script = Script(slots=2)
    assembler = script.run(*(Ask(at=n * MS) for n in range(4)), Ask(at=500 * MS)).assembler()
    for mark, pid in script.read():
        assembler.take(mark, pid)
    steps = assembler.steps()
    idle = [step for step in steps if not step.batch_size]
    assert [(step.running, step.waiting, step.tokens) for step in idle] == [(0, 0, 0)] * 2, "once per rest"
    assert steps[-1] is idle[-1]
    found = {seen.name: seen.value for seen in of_steps(steps, Engines())}
    assert (found["stagetrace.batch.size"], found["stagetrace.queue.depth"]) == (0, 0)


def test_a_running_request_says_nothing_until_it_is_over() -> None:
    (record,) = Script().run(Ask()).records()
    assert not values([replace(record, status="in_flight")] * 3)
    assert len(values([replace(record, status="in_flight"), record])["gen_ai.server.request.duration"]) == 1


def test_a_call_of_several_sequences_is_one_call() -> None:
    records = Script().run(Ask(n=3, output=4)).records()
    found = values(records)
    assert len(found["gen_ai.server.request.duration"]) == 1
    assert len(found["gen_ai.server.time_to_first_token"]) == 3
    assert len(found["stagetrace.stage.duration"]) == 3 + 3 * 9, "the call's own stages count once"
    assert len(found["stagetrace.inter_token.duration"]) == 3 * 3


def test_a_failed_call_has_a_duration_and_an_error_type_and_no_timers() -> None:
    records = Script().run(Ask(refuse="parameters"), Ask(at=MS, abort_at=15 * MS, output=50)).records()
    assert set(values(records)) == {"gen_ai.server.request.duration"}
    errors = [s.labels["error"] for call in finished(records) for s in of_requests(call, Engines())]
    assert errors == ["400", "aborted"]


def test_steps_count_once_though_they_come_again_when_they_are_complete() -> None:
    engines = Engines("tiny")
    seen = list(of_steps([step(1, preempted=2), step(2), step(1, engine=9)], engines))
    again = list(of_steps([step(1, preempted=2), step(3, preempted=1)], engines))
    by_name = {(s.name, s.labels["engine"]): s.value for s in seen}
    assert by_name["stagetrace.preemptions", "0"] == 2 and by_name["stagetrace.preemptions", "1"] == 0
    assert by_name["stagetrace.batch.size", "0"] == 2 and by_name["stagetrace.queue.depth", "0"] == 4
    assert by_name["stagetrace.batch.size", "1"] == 1
    assert {s.name: s.value for s in again}["stagetrace.preemptions"] == 1


def test_engines_and_processes_are_told_apart() -> None:
    (record,) = Script().run(Ask()).records()
    assert (record.engine, record.process) == (7, 101)
    engines = Engines("tiny")
    assert engines.labels(record.engine, record.process) == {"engine": "0", "process": "0", "model": "tiny"}
    assert engines.labels(8, 101) == {"engine": "1", "process": "0", "model": "tiny"}
    assert engines.labels(None, None) == {"engine": "", "process": "", "model": "tiny"}


# ---------------------------------------------------------------- over OTLP


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def test_what_goes_out_over_otlp_is_what_was_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    records = Script().run(*(Ask(at=n * MS, output=5) for n in range(10)), Ask(refuse="body")).records()
    records[0] = replace(records[0], caller_sampled=True)
    health = Health(3, Counter(queue_full=13), Counter({"a:B.c": 2}))
    with receiver() as endpoint:
        (sink,) = sinks.build(Options(otlp=endpoint.url, health=health), os.environ, lambda line: None)
        sink.run(RunRecord("s", "paper", "1", "tiny"))
        sink.requests(records)
        sink.steps([step(1, preempted=4), step(2)])
        sink.gpu([card_sample(), card_sample(t_ns=9, energy_j=12.25), GpuSample("GPU-1", 5, name="A card")])
        sink.close()
        found = endpoint.metrics()
    assert set(found) == NAMES
    expected = values(records)
    for name, metric in found.items():
        assert metric.unit == INSTRUMENTS[name].unit and metric.description == INSTRUMENTS[name].description
        if INSTRUMENTS[name].kind == "histogram":
            points = metric.histogram.data_points
            assert tuple(points[0].explicit_bounds) == INSTRUMENTS[name].buckets
            assert sum(point.count for point in points) == len(expected[name])
            assert sum(point.sum for point in points) == pytest.approx(sum(expected[name]))
    durations = found["gen_ai.server.request.duration"].histogram.data_points
    assert sorted((attributes(p).get("error.type"), p.count) for p in durations if attributes(p).get("error.type")) == [
        ("400", 1)
    ]
    examples = {e.trace_id.hex() for p in durations for e in p.exemplars}
    assert examples == {records[0].trace_id}, "only a trace that was exported is worth pointing to"
    assert {attributes(p)["gen_ai.request.model"] for p in durations} == {"tiny"}
    (preempted,) = found["stagetrace.preemptions"].sum.data_points
    (depth,) = found["stagetrace.queue.depth"].gauge.data_points
    (lost,) = found["stagetrace.marks.dropped"].sum.data_points
    (dropped,) = found["stagetrace.spans.dropped"].sum.data_points
    (hook,) = found["stagetrace.hook.errors"].sum.data_points
    assert (preempted.as_int, depth.as_double, lost.as_int) == (4, 4.0, 3)
    assert (attributes(dropped), dropped.as_int) == ({"reason": "queue_full"}, 13)
    assert (attributes(hook), hook.as_int) == ({"hook": "a:B.c"}, 2)
    _cards(found)


def _cards(found: dict[str, Any]) -> None:
    """The conventions' names, units and attributes; of a card that says nothing, nothing."""
    (used,), (room,) = (found[f"hw.gpu.memory.{name}"].sum.data_points for name in ("usage", "limit"))
    assert (used.as_double, room.as_double) == (60e9, 80e9)
    assert not found["hw.gpu.memory.usage"].sum.is_monotonic
    (energy,) = found["hw.energy"].sum.data_points
    assert found["hw.energy"].sum.is_monotonic and energy.as_double == 24.5
    assert attributes(energy) == {"hw.id": "GPU-0", "hw.name": "A card", "hw.type": "gpu"}
    (busy,) = found["hw.gpu.utilization"].gauge.data_points
    assert attributes(busy) == {"hw.id": "GPU-0", "hw.name": "A card", "hw.gpu.task": "general"}
    assert (busy.as_double, found["hw.power"].gauge.data_points[0].as_double) == (0.5, 300.0)
    clocks = {attributes(p)["domain"]: p.as_double for p in found["stagetrace.gpu.clock.frequency"].gauge.data_points}
    assert clocks == {"sm": 1.98e9, "memory": 2.619e9}
    slow = {attributes(p)["reason"]: p.as_double for p in found["stagetrace.gpu.throttled"].gauge.data_points}
    assert slow["sw_power_cap"] == 1 and sum(slow.values()) == 1 and len(slow) == 5


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_an_endpoint_for_traces_only_is_said_once(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    said: list[str] = []
    with receiver(404) as endpoint:
        (sink,) = sinks.build(Options(otlp=endpoint.url), os.environ, said.append)
        sink.requests(Script().run(Ask()).records())
        wait_until(lambda: len(said) > 1, "a refusal")
        time.sleep(0.3)
        sink.close()
    (line,) = said[1:]
    place, why = (endpoint.url, "UNAVAILABLE") if protocol == "grpc" else (f"{endpoint.url}/v1/metrics", "HTTP 404")
    assert line == (
        f"the OTLP endpoint {place} did not take metrics ({why}); serving goes on, OTEL_METRICS_EXPORTER=none sends "
        "none; start a collector there, or correct --otlp"
    )


# ---------------------------------------------------------------- our own health


def test_the_collector_counts_lost_marks_and_failing_hooks(directory: os.PathLike[str]) -> None:
    from pathlib import Path

    health = Health()
    recorder = Recorder(Path(directory))
    collector = Collector(Path(directory), [], health)
    for state in ("installed", "failing ValueError", "removed ValueError"):
        recorder.text(marks.HOOK, 0, f"engine:Class.method {state}")
    recorder.text(marks.HOOK, 0, "engine:Class.other installed")
    collector.poll()
    collector.close()
    assert health.hook_errors == {"engine:Class.method": 1} and health.marks_dropped == 0
