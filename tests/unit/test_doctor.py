"""The doctor: every fault is found, named and costs exactly the stages it costs."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from stagetrace import address, canary, doctor, marks, session
from stagetrace.collect.loop import Collector
from stagetrace.hooks import HookGroup, HookSpec
from stagetrace.live import server as server_of
from stagetrace.live import servers
from stagetrace.recorder import Recorder
from stagetrace.runtime import Integration
from stagetrace.serve import free_port
from stagetrace.stages import STAGES
from stagetrace_vllm import environment
from tests.unit.helpers import Engine
from tests.unit.test_address import UNUSABLE
from tests.unit.test_cli import Cli

SOURCE = """
class Scheduler:
    def schedule(self, request): ...
    def update(self, output): ...
class Runner:
    def forward(self): ...
"""
Make = Callable[..., Engine]


@pytest.fixture
def stagetrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.setenv("COLUMNS", "400")
    return Cli(monkeypatch, capfd)


@pytest.fixture(autouse=True)
def plain(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint and no filter of whoever runs the tests."""
    for name in os.environ:
        if name.startswith(("OTEL_", "VLLM_")):
            monkeypatch.delenv(name)


def everything(made: Engine, *extra: HookGroup) -> tuple[HookGroup, ...]:
    """Groups that between them watch all twelve stages."""
    keys = tuple(stage.key for stage in STAGES)
    schedule = HookSpec(made.target("core:Scheduler.schedule"), takes=("request",))
    update = HookSpec(made.target("core:Scheduler.update"), otherwise=(made.target("core:Scheduler.finish"),))
    return (HookGroup("all", keys, (schedule, update)), *extra)


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None, *groups: HookGroup, **more: Any) -> Integration:
    """An integration whose engine is there in this version, or is not."""
    made = Integration(
        "paper", "paper", ("paper-cpu", "paper"), ("0.18", "0.33"), groups, demo=lambda: None,
        install="pip install paper", **more,
    )  # fmt: skip

    def found(name: str) -> str:
        if name != "paper" or version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor, "integrations", lambda: [made])
    monkeypatch.setattr(doctor, "version", found)
    return made


def examined(stagetrace: Cli, code: int, *arguments: str) -> tuple[dict[str, Any], str]:
    ended, out, err = stagetrace("doctor", "--json", *arguments)
    assert ended == code, err
    document: dict[str, Any] = json.loads(out)
    assert list(document) == ["schema", "engine", "engine_version", "tested", "stages", "hooks", "exporter"]
    assert [(stage["number"], stage["key"]) for stage in document["stages"]] == [(s.number, s.key) for s in STAGES]
    assert all(line.startswith("stagetrace: ") for line in err.splitlines())
    return document, err


def unseen(document: dict[str, Any]) -> list[str]:
    return [stage["key"] for stage in document["stages"] if stage["state"] == "not_observable"]


# ---------------------------------------------------------------- engines


def test_all_is_well(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(core=SOURCE)
    installed(monkeypatch, "0.32.0", *everything(made))
    document, err = examined(stagetrace, 0)
    assert err == ""
    assert (document["engine"], document["engine_version"], document["tested"]) == ("paper", "0.32.0", True)
    assert document["hooks"] == [
        {"target": made.target(f"core:Scheduler.{name}"), "state": "resolved", "reason": None}
        for name in ("schedule", "update")
    ]
    assert {stage["state"] for stage in document["stages"]} == {"observable"}
    assert [stage["key"] for stage in document["stages"] if stage["reason"]] == ["embedding"]
    assert document["exporter"] == {"sent": 0, "failed": 0}
    code, out, err = stagetrace("doctor")
    assert (code, err) == (0, "")
    assert "paper 0.32.0 (tested)" in out and "hooks: 2 of 2 in order" in out and "MiB free" in out


def test_no_engine(stagetrace: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    document, err = examined(stagetrace, 2)
    assert (document["engine"], document["engine_version"], document["tested"]) == (None, None, False)
    assert len(unseen(document)) == 12
    (line,) = err.splitlines()
    assert "no engine is installed" in line and "pip install paper" in line
    out = stagetrace("doctor")[1]
    assert out.count("see below") == 12 and "pip install" not in out and "hooks:" not in out
    monkeypatch.setattr(doctor, "integrations", lambda: [])
    assert "reinstall stagetrace" in examined(stagetrace, 2)[1]


@pytest.mark.parametrize(("version", "word"), [("0.34.0", "newer"), ("1.0", "newer"), ("0.17.9", "older")])
def test_an_engine_that_was_not_tested(
    stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch, version: str, word: str
) -> None:
    installed(monkeypatch, version, *everything(engine(core=SOURCE)))
    document, _ = examined(stagetrace, 0)
    assert (document["tested"], unseen(document)) == (False, []), "what resolves is listed all the same"
    out = stagetrace("doctor")[1]
    assert f"paper {version} is {word} than what was tested (0.18 to 0.33)" in out


@pytest.mark.parametrize(
    ("version", "side"),
    [("0.18", 0), ("0.18.0rc1", 0), ("0.33.7+cpu", 0), ("0.32.1.dev5+g1", 0), ("0.17.9", -1), ("0.34.0", 1), ("1", 1)],
)
def test_the_ends_of_the_range_count(version: str, side: int) -> None:
    assert doctor.beyond(version, ("0.18", "0.33")) == side


# ---------------------------------------------------------------- hooks


def test_a_missing_hook_costs_its_groups_stages(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(core=SOURCE)
    gone = HookGroup("late", ("decode", "teardown"), (
        HookSpec(made.target("core:Scheduler.schedule"), takes=("batch",)),
        HookSpec(made.target("core:Runner.forward")),
    ))  # fmt: skip
    installed(monkeypatch, "0.32.0", *everything(made), gone)
    document, err = examined(stagetrace, 2)
    assert unseen(document) == ["decode", "teardown"]
    assert [hook["state"] for hook in document["hooks"]] == ["resolved", "resolved", "missing", "refused"]
    (line,) = err.splitlines()
    assert "hook group late (stages decode, teardown)" in line
    assert "Scheduler.schedule has no argument batch" in line and "use paper 0.18 to 0.33" in line
    assert "no argument batch" in document["stages"][10]["reason"]
    assert "missing" in stagetrace("doctor")[1]


def test_an_older_place_will_do(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(core=SOURCE.replace("update", "finish"))
    installed(monkeypatch, "0.32.0", *everything(made))
    document, _ = examined(stagetrace, 0)
    assert document["hooks"][1]["reason"] == f"at {made.target('core:Scheduler.finish')}"


@pytest.mark.parametrize(("there", "lost"), [("Runner", []), ("Nobody", ["prefill"])])
def test_one_of_several_alternatives_will_do(
    stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch, there: str, lost: list[str]
) -> None:
    made = engine(core=SOURCE)
    first = HookGroup("v1", ("prefill",), (HookSpec(made.target(f"core:{there}.forward")),), optional=True)
    other = HookGroup("v2", ("prefill",), (HookSpec(made.target("gone:Runner.forward")),), optional=True)
    facts = HookGroup("facts", (), (HookSpec(made.target("gone:Runner.more")),), optional=True)
    installed(monkeypatch, "0.32.0", *everything(made), first, other, facts)
    document, err = examined(stagetrace, 2 if lost else 0)
    assert unseen(document) == lost
    assert bool(err) is bool(lost)


def test_nothing_of_the_engine_is_imported(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(core="raise SystemExit('imported')\n" + SOURCE)
    installed(monkeypatch, "0.32.0", *everything(made))
    document, _ = examined(stagetrace, 0)
    assert unseen(document) == []


# ---------------------------------------------------------------- the environment


def test_a_plug_in_that_is_filtered_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.checks() == []
    for allowed, cure in (("other", "VLLM_PLUGINS=other,stagetrace"), ("", "VLLM_PLUGINS=stagetrace")):
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        (line,) = environment.checks()
        assert f"VLLM_PLUGINS={allowed} leaves stagetrace out" in line and cure in line
    monkeypatch.setenv("VLLM_PLUGINS", "other,stagetrace")
    assert environment.checks() == []
    monkeypatch.setattr(environment, "entry_points", lambda group: [])
    assert "no entry point" in environment.checks()[0]


def test_the_filter_costs_everything(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0", *everything(engine(core=SOURCE)), checks=environment.checks)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    document, err = examined(stagetrace, 2)
    assert len(unseen(document)) == 12
    assert {hook["state"] for hook in document["hooks"]} == {"resolved"}
    assert len(err.splitlines()) == 1 and "VLLM_PLUGINS=other leaves stagetrace out" in err


def test_recording_is_switched_off(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0", *everything(engine(core=SOURCE)))
    monkeypatch.setenv("STAGETRACE", "0")
    document, err = examined(stagetrace, 2)
    assert len(unseen(document)) == 12 and "STAGETRACE=0" in err and "unset it" in err


@pytest.mark.parametrize("what", ["gone", "file", "small"])
def test_no_place_for_sessions(
    stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    installed(monkeypatch, "0.32.0", *everything(engine(core=SOURCE)))
    place = tmp_path / what
    if what == "small":
        place.mkdir()
        monkeypatch.setattr(doctor, "ROOM_BYTES", 1 << 62)
    elif what == "file":
        place.touch()
    monkeypatch.setenv(session.BASE_ENV, str(place))
    document, err = examined(stagetrace, 2)
    assert len(unseen(document)) == 12
    assert str(place) in err and "STAGETRACE_TMPDIR" in err


def test_what_a_running_server_says(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(core=SOURCE)
    installed(monkeypatch, "0.32.0", *everything(made))
    schedule, update = (made.target(f"core:Scheduler.{name}") for name in ("schedule", "update"))
    directory = session.create()
    lock = session.own(directory)
    try:
        Recorder(directory).text(marks.HOOK, 0, f"{schedule} installed")
        document, err = examined(stagetrace, 0)
        assert (document["hooks"][0]["state"], err) == ("installed", "")
        # What is no hook of the table, but fails like one: no stage is lost for certain.
        Recorder(directory).text(marks.HOOK, 0, "torch.cuda.Event failing RuntimeError")
        document, err = examined(stagetrace, 0)
        assert document["hooks"][-1] == {"target": "torch.cuda.Event", "state": "failing", "reason": "RuntimeError"}
        assert unseen(document) == [] and err == ""
        # Another process's, long overwritten in its ring; the collector has kept it.
        told = {"1": {schedule: "waiting"}, "2": {update: "refused: it has moved"}}
        session.write(directory / session.HOOKS, json.dumps(told))
        document, err = examined(stagetrace, 2)
        assert document["hooks"][0]["state"] == "installed"
        assert document["hooks"][1] == {"target": update, "state": "refused", "reason": "it has moved"}
        assert len(unseen(document)) == 12 and "it has moved" in err
        session.write(directory / session.HOOKS, '{"half')
        (directory / session.PAUSED).touch()
        (server,) = servers()
        assert server.states == {schedule: "installed", "torch.cuda.Event": "failing RuntimeError"}
        assert "1 processes record, 1 hooks installed, 1 in trouble (torch.cuda.Event); paused" in server.words()
    finally:
        os.close(lock)


def test_the_collector_keeps_what_a_ring_forgets(directory: Path) -> None:
    recorder = Recorder(directory, capacity=64)
    recorder.text(marks.HOOK, 0, "core:Scheduler.schedule installed")
    collector = Collector(directory, [])
    collector.poll()
    for number in range(200):
        recorder.mark(99, number)
    lock = session.own(directory)
    try:
        assert server_of(directory).states == {"core:Scheduler.schedule": "installed"}
    finally:
        os.close(lock)
    assert json.loads((directory / session.HOOKS).read_text()) == {
        str(os.getpid()): {"core:Scheduler.schedule": "installed"}
    }


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_failed_in_another_thread_than_it_was_installed_in(directory: Path, first: bool) -> None:
    """Each has a ring of its own, and the rings are read in no order."""
    recorder = Recorder(directory)
    recorder.text(marks.HOOK, 0, "core:Scheduler.schedule installed")
    thread = threading.Thread(target=recorder.text, args=(marks.HOOK, 0, "core:Scheduler.schedule removed ValueError"))
    thread.start()
    thread.join()
    collector = Collector(directory, [])
    collector._discover()
    collector.rings = dict(sorted(collector.rings.items(), reverse=first))
    collector.poll()
    lock = session.own(directory)
    try:
        assert server_of(directory).states == {"core:Scheduler.schedule": "removed ValueError"}
    finally:
        os.close(lock)
    assert set(collector.assembler.book.hooks[os.getpid()].values()) == {"removed ValueError"}


# ---------------------------------------------------------------- the exporter


@contextmanager
def listening(status: int) -> Iterator[tuple[str, list[str]]]:
    """Something that answers every POST with ``status``; yields its address and the paths it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", paths
        finally:
            server.shutdown()
            thread.join()


def test_a_span_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(200) as (url, paths):
        assert canary.fly(url) == (1, 0, f"{url}/v1/traces", None)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{url}/base/")
        assert canary.fly().sent == 1
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{url}/elsewhere")
        assert canary.fly().sent == 1
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        assert canary.fly() == (0, 0, None, None)
    assert paths == ["/v1/traces", "/base/v1/traces", "/elsewhere"]


def test_the_wrong_endpoint(stagetrace: Cli, engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0", *everything(engine(core=SOURCE)))
    with listening(404) as (url, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        document, err = examined(stagetrace, 2)
        assert document["exporter"] == {"sent": 0, "failed": 1}
        assert unseen(document) == [], "recording does not depend on it"
        (line,) = err.splitlines()
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" in line and f"{url}/v1/traces" in line and "404" in line
    assert stagetrace("doctor", "--otlp", "nonsense")[0] == 2


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    url = f"http://127.0.0.1:{free_port()}"
    found = canary.fly(url)
    assert (found.sent, found.failed) == (0, 1)
    assert found.fault is not None and f"--otlp: no span arrives at {url}" in found.fault
    assert "(Connection refused)" in found.fault


def test_somebody_who_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        found = canary.fly(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert found.failed == 1 and found.fault is not None and "(" in found.fault


@pytest.mark.parametrize("url", [*filter(None, UNUSABLE), "http://user:secret@a..b"])
def test_what_is_no_endpoint(url: str) -> None:
    found = canary.fly(url)
    assert (found.sent, found.failed) == (0, 1)
    assert found.fault is not None and "not an address" in found.fault and found.fault.isprintable()
    assert address.shown(url) in found.fault and "secret" not in f"{found}"
