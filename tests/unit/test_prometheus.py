"""The page that Prometheus scrapes: names, labels, values, exemplars, and where it listens."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_metrics

from stagetrace.collect import sinks
from stagetrace.exporting import INSTRUMENTS, Health, Options
from stagetrace.model import GpuSample, RequestRecord, RunRecord, StepRecord
from stagetrace_prometheus import address
from tests.unit.scripted import MS, Ask, Script
from tests.unit.stored import card_sample

OPEN = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    return Script().run(*(Ask(at=n * MS, output=5) for n in range(10)), Ask(refuse="body")).records()


@pytest.fixture
def page(records: list[RequestRecord]) -> Iterator[Any]:
    """Reads the page of a sink that has seen ``records``."""
    health = Health(3, Counter(queue_full=13), Counter({"a:B.c": 2}))
    said: list[str] = []
    (sink,) = sinks.build(Options(prometheus="127.0.0.1:0", health=health), {}, said.append)
    sink.run(RunRecord("s", "paper", "1", "tiny"))
    sink.requests([replace(records[0], status="in_flight"), *records])
    sink.steps([StepRecord(7 << 32, 7, (1, 2), 3, 3, 0, 1, 4, 0.25, preempted=2)])
    (line,) = said
    url = line.split()[-1]

    def read(accept: str = "text/plain") -> str:
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    yield read
    sink.close()


def test_every_instrument_is_there_under_prometheus_s_name(page: Any) -> None:
    names = {family.name for family in plain_metrics(page())}
    for each in INSTRUMENTS.values():
        name = each.name.replace(".", "_") + ("_seconds" if each.unit == "s" else "")
        assert name in names
    assert not [n for n in names if not n.startswith(("gen_ai_", "stagetrace_", "hw_"))], "only ours, not the process's"


def test_values_and_labels(page: Any, records: list[RequestRecord]) -> None:
    samples = [sample for family in plain_metrics(page()) for sample in family.samples]
    found = {(s.name, *(s.labels.get(k, "") for k in ("error", "stage", "reason", "hook"))): s for s in samples}
    answered = [r for r in records if r.status == "ok"]
    total = found["gen_ai_server_request_duration_seconds_count", "", "", "", ""]
    assert total.value == len(answered) == 10
    assert total.labels == {"engine": "0", "process": "0", "model": "tiny", "operation": "chat", "error": ""}
    assert found["gen_ai_server_request_duration_seconds_count", "400", "", "", ""].value == 1
    first = found["gen_ai_server_time_to_first_token_seconds_sum", "", "", "", ""]
    assert first.value == pytest.approx(sum(r.ttft_ms or 0 for r in answered) / 1e3)
    assert found["stagetrace_stage_duration_seconds_count", "", "prefill", "", ""].value == 10
    assert found["stagetrace_inter_token_duration_seconds_count", "", "", "", ""].value == 40
    assert found["stagetrace_kv_cache_utilization", "", "", "", ""].value == 0.25
    assert found["stagetrace_queue_depth", "", "", "", ""].value == 4
    assert found["stagetrace_batch_size", "", "", "", ""].value == 3
    assert found["stagetrace_preemptions_total", "", "", "", ""].value == 2
    assert found["stagetrace_marks_dropped_total", "", "", "", ""].value == 3
    assert found["stagetrace_spans_dropped_total", "", "", "queue_full", ""].value == 13
    assert found["stagetrace_hook_errors_total", "", "", "", "a:B.c"].value == 2


def test_exemplars_for_who_asks_for_openmetrics(page: Any, records: list[RequestRecord]) -> None:
    assert "# {" not in page()
    samples = [s for family in open_metrics(page(OPEN)) for s in family.samples if s.exemplar]
    assert {s.name for s in samples} >= {"gen_ai_server_time_to_first_token_seconds_bucket"}
    assert {s.exemplar.labels["trace_id"] for s in samples} <= {r.trace_id for r in records}
    assert {s.exemplar.labels["span_id"] for s in samples} <= {r.span_id for r in records}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("metrics.internal:1", ("metrics.internal", 1)),
    ],
)
def test_loopback_unless_told(text: str, where: tuple[str, int]) -> None:
    assert address(text) == where


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:70000", "::1:80", "a b:80", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(sinks.ExportError, match=r"^--prometheus .*127\.0\.0\.1:9464$"):
        sinks.build(Options(prometheus=text), os.environ, lambda line: None)


def test_a_port_that_is_taken_is_one_line_and_what_was_made_before_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(sinks.ExportError, match=rf"^--prometheus {taken}: Address already in use"):
            sinks.build(Options(prometheus=taken, otlp="http://127.0.0.1:1"), {}, lambda line: None)


def test_a_name_nobody_knows_is_refused() -> None:
    with pytest.raises(sinks.ExportError, match=r"^--prometheus no-such-host\.invalid:1: "):
        sinks.build(Options(prometheus="no-such-host.invalid:1"), {}, lambda line: None)


def test_a_card_is_shown_as_long_as_it_answers() -> None:
    (sink,) = sinks.build(Options(prometheus="127.0.0.1:0"), {}, lambda line: None)
    sink.gpu([card_sample(), card_sample(energy_j=7.75), card_sample(card="GPU-1", utilization=None)])
    value = sink.sink.registry.get_sample_value
    card = {"hw_id": "GPU-0", "hw_name": "A card"}
    assert value("hw_power", {**card, "hw_type": "gpu"}) == 300.0
    assert value("hw_energy_total", {**card, "hw_type": "gpu"}) == 20.0
    assert value("hw_gpu_memory_usage", card) == 60e9 and value("hw_gpu_memory_utilization", card) == 0.75
    assert value("stagetrace_gpu_throttled", {**card, "reason": "sw_power_cap"}) == 1
    busy = {"hw_gpu_task": "general"}
    assert value("hw_gpu_utilization", {**card, **busy}) == 0.5
    assert value("hw_gpu_utilization", {"hw_id": "GPU-1", "hw_name": "A card", **busy}) is None, "unknown is not 0"
    sink.gpu([GpuSample("GPU-0", 9, name="A card")])
    assert value("hw_power", {**card, "hw_type": "gpu"}) is None and value("hw_gpu_memory_usage", card) is None
    assert value("hw_energy_total", {**card, "hw_type": "gpu"}) == 20.0, "what it has used it has used"
    sink.close()
