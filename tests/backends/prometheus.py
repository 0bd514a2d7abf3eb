"""Debian's Prometheus, scraping what it is pointed at several times a second."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagetrace.exporting import INSTRUMENTS
from stagetrace.serve import free_port
from tests.debian import program

#: (seconds, value) of each scrape.
Samples = list[tuple[float, float]]
TIMERS = {
    "queue_ms": "stagetrace.queue.duration", "prefill_ms": "stagetrace.prefill.duration",
    "ttft_ms": "gen_ai.server.time_to_first_token", "itl_ms": "stagetrace.inter_token.duration",
}  # fmt: skip


@dataclass
class Prometheus:
    """A running one, and what it answers."""

    url: str

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

    def samples(self, name: str, last_s: float) -> Samples:
        """Every scrape of the one series ``name`` in the last seconds."""
        (series,) = self.get("/api/v1/query", query=f"{name}[{round(last_s * 1e3)}ms]")["result"]
        return [(float(when), float(value)) for when, value in series["values"]]


@contextmanager
def scraping(folder: Path, *targets: str, rules: Sequence[Path] = (), every_ms: int = 200) -> Iterator[str]:
    """The URL of one that scrapes the ``targets`` (host:port), with its files in ``folder``."""
    port, config = free_port(), folder / "prometheus.yml"
    often = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    settings = {
        "global": dict.fromkeys(often, f"{every_ms}ms"), "rule_files": [str(rule) for rule in rules],
        "scrape_configs": [{"job_name": each, "static_configs": [{"targets": [each]}]} for each in targets],
    }  # fmt: skip
    config.write_text(json.dumps(settings))  # which is YAML, too
    command = [
        program("prometheus", "prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with open(folder / "prometheus.log", "w") as log:
        # Not a session of its own: those are scheduled against each other, and an engine fills its own with spinning.
        process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def eventually(question: Callable[[], Any], what: str, timeout_s: float = 40.0) -> Any:
    """The first answer to ``question`` that is one."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            if answer := question():
                return answer
        except OSError:
            pass  # it is still starting
        assert time.monotonic() < until, f"still not: {what}"
        time.sleep(0.1)


def check_percentiles(server: Prometheus, timers: dict[str, dict[str, float]]) -> None:
    """What its ``histogram_quantile`` makes of our buckets is what ``stagetrace numbers`` says, within a bucket."""
    for timer, name in TIMERS.items():
        buckets = INSTRUMENTS[name].buckets
        for q in ("p50", "p95", "p99"):
            metric = f"{name.replace('.', '_')}_seconds_bucket"
            theirs = server.value(f"histogram_quantile(0.{q[1:]}, sum by (le) ({metric}))")
            assert theirs is not None
            ours = timers[timer][q] / 1e3
            assert abs(bisect_left(buckets, theirs) - bisect_left(buckets, ours)) <= 1, (timer, q, theirs, ours)
