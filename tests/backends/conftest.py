"""A real Prometheus that scrapes the exporter beside it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagetrace.collect import sinks
from stagetrace.exporting import Health, Options
from stagetrace.model import RequestRecord, RunRecord
from tests.debian import program
from tests.receivers import free_port
from tests.unit.scripted import MS, US, Ask, Script

ALERTS = Path(__file__).resolve().parents[2] / "docs" / "prometheus" / "alerts.yml"
CONFIG = """
global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}
rule_files: ["ALERTS"]
scrape_configs:
  - job_name: stagetrace
    static_configs: [{targets: ["TARGET"]}]
"""


@dataclass
class Prometheus:
    """The server, and the sink that it scrapes, which reports ``health``."""

    url: str
    sink: sinks.Sink
    health: Health

    def get(self, path: str, **query: object) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def vector(self, query: str) -> list[tuple[dict[str, str], float]]:
        """The labels and values of an instant query."""
        return [(each["metric"], float(each["value"][1])) for each in self.get("/api/v1/query", query=query)["result"]]

    def value(self, query: str) -> float | None:
        """The one value of an instant query; None while there is none."""
        found = self.vector(query)
        assert len(found) <= 1, found
        return found[0][1] if found else None


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """Debian's Prometheus, with our alert rules."""
    server = program("prometheus", "prometheus")
    said: list[str] = []
    health = Health()
    (sink,) = sinks.build(Options(prometheus="127.0.0.1:0", health=health), {}, said.append)
    sink.run(RunRecord("s", "paper", "1", "tiny"))
    target = urllib.parse.urlsplit(said[0].split()[-1]).netloc
    (tmp_path / "prometheus.yml").write_text(CONFIG.replace("TARGET", target).replace("ALERTS", str(ALERTS)))
    port = free_port()
    command = [
        server, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with open(tmp_path / "prometheus.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", sink, health)
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
