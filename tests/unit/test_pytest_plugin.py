"""The pytest plug-in: what it asserts, and how it says so."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from stagetrace import pytest_plugin
from stagetrace.gate.ab import Plan
from stagetrace.pytest_plugin import Measured
from stagetrace.store import StoreWriter
from tests.unit.fake_server import Fake, serving
from tests.unit.helpers import python
from tests.unit.stored import RUN, request


class Server:
    """What the plug-in sees of a server."""

    def __init__(self, url: str, store: Path) -> None:
        self.url, self.store = url, store


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """A server that has answered 20 requests, of 1 to 20 ms of prefill."""
    store = tmp_path / "s.db"
    with serving(Fake()) as fake:
        found = Measured(Server(fake.url, store))  # type: ignore[arg-type]
        found.load(requests=20, output_tokens="1", prompt_tokens="50", warmup=1)
        ids = [headers["x-request-id"] for headers, _ in fake.asked]
    records = [request(n, external_id=name) for n, name in enumerate(ids)]
    for n, record in enumerate(r for r in records if "warm" not in str(r.external_id)):
        record.stage("prefill").duration_ms = n + 1.0
        record.stage("embedding").duration_ms = None
        record.stage("embedding").state = "fused"
    with StoreWriter(store) as writer:
        writer.write_run(RUN)
        writer.write_requests(records)
    return found


def test_it_is_installed_under_its_name() -> None:
    assert {e.value for e in entry_points(group="pytest11") if e.name == "stagetrace"} == {"stagetrace.pytest_plugin"}
    done = python(
        "import sys, stagetrace.pytest_plugin; print([m for m in sys.modules if m.startswith('stagetrace.')])"
    )
    assert done.stdout == "['stagetrace.pytest_plugin']\n", "every pytest run here pays for it"


def test_a_stage_within_its_limits(measured: Measured) -> None:
    measured.assert_stage("prefill", p50_ms=10.5, p95_ms=19.1)
    measured.assert_stage("ttft", p99_ms=5)
    assert len(measured.requests()) == 20, "the warm-up is no part of it"


def test_a_stage_beyond_its_limit(measured: Measured) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"prefill: p50 is 10.50 ms over 20 requests, 10 ms at most"):
        measured.assert_stage("prefill", p50_ms=10)
    with pytest.raises(pytest.fail.Exception, match="embedding has no time in any of 20 requests fused"):
        measured.assert_stage("embedding", p50_ms=10)


def test_what_cannot_be_asserted(measured: Measured) -> None:
    with pytest.raises(ValueError, match="warp: no timer or stage"):
        measured.assert_stage("warp", p50_ms=1)
    with pytest.raises(ValueError, match="give a limit"):
        measured.assert_stage("prefill")
    with pytest.raises(ValueError, match="write a limit as"):
        measured.assert_stage("prefill", most=1)
    with pytest.raises(ValueError, match="nothing was sent yet"):
        Measured(Server(measured.url, measured.store)).assert_stage("prefill", p50_ms=1)  # type: ignore[arg-type]


def test_requests_that_are_not_recorded(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "STORED_S", 0.0)
    with serving(Fake()) as fake:
        other = Measured(Server(fake.url, measured.store))  # type: ignore[arg-type]
        other.send(Plan(requests=2, output_tokens="1", prompt_tokens="50", warmup=1))
    with pytest.raises(pytest.fail.Exception, match="has 0 of 2 requests: is the server recorded"):
        other.assert_stage("prefill", p50_ms=1)
    with (
        serving(Fake(refused=frozenset({1}))) as fake,
        pytest.raises(pytest.fail.Exception, match="1 of 2 requests failed"),
    ):
        Measured(Server(fake.url, measured.store)).load(requests=2, warmup=1)  # type: ignore[arg-type]
