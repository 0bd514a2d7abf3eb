"""A real Prometheus scrapes us: every metric arrives, and percentiles from buckets are our own within a bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagetrace.collect import sinks
from stagetrace.exporting import INSTRUMENTS, Options
from stagetrace.model import RequestRecord, RunRecord, StepRecord
from stagetrace.numbers import numbers
from stagetrace.store import Trace
from tests.receivers import free_port
from tests.unit.scripted import MS, US, Ask, Script

CONFIG = """
global: {scrape_interval: 200ms, scrape_timeout: 200ms}
scrape_configs:
  - job_name: stagetrace
    static_configs: [{targets: ["TARGET"]}]
"""


@pytest.fixture(scope="module")
def server() -> str:
    """Debian's Prometheus; installed where we may."""
    if not shutil.which("prometheus") and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for command in (["update"], ["install", "-y", "--no-install-recommends", "prometheus"]):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", *command], timeout=130, env=environment, check=False, **quiet)
    found = shutil.which("prometheus")
    assert found, "this test needs Prometheus: apt-get install --no-install-recommends prometheus"
    return found


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **query: object) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        """The one value of an instant query; None while there is none."""
        result = self.get("/api/v1/query", query=query)["result"]
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None


@pytest.fixture
def scraped(server: str, tmp_path: Path) -> Iterator[tuple[Prometheus, sinks.Sink]]:
    """A Prometheus that scrapes the sink beside it."""
    said: list[str] = []
    (sink,) = sinks.build(Options(prometheus="127.0.0.1:0"), {}, said.append)
    sink.run(RunRecord("s", "paper", "1", "tiny"))
    (tmp_path / "prometheus.yml").write_text(
        CONFIG.replace("TARGET", urllib.parse.urlsplit(said[0].split()[-1]).netloc)
    )
    port = free_port()
    command = [
        server, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with open(tmp_path / "prometheus.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}"), sink
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        sink.close()


def eventually(question: Callable[[], Any], what: str, timeout_s: float = 40.0) -> Any:
    until = time.monotonic() + timeout_s
    while True:
        try:
            if answer := question():
                return answer
        except OSError:
            pass  # it is still starting
        assert time.monotonic() < until, f"still not: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    asks = [
        Ask(at=n * 7 * MS, prompt=20 + 37 * n % 300, output=3 + n % 11, slower=n % 5 * 300 * US) for n in range(120)
    ]
    return Script(slots=6).run(*asks, Ask(refuse="body")).records()


def test_percentiles_from_its_buckets_are_ours_within_a_bucket(
    scraped: tuple[Prometheus, sinks.Sink], records: list[RequestRecord]
) -> None:
    prometheus, sink = scraped
    sink.requests(records)
    count = "sum(gen_ai_server_request_duration_seconds_count)"
    eventually(lambda: prometheus.value(count) == len(records), "all requests are counted")
    ours = numbers(Trace(requests=records))["timers"]
    names = {
        "queue_ms": "stagetrace.queue.duration", "prefill_ms": "stagetrace.prefill.duration",
        "ttft_ms": "gen_ai.server.time_to_first_token", "itl_ms": "stagetrace.inter_token.duration",
    }  # fmt: skip
    for timer, name in names.items():
        for q in ("p50", "p95", "p99"):
            metric = f"{name.replace('.', '_')}_seconds_bucket"
            theirs = prometheus.value(f"histogram_quantile(0.{q[1:]}, sum by (le) ({metric}))")
            assert theirs is not None
            buckets = INSTRUMENTS[name].buckets
            apart = abs(bisect_left(buckets, theirs) - bisect_left(buckets, ours[timer][q] / 1e3))
            assert apart <= 1, f"{timer} {q}: {theirs * 1e3:.3f} ms of Prometheus, {ours[timer][q]:.3f} ms of ours"


def test_every_metric_and_its_exemplars_arrive(
    scraped: tuple[Prometheus, sinks.Sink], records: list[RequestRecord]
) -> None:
    prometheus, sink = scraped
    sink.requests(records)
    sink.steps([StepRecord(7 << 32, 7, (1, 2), 3, 3, 0, 1, 4, 0.25, preempted=2)])
    eventually(lambda: prometheus.value("stagetrace_preemptions_total") == 2.0, "evictions are counted")
    known = set(prometheus.get("/api/v1/label/__name__/values"))
    for each in INSTRUMENTS.values():
        name = each.name.replace(".", "_") + ("_seconds_bucket" if each.unit == "s" else "")
        name += "_total" if each.kind == "counter" else ""
        # Nothing went wrong here: a counter without a label value has no series yet.
        assert name in known or (each.health and each.labels), name
    assert prometheus.value("stagetrace_kv_cache_utilization") == 0.25
    assert prometheus.value("stagetrace_queue_depth") == 4 and prometheus.value("stagetrace_batch_size") == 3
    assert prometheus.value("stagetrace_marks_dropped_total") == 0
    query = {"query": "gen_ai_server_time_to_first_token_seconds_bucket", "start": time.time() - 60, "end": time.time()}
    found = eventually(lambda: prometheus.get("/api/v1/query_exemplars", **query), "exemplars")
    traces = {example["labels"]["trace_id"] for series in found for example in series["exemplars"]}
    assert traces and traces <= {record.trace_id for record in records}
