"""The pytest plug-in: what it asserts, and how it says so."""

from __future__ import annotations

import subprocess
import sys
import textwrap
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
    with pytest.raises(pytest.fail.Exception, match=r"prefill: p50 is 10.50 ms, 10 ms at most; over 20 requests"):
        measured.assert_stage("prefill", p50_ms=10, p95_ms=60)
    (longest,) = [r.request_id for r in measured.requests() if r.stage("prefill").duration_ms == 20.0]
    both = (
        rf"p50 is 10.50 ms, 1 ms at most; p95 is 19.05 ms, 2 ms at most; .* longest 20.00 ms: .* --request {longest}$"
    )
    with pytest.raises(pytest.fail.Exception, match=both):
        measured.assert_stage("prefill", p50_ms=1, p95_ms=2)
    with pytest.raises(pytest.fail.Exception, match=r"embedding has no time in any of 20 requests \(fused\)"):
        measured.assert_stage("embedding", p50_ms=10)


def test_what_cannot_be_asserted(measured: Measured) -> None:
    failed = pytest.fail.Exception
    with pytest.raises(failed, match="warp: no timer or stage"):
        measured.assert_stage("warp", p50_ms=1)
    with pytest.raises(failed, match="give a limit"):
        measured.assert_stage("prefill")
    with pytest.raises(failed, match="write a limit as"):
        measured.assert_stage("prefill", most=1)
    with pytest.raises(failed, match="nothing was sent yet"):
        Measured(Server(measured.url, measured.store)).assert_stage("prefill", p50_ms=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"requests": 0}, "load(requests=0): give a whole number of 1 or more"),
        ({"requests": 2.5}, "load(requests=2.5): give a whole number of 1 or more"),
        ({"concurrency": -4}, "load(concurrency=-4): give a whole number of 1 or more"),
        ({"warmup": -1}, "load(warmup=-1): give a whole number of 0 or more"),
    ],
)
def test_what_cannot_be_sent(measured: Measured, arguments: dict[str, int], said: str) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        measured.load(**arguments)
    assert str(failed.value) == said


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), 0, -3.0, True, "3"])
def test_a_limit_is_a_time(measured: Measured, limit: float) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"p50_ms=.*: a limit is a time in ms, more than 0"):
        measured.assert_stage("prefill", p50_ms=limit)


def test_a_server_that_does_not_start_is_tried_once(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    (tmp_path / "server.py").write_text(f"open({str(tries)!r}, 'a').write('x'); raise SystemExit(3)")
    command = f"{sys.executable} {tmp_path / 'server.py'} {{port}}"
    with pytest_plugin.servers(tmp_path) as start:
        for _ in range(2):
            with pytest.raises(pytest.fail.Exception, match=r"the server ended with 3; its log is .*server-1\.log"):
                start(command)
        with pytest.raises(pytest.fail.Exception, match=r"server-2\.log"):
            start(command + " more")
    assert tries.read_text() == "xx"


def test_each_load_has_prompts_of_its_own_unless_told(tmp_path: Path) -> None:
    """Those of a load before would be found in the prefix cache."""
    with serving(Fake()) as fake:
        here = Measured(Server(fake.url, tmp_path / "s.db"))  # type: ignore[arg-type]
        sent = []
        for seed in (None, None, 2, 2, None):
            already = len(fake.asked)
            here.load(requests=3, output_tokens="1", prompt_tokens="50", warmup=1, seed=seed)
            sent.append(set(fake.texts()[already:][-3:]))
        assert sent[2] == sent[3] and len(sent[0] | sent[1] | sent[2] | sent[4]) == 12
    with serving(Fake(refused=frozenset({1}))) as fake:
        here = Measured(Server(fake.url, tmp_path / "s.db"))  # type: ignore[arg-type]
        with pytest.raises(pytest.fail.Exception, match="1 of 3 requests failed"):
            here.load(requests=3, output_tokens="1", prompt_tokens="50", warmup=1)
        failed = set(fake.texts())
        fake.refused = frozenset()
        here.load(requests=3, output_tokens="1", prompt_tokens="50", warmup=1)
        assert not failed & set(fake.texts()[-3:]), "what failed may be in the cache in part"


def test_a_failure_shows_the_line_of_the_test_and_none_of_ours(tmp_path: Path) -> None:
    tests = """
        from stagetrace.pytest_plugin import Measured
        def test_too_early():
            class Server: url, store = "http://127.0.0.1:1", "s.db"
            Measured(Server()).assert_stage("prefill", p95_ms=120)
        def test_nobody_there():
            class Server: url, store = "http://127.0.0.1:1", "s.db"
            Measured(Server()).load(prompt_tokens="many")
        def test_no_program(stagetrace_server):
            stagetrace_server("no-such-program --port {port}")
    """
    (tmp_path / "test_latency.py").write_text(textwrap.dedent(tests))
    done = subprocess.run([sys.executable, "-m", "pytest"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    text = done.stdout
    assert done.returncode == 1 and "3 failed" in text, text
    assert "pytest_plugin.py" not in text.partition("short test summary")[0], text
    assert 'assert_stage("prefill", p95_ms=120)' in text and "nothing was sent yet; call load() first" in text
    assert "not a mix" in text and 'load(prompt_tokens="many")' in text
    assert "no program no-such-program" in text and 'stagetrace_server("no-such-program' in text


def test_requests_that_are_not_recorded(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "STORED_S", 0.0)
    with serving(Fake()) as fake:
        other = Measured(Server(fake.url, measured.store))  # type: ignore[arg-type]
        other.send(Plan(requests=2, output_tokens="1", prompt_tokens="50", warmup=1))
    with pytest.raises(pytest.fail.Exception, match="has 0 of 2 requests: is stagetrace installed where"):
        other.assert_stage("prefill", p50_ms=1)
    with (
        serving(Fake(refused=frozenset({1}))) as fake,
        pytest.raises(pytest.fail.Exception, match="1 of 2 requests failed"),
    ):
        Measured(Server(fake.url, measured.store)).load(requests=2, warmup=1)  # type: ignore[arg-type]
