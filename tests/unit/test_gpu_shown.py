"""Where a person, or a program, sees what the cards did: stopwatch, numbers, doctor, spans."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from rich.console import Console

from stagetrace import marks, session
from stagetrace.assemble.book import Book
from stagetrace.collect.loop import Collector
from stagetrace.gpu import sampler as sampling
from stagetrace.gpu.watch import CARDS_ENV, Watch
from stagetrace.live import server
from stagetrace.model import GpuSample, RequestRecord, RunRecord
from stagetrace.recorder import Recorder
from stagetrace.report.stopwatch import stopwatch
from stagetrace.store import StoreWriter
from stagetrace_otlp import spans
from tests.nvml.stub import Card, Script, uuid
from tests.unit import scripted
from tests.unit.helpers import DEADLINE_S, plain_environment, wait_until
from tests.unit.test_gpu_join import ASKS, FakeDriver, S, history, joined, readings


@pytest.fixture(scope="module")
def record() -> RequestRecord:
    """A request whose decode is longer than a sample, on a card that is held to its power."""
    _, (made,) = joined(scripted.Script().run(scripted.Ask(output=30)), history(readings(throttle=0x4)))
    return made


def test_the_stopwatch_has_a_line_for_long_stages_and_one_for_the_request(record: RequestRecord) -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(stopwatch(record, "one"))
    lines = out.getvalue().splitlines()
    seen = [line.strip() for line in lines if line.strip().startswith("gpu")]
    decode = record.stage("decode").attributes["gpu"]["energy_j"]
    assert seen == [
        f"gpu: busy=50% memory_busy=25% W=200 MHz=1980 °C=55 J={decode:,.1f} throttled=sw_power_cap",
    ]
    assert record.gpu is not None
    each = record.gpu["joules"] / 30
    said = f"energy {record.gpu['joules']:,.2f} J ({each:,.3f} J per output token), throttled (sw_power_cap)"
    assert said in lines


def test_numbers_say_where_the_energy_went(tmp_path: Path) -> None:
    script, seen = scripted.Script(slots=4).run(*ASKS), readings(until=6 * S)
    assembler, records = joined(script, history(seen))
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RunRecord("s", "paper", "1", "tiny", {"gpu": "A card"}))
        writer.write_requests(records)
        writer.write_steps(list(assembler.book.steps.values()))
        writer.write_gpu([each.sample for each in seen])
    command = [sys.executable, "-m", "stagetrace", "numbers", str(tmp_path / "s.db")]
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert list(found) == ["schema", "context", "timers", "gauges", "saturated", "stages", "gpu"]
    assert found["context"]["gpu"] == "A card"
    assert found["gpu"]["requests_j"] + found["gpu"]["idle_j"] == pytest.approx(found["gpu"]["energy_j"])
    assert found["gpu"]["cards"][0]["utilization"]["p50"] == 0.5
    out = subprocess.run(
        command, capture_output=True, check=True, text=True, env={**plain_environment(), "COLUMNS": "300"}
    )
    assert f"Energy: {found['gpu']['energy_j']:,.0f} J, of which" in out.stdout
    assert "A card GPU-0: busy 50/50/50 %, 200/200/200 W (p50/p95/p99), at most 55 °C;" in out.stdout


def test_spans_carry_what_is_known_and_nothing_else(record: RequestRecord) -> None:
    root, *rest = spans.trace([record], Resource({}))
    stages = {span.name: dict(span.attributes or {}) for span in rest}
    assert stages["decode"]["stagetrace.gpu.power_w.mean"] == 200.0
    assert stages["decode"]["stagetrace.gpu.window"] == "sampled" and stages["decode"]["stagetrace.gpu.throttled"]
    assert stages["decode"]["stagetrace.gpu.cards"] == "GPU-0"
    assert stages["tokenize"]["stagetrace.gpu.window"] == "shorter_than_sample"
    assert [name for name in stages["tokenize"] if ".gpu." in name] == ["stagetrace.gpu.window"]
    assert record.gpu is not None
    assert (root.attributes or {})["stagetrace.gpu.joules"] == pytest.approx(record.gpu["joules"])
    assert (root.attributes or {})["stagetrace.gpu.throttle_reasons"] == "sw_power_cap"


def doctor(**environment: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "stagetrace", "doctor"]
    variables = {**plain_environment(), "COLUMNS": "300", **environment}
    as_json = subprocess.run([*command, "--json"], capture_output=True, env=variables, timeout=DEADLINE_S)
    text = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=DEADLINE_S)
    return json.loads(as_json.stdout), text.stdout


def test_the_doctor_lists_the_cards(tmp_path: Path) -> None:
    found, text = doctor(**Script([Card(0), Card(1, more=["lost 0"]), Card(2, name="A smaller card")]).write(tmp_path))
    assert found["gpu"] == [{"id": uuid(0), "name": Card().name}, {"id": uuid(2), "name": "A smaller card"}]
    assert f"GPU counters: {Card().name} ({uuid(0)}), A smaller card ({uuid(2)})" in text


def test_the_doctor_says_why_there_are_none() -> None:
    found, text = doctor(LD_LIBRARY_PATH="")
    assert "gpu" not in found
    assert "no GPU counters: there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)" in text


def test_the_doctor_says_what_a_running_server_samples(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "Driver", FakeDriver)
    recorder = Recorder(directory)
    collector = Collector(directory, [], gpu=Watch(print, {CARDS_ENV: "GPU-a,GPU-b"}))
    recorder.text(marks.ENGINE, 0, "engine=paper")

    def sampled() -> bool:
        collector.poll()
        return bool(collector.gpu and collector.gpu.names())

    wait_until(sampled, "a sample")
    collector._snapshot_at = 0
    collector.poll()
    (line,) = server(directory).gpu
    assert line == f"running: {directory.name}, every 0.5 s sampled: A card (GPU-a), A card (GPU-b)"
    (directory / session.GPU).write_text(json.dumps({"cards": {}, "interval_s": 0.5, "faults": ["no GPU counters: x"]}))
    assert server(directory).gpu == [f"running: {directory.name}, no GPU counters: x"]
    (directory / session.GPU).write_text("[]")
    assert server(directory).gpu == []
    collector.close()


def test_a_fault_of_the_watch_ends_the_counters_only(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Watch):
        def poll(self, book: Book) -> list[GpuSample]:
            raise ZeroDivisionError("a fault")

    recorder, collector = Recorder(directory), Collector(directory, [], gpu=Faulty(print, {}))
    for number in range(3):
        recorder.text(marks.ENGINE, 0, f"engine=paper{number}")
        assert collector.poll() == 1
    collector.close()
    assert [r.getMessage() for r in caplog.records] == [
        "stagetrace: GPU counters have ended (ZeroDivisionError: a fault)"
    ]
