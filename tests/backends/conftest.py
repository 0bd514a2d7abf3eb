"""A real Prometheus that scrapes the exporter beside it."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagetrace.collect import sinks
from stagetrace.exporting import Health, Options
from stagetrace.model import RequestRecord, RunRecord
from tests.backends.prometheus import Prometheus, scraping
from tests.unit.scripted import MS, US, Ask, Script

ALERTS = Path(__file__).resolve().parents[2] / "docs" / "prometheus" / "alerts.yml"


@dataclass
class Scraper(Prometheus):
    """The server, and the sink that it scrapes, which reports ``health``."""

    sink: sinks.Sink
    health: Health


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Scraper]:
    """Debian's Prometheus, with our alert rules."""
    said: list[str] = []
    health = Health()
    (sink,) = sinks.build(Options(prometheus="127.0.0.1:0", health=health), {}, said.append)
    sink.run(RunRecord("s", "paper", "1", "tiny"))
    try:
        with scraping(tmp_path, urllib.parse.urlsplit(said[0].split()[-1]).netloc, rules=[ALERTS]) as url:
            yield Scraper(url, sink, health)
    finally:
        sink.close()


@pytest.fixture(scope="module")
def records() -> list[RequestRecord]:
    asks = [
        Ask(at=n * 7 * MS, prompt=20 + 37 * n % 300, output=3 + n % 11, slower=n % 5 * 300 * US) for n in range(120)
    ]
    return Script(slots=6).run(*asks, Ask(refuse="body")).records()
