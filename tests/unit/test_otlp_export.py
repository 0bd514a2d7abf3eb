"""From the collector to an endpoint: settings, sampling, and endpoints that are dead, deaf, slow or full."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from grpc import StatusCode
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from stagetrace.collect import sinks
from stagetrace.exporting import Health, Options, Sink
from stagetrace.model import RequestRecord, RunRecord
from stagetrace.serve import free_port
from stagetrace_otlp import pipeline as pipeline_module
from stagetrace_otlp import settings, spans
from stagetrace_otlp.pipeline import Pipeline
from stagetrace_otlp.policy import Policy
from stagetrace_otlp.reasons import heard
from stagetrace_otlp.sink import span_exporter
from tests.receivers import Receiver, attributes, check_rules, receiver, silent
from tests.unit.helpers import wait_until
from tests.unit.scripted import MS, Ask, Script

RUN = RunRecord("session", "paper", "1", "tiny")


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    return Script().run(*(Ask(at=n * MS, output=4) for n in range(20))).records()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def made(said: list[str], **more: Any) -> Sink:
    """The one sink that these options and the environment ask for."""
    (sink,) = sinks.build(Options(**more), os.environ, said.append)
    sink.run(RUN)
    return sink


# ---------------------------------------------------------------- what is exported where


def read(env: dict[str, str] | None = None, **more: Any) -> settings.Settings | None:
    return settings.read(Options(**more), env or {}, lambda line: None)


def test_nothing_is_exported_unless_asked_for() -> None:
    assert read() is None
    assert read({"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "nonsense"}) is None
    assert read({"OTEL_SDK_DISABLED": "True"}, otlp="http://h:4318") is None
    assert read({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}, otlp="http://h:4318") is None


@pytest.mark.parametrize(
    ("url", "protocol", "traces", "metrics"),
    [
        ("http://h:4318", "http/protobuf", "http://h:4318/v1/traces", "http://h:4318/v1/metrics"),
        ("http://h:4318/", "http/protobuf", "http://h:4318/v1/traces", "http://h:4318/v1/metrics"),
        ("https://h/a/b", "http/protobuf", "https://h/a/b/v1/traces", "https://h/a/b/v1/metrics"),
        ("http://h/v1/traces", "http/protobuf", "http://h/v1/traces", "http://h/v1/metrics"),
        ("http://h:4317", "grpc", "http://h:4317", "http://h:4317"),
        ("https://[::1]:4317/", "grpc", "https://[::1]:4317", "https://[::1]:4317"),
        ("http://h:4317/otlp", "http/protobuf", "http://h:4317/otlp/v1/traces", "http://h:4317/otlp/v1/metrics"),
    ],
)
def test_a_url_says_protocol_and_endpoints(url: str, protocol: str, traces: str, metrics: str) -> None:
    found = read(otlp=url)
    assert found and found.traces and found.metrics
    assert (found.traces.protocol, found.metrics.protocol) == (protocol, protocol)
    assert (found.traces.endpoint, found.metrics.endpoint) == (traces, metrics)


def test_the_environment_says_the_rest() -> None:
    found = read({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1/x"})
    assert found and found.traces == settings.Signal("http/protobuf", None) and found.metrics is None
    found = read({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})
    assert found and found.traces == settings.Signal("grpc", None)
    assert found.metrics == settings.Signal("http/protobuf", None)
    found = read({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, otlp="http://h:4317")
    assert found and found.traces == settings.Signal("http/protobuf", "http://h:4317/v1/traces")
    # Over gRPC, whatever gRPC resolves.
    found = read({"OTEL_EXPORTER_OTLP_ENDPOINT": "h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert found and found.traces and found.traces.shown == "h:4317"
    found = read({"OTEL_TRACES_EXPORTER": "otlp"})
    assert found and found.traces and not found.metrics
    more = {"OTEL_BSP_MAX_QUEUE_SIZE": "7", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    found = read(more, otlp="http://h")
    assert found and (found.queue_spans, found.batch_spans, found.delay_s) == (7, 3, 0.05)


@pytest.mark.parametrize(
    ("env", "options", "says"),
    [
        ({}, {"otlp": "localhost:4318"}, "--otlp localhost:4318"),
        ({}, {"otlp": ""}, "--otlp"),
        ({}, {"otlp": "http://h:99999"}, "--otlp http://h:99999"),
        ({}, {"otlp": "http://"}, "--otlp http://"),
        ({}, {"otlp": "http://a b"}, "--otlp http://a b"),
        ({}, {"otlp": "http://a..b:1"}, "--otlp http://a..b:1"),
        ({}, {"otlp": "http://user:secret@h:99999"}, "--otlp http://h:99999"),
        ({}, {"otlp": "http://h", "sample": 1.5}, "--sample 1.5"),
        ({}, {"otlp": "http://h", "sample": float("nan")}, "--sample nan"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, {"otlp": "http://h"}, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json"),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, {"otlp": "http://h"}, "OTEL_TRACES_SAMPLER=jaeger_remote"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "x"}, {"otlp": "http://h"}, "_ARG=x"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, {"otlp": "http://h"}, "OTEL_BSP_MAX_QUEUE_SIZE=many"),
        ({"STAGETRACE_EXPORT_UNSAMPLED": "all"}, {"otlp": "http://h"}, "STAGETRACE_EXPORT_UNSAMPLED=all"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(env: dict[str, str], options: dict[str, Any], says: str) -> None:
    with pytest.raises(sinks.ExportError) as refused:
        sinks.build(Options(**options), env, lambda line: None)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_what_the_official_exporter_refuses_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "lz4")
    with pytest.raises(sinks.ExportError, match=r'^exporter otlp: Invalid value "lz4" .*COMPRESSION$'):
        sinks.build(Options(otlp="http://127.0.0.1:4317"), {}, lambda line: None)


# ---------------------------------------------------------------- sampling


def asked(sampled: bool | None, status: str = "ok", e2e_ms: float = 5.0, trace: int = 1 << 127) -> list[RequestRecord]:
    (record,) = Script().run(Ask()).records()
    return [replace(record, caller_sampled=sampled, status=status, e2e_ms=e2e_ms, trace_id=f"{trace:032x}")]


def test_the_caller_decides() -> None:
    assert Policy({}, 0.0).exports(asked(True))
    assert Policy({"OTEL_TRACES_SAMPLER": "always_off"}).exports(asked(True))
    assert not Policy({}, 1.0).exports(asked(False))
    assert not Policy({}, 1.0).exports(asked(False, "error"))
    assert Policy({"STAGETRACE_EXPORT_UNSAMPLED": "errors,slow"}).exports(asked(False, "error"))
    assert not Policy({"STAGETRACE_EXPORT_UNSAMPLED": "slow"}).exports(asked(False, "error"))


def test_without_a_caller_the_sampler_decides_and_errors_are_kept() -> None:
    high, low = (1 << 64) - 1, 1
    env = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}
    assert Policy({}).exports(asked(None, trace=high))
    assert not Policy(env).exports(asked(None, trace=high)) and Policy(env).exports(asked(None, trace=low))
    assert Policy(env, 1.0).exports(asked(None, trace=high)), "--sample goes before the environment"
    assert Policy(env).exports(asked(None, "error", trace=high))
    assert not Policy({"OTEL_TRACES_SAMPLER": "always_off"}).exports(asked(None, "error", trace=low))
    kept = sum(Policy({}, 0.25).exports(asked(None, trace=n << 56 | 1)) for n in range(0, 256, 8))
    assert kept == 8


def test_what_the_client_got_wrong_is_sampled_like_the_rest() -> None:
    """Else one client's bad requests would have all of theirs exported, whatever --sample says."""
    policy = Policy({"STAGETRACE_EXPORT_UNSAMPLED": "errors"}, 0.25)
    high, low = (1 << 64) - 1, 1

    def failed(status: int, trace: int, sampled: bool | None = None) -> bool:
        return policy.exports([replace(r, http_status=status) for r in asked(sampled, "error", trace=trace)])

    assert not failed(400, high) and not failed(404, high) and failed(400, low)
    assert failed(500, high) and failed(200, high), "200: it failed after it had begun to answer"
    assert not failed(422, low, sampled=False) and failed(503, low, sampled=False)


def test_slow_requests_are_kept_once_it_is_known_what_slow_is() -> None:
    policy = Policy({}, 0.0001)
    high = (1 << 64) - 1
    assert not policy.exports(asked(None, e2e_ms=500.0, trace=high)), "too early to tell"
    for n in range(150):
        policy.exports(asked(None, e2e_ms=5.0 + n / 1000, trace=high))
    assert policy.exports(asked(None, e2e_ms=600.0, trace=high))
    assert not policy.exports(asked(None, e2e_ms=5.05, trace=high))


# ---------------------------------------------------------------- a good endpoint


def test_everything_arrives_once(records: list[RequestRecord]) -> None:
    said: list[str] = []
    with receiver() as endpoint:
        sink = made(said, otlp=endpoint.url)
        running = replace(records[0], status="in_flight", e2e_ms=None)
        sink.requests([running])
        for record in records:
            sink.requests([running, record])
        sink.close()
        found = endpoint.spans()
    assert said == []
    assert Counter(span.trace_id.hex() for span in found) == Counter({r.trace_id: 13 for r in records})
    check_rules(endpoint.traces())
    (metric,) = endpoint.metrics()["gen_ai.server.request.duration"].histogram.data_points
    assert metric.count == len(records)


@pytest.mark.parametrize("count", [1, 5, 30])
def test_batches_are_as_large_as_asked_for(
    records: list[RequestRecord], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", str(count))
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with receiver() as endpoint:
        sink = made([], otlp=endpoint.url)
        sink.requests(records)
        sink.close()
        sizes = [sum(1 for _ in m.resource_spans[0].scope_spans[0].spans) for m in endpoint.traces()]
    assert sum(sizes) == 13 * len(records) and max(sizes) <= count


def test_the_official_variables_reach_the_endpoint(
    records: list[RequestRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiver() as endpoint:
        for name, value in {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{endpoint.url}/v1/traces", "OTEL_SERVICE_NAME": "mine",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test,service.version=7",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=t1", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        sink = made([])
        sink.requests(records[:1])
        sink.close()
        (message,) = endpoint.traces()
        assert endpoint.headers[0]["x-tenant"] == "t1" and endpoint.headers[0]["content-encoding"] == "gzip"
    found = attributes(message.resource_spans[0].resource)
    assert found["service.name"] == "mine" and found["deployment.environment.name"] == "test"
    assert found["stagetrace.engine.name"] == "paper" and not endpoint.metrics()


def test_traces_leave_before_the_end_and_at_once_when_flushed(records: list[RequestRecord]) -> None:
    with receiver() as endpoint:
        sink = made([], otlp=endpoint.url)
        sink.requests(records[:1])
        sink.flush()
        assert len(endpoint.wait(13, timeout_s=5)) == 13
        sink.requests(records[1:2])
        assert len(endpoint.wait(26, timeout_s=10)) == 26
        sink.close()


# ---------------------------------------------------------------- bad ones


Place = Callable[[], Any]


def endpoints() -> Iterator[Any]:
    yield pytest.param(lambda: dead(4318), "http/protobuf", id="dead-http")
    yield pytest.param(lambda: dead(4317), "grpc", id="dead-grpc")
    yield pytest.param(silent, "http/protobuf", id="silent-http")
    yield pytest.param(silent, "grpc", id="silent-grpc")
    for status in (400, 429, 503):
        yield pytest.param(lambda status=status: receiver(status), "http/protobuf", id=str(status))
    yield pytest.param(lambda: receiver(delay_s=20), "http/protobuf", id="slow")


class dead:
    """A place where nobody listens."""

    def __init__(self, _: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> str:
        return self.url

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("place", "protocol"), [*endpoints()])
def test_a_bad_endpoint_costs_traces_which_are_counted_and_is_given_up(
    place: Place, protocol: str, records: list[RequestRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    said: list[str] = []
    health = Health()
    with place() as where:
        sink = made(said, otlp=where.url if isinstance(where, Receiver) else where, health=health)
        began = time.monotonic()
        for record in records:
            sink.requests([record])
        took = time.monotonic() - began
        # What waited for such an endpoint would take its timeout of 10 s, for each of them.
        assert took < 9.0, f"{took:.2f} s to hand over {len(records)} requests"
        sink.flush()
        time.sleep(0.3)
        sink.requests(records[:1])
        began = time.monotonic()
        sink.close()
        took = time.monotonic() - began
    assert took < 9.0, f"closing took {took:.2f} s, and is to give up after 3 s (on a machine that is not busy)"
    assert health.spans_dropped.total() == 13 * (len(records) + 1), health.spans_dropped
    assert health.spans_dropped["queue_full"] >= 13 * 10
    (last,) = [line for line in said if "were not exported" in line]
    assert str(health.spans_dropped.total()) in last


@pytest.mark.parametrize(
    ("place", "protocol", "why"),
    [
        (lambda: dead(4318), "http/protobuf", "Connection refused"),
        (lambda: dead(4317), "grpc", "UNAVAILABLE"),
        (lambda: receiver(404), "http/protobuf", "HTTP 404"),
        (lambda: receiver(429), "http/protobuf", "Too Many Requests"),
    ],
)
def test_what_is_not_taken_is_said_with_the_place_the_reason_and_the_cure(
    place: Place, protocol: str, why: str, records: list[RequestRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    said: list[str] = []
    with place() as where:
        url = where.url if isinstance(where, Receiver) else where
        sink = made(said, otlp=url.replace("://", "://user:secret@") if protocol != "grpc" else url)
        sink.requests(records[:1])
        sink.flush()
        wait_until(lambda: len(said) > 1, "a line")
        sink.close()
    path = "" if protocol == "grpc" else "/v1/traces"
    assert said[1] == (
        f"the OTLP endpoint {url}{path} did not take 13 spans ({why}); serving goes on, drops are counted; "
        "start a collector there, or correct --otlp"
    )


def test_a_reason_is_the_last_attempt_s() -> None:
    heard.emit(logging.makeLogRecord({"msg": "Transient error %s", "args": (ConnectionError("[Errno 111] Refused"),)}))
    heard.emit(logging.makeLogRecord({"msg": "Failed to export %s batch due to timeout.", "args": ("spans",)}))
    assert heard.of() == "Refused"
    ran_out = {
        "msg": "Failed to export %s to %s, error code: %s",
        "args": ("traces", "h", StatusCode.DEADLINE_EXCEEDED),
    }
    heard.emit(logging.makeLogRecord(ran_out))
    assert heard.of() == "Refused", "what it was tried again for says more"
    heard.forget()
    assert heard.of() == ""
    heard.emit(logging.makeLogRecord(ran_out))
    assert heard.of() == "DEADLINE_EXCEEDED"
    heard.forget()


def test_a_run_that_ends_first_says_where_and_why_too(
    records: list[RequestRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    said: list[str] = []
    with dead(4318) as url:
        sink = made(said, otlp=url)
        sink.requests(records[:1])
        sink.flush()
        time.sleep(0.5)
        sink.close()
    assert said[1:] == [f"13 spans were not exported (shutdown 13); {url}/v1/traces: Connection refused"]


class Held(SpanExporter):
    """Holds every message until told to let go."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.got: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.open.wait(20)
        self.got.append(len(spans))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_the_queue_is_bounded_and_drops_the_oldest_whole_traces(records: list[RequestRecord]) -> None:
    exporter, dropped = Held(), Counter[str]()
    pipeline = Pipeline(exporter, lambda line: None, dropped, queue_spans=100, batch_spans=13)
    for record in records * 5:
        pipeline.put(spans.trace([record], Resource({})))
        assert pipeline.held <= 100
    exporter.open.set()
    pipeline.close(5.0)
    assert pipeline.sent == sum(exporter.got) and pipeline.sent % 13 == 0
    assert pipeline.sent + dropped.total() == 13 * len(records) * 5
    assert set(dropped) == {"queue_full"}
    pipeline.put(spans.trace(records[:1], Resource({})))
    assert dropped["shutdown"] == 13


class Broken(Held):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("of the exporter's own")


def test_an_exporter_that_raises_is_one_line_and_counted(records: list[RequestRecord]) -> None:
    said: list[str] = []
    dropped = Counter[str]()
    pipeline = Pipeline(Broken(), said.append, dropped, delay_s=0.01)
    for record in records:
        pipeline.put(spans.trace([record], Resource({})))
        time.sleep(0.02)
    pipeline.close(3.0)
    assert dropped == {"RuntimeError": 13 * len(records)} and len(said) == 1


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_what_failed_to_go_out_does_not_lie_about(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The official exporters leave their error in a cycle with the message, as a frame that nobody runs any more."""

    def left() -> int:
        return sum(isinstance(each, FrameType) and each.f_code.co_name == "export" for each in gc.get_objects())

    for name in ("opentelemetry", "opentelemetry.exporter"):
        caplog.set_level(logging.CRITICAL, name)  # a record that is kept keeps the error; in a collector, none is
    monkeypatch.setattr(pipeline_module, "GARBAGE_MESSAGES", 2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    asked = read({**os.environ}, otlp=f"http://127.0.0.1:{free_port()}")
    assert asked and asked.traces
    dropped = Counter[str]()
    calls = Script().run(*(Ask(at=n * MS, output=4) for n in range(2))).records()
    traces = [spans.trace([call], Resource({})) for call in calls]
    kept = [weakref.ref(span) for trace in traces for span in trace]
    gc.collect()
    gc.disable()
    try:
        pipeline = Pipeline(span_exporter(asked.traces), lambda line: None, dropped, batch_spans=13)
        pipeline.put(traces.pop())
        wait_until(lambda: dropped.total() == 13, "the first failure")
        pipeline.put(traces.pop())
        wait_until(lambda: dropped.total() == 26 and not left(), "the collection")
        pipeline.close(1.0)
        wait_until(lambda: not any(span() for span in kept), "the messages are let go of")
    finally:
        gc.enable()


def test_an_exporter_s_fault_stays_its_own(records: list[RequestRecord]) -> None:
    class Faulty:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no")

    said: list[str] = []
    guarded = sinks.Guarded("faulty", Faulty(), said.append)
    guarded.requests(records)
    guarded.flush()
    guarded.close()
    assert guarded.failed == 3 and len(said) == 1 and "serving" in said[0]
