"""The collector as a thread of the host: forks, the interpreter's end, and everything else that can come between."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace import load, session
from stagetrace.exporting import Options
from stagetrace_otlp import EXPORTER, pipeline
from tests.receivers import receiver
from tests.unit.helpers import python
from tests.unit.scripted import Ask, Script

#: A host with a provider of its own that prints spans as they end, and a call of a client by hand.
HOST = """
import json, os, sys, threading, time
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from stagetrace import api, marks, provider as ours, runtime, session, status, uninstrument
from stagetrace_vllm import roots

def put(what, value):
    os.write(1, f"{what} {json.dumps(value)}\\n".encode())  # whole, whoever else writes

class Printing(SpanProcessor):
    broken = False
    lock = threading.Lock()
    def on_start(self, span, parent_context=None):
        if self.broken:
            raise ZeroDivisionError
    def on_end(self, span):
        about = {"name": span.name, "id": f"{span.context.span_id:016x}", "pid": os.getpid()}
        with self.lock:  # as processors have; a fork in here would leave a child that waits for ever
            time.sleep(0.005)
            put("SPAN", about | {"status": dict(span.attributes).get("stagetrace.status")})

provider = TracerProvider()
printing = Printing()
provider.add_span_processor(printing)

def say(what, **more):
    put(what, {k: v for k, v in (status() | more).items() if k != "hooks"})

def start(**more):
    api.instrument({"store": sys.argv[1], "tracer_provider": provider} | more)
    runtime.engine_starts()

def call(ends=True):
    root = roots.begin(marks.HTTP, 1)
    if ends:
        roots.end(root)
    return root
"""


def run(code: str, store: Path, base: Path, **environment: str) -> tuple[dict[str, list[Any]], str]:
    """What the program said: documents by their first word, and its log."""
    done = python(HOST + code, store, **environment, **{session.BASE_ENV: str(base)})
    assert done.returncode == 0, done.stderr
    said: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        word, _, text = line.partition(" ")
        said.setdefault(word, []).append(json.loads(text))
    assert list(base.iterdir()) == [], "the session is tidied up"
    return said, done.stderr


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


def test_calls_are_live_spans_and_in_the_store(store: Path, base: Path) -> None:
    code = """
start()
root = call()
flushed = api.flush(30)
say("STATUS", flushed=flushed, id=f"{root.number:016x}", threads=[t.name for t in threading.enumerate()])
"""
    said, log = run(code, store, base)
    (state,), (span,) = said["STATUS"], said["SPAN"]
    assert state["flushed"] and state["collector"] == "thread"
    assert state["threads"].count("stagetrace-collector") == 1
    (record,) = load(store).requests
    assert record.span_id == span["id"] == state["id"]
    assert (record.status, span["status"], span["name"]) == ("ok", "ok", "chat")
    assert log == ""


def test_at_the_interpreter_s_end_everything_is_written(store: Path, base: Path) -> None:
    """Calls that had ended, though not settled, and those that still ran."""
    code = """
start()
ended, runs = call(), call(ends=False)
put("ENDED", f"{ended.number:016x}")
sys.exit(0)
"""
    said, log = run(code, store, base)
    (ended,) = said["ENDED"]
    assert {span["id"]: span["status"] for span in said["SPAN"]}[ended] == "ok"
    assert sorted(span["status"] for span in said["SPAN"]) == ["in_flight", "ok"]
    assert sorted(record.status for record in load(store).requests) == ["in_flight", "ok"]
    assert log == ""


def test_uninstrument_ends_the_thread(store: Path, base: Path) -> None:
    code = """
start()
call(); call(ends=False)
uninstrument()
say("STATUS", threads=[t.name for t in threading.enumerate()], named=os.environ.get(session.ENV))
before = call().live
start()
again = call().live
put("LIVE", [before is not None, again is not None])
"""
    said, _ = run(code, store, base)
    (state,) = said["STATUS"]
    assert state["collector"] is None and state["session"] is None and state["named"] is None
    assert "stagetrace-collector" not in state["threads"]
    assert sorted(span["status"] for span in said["SPAN"]) == ["in_flight", "ok", "ok"]
    assert said["LIVE"] == [[False, True]], "a new engine, a new session"


def test_a_forked_child_has_neither_thread_nor_spans(store: Path, base: Path) -> None:
    """Many forks while the thread polls: none may find a lock that nobody holds, and none may end a span twice."""
    code = """
start()
running = call(ends=False)
for number in range(30):
    call()
    child = os.fork()
    if child == 0:
        root = call()
        say("CHILD", live=root.live is not None, threads=threading.active_count(), number=root.number)
        provider.get_tracer("x").start_span("theirs").end()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
roots.end(running)
api.flush(30)
say("PARENT", pid=os.getpid())
"""
    said, log = run(code, store, base)
    assert len(said["CHILD"]) == 30
    assert {(c["live"], c["threads"], c["collector"]) for c in said["CHILD"]} == {(False, 1, "process")}
    (parent,) = said["PARENT"]
    ours = [span for span in said["SPAN"] if span["name"] != "theirs"]
    assert {span["pid"] for span in ours} == {parent["pid"]}
    assert len({span["id"] for span in ours}) == len(ours) == 31
    assert len({child["number"] for child in said["CHILD"]}) == 30
    # What children record is collected like that of any process of the engine.
    assert len(load(store).requests) == 61
    assert log == ""


def test_a_provider_that_raises_costs_the_request_nothing(store: Path, base: Path) -> None:
    code = """
start()
printing.broken = True
made = [call() for _ in range(7)]
printing.broken = False
made.append(call())
api.flush(30)
put("LIVE", [root.live is not None for root in made])
"""
    said, log = run(code, store, base)
    assert said["LIVE"] == [[False] * 8], "after a few failures it is not asked any more"
    assert "SPAN" not in said
    assert len({(r.trace_id, r.span_id) for r in load(store).requests}) == 8
    assert log.count("\n") == 1 and "hook tracer_provider failed (ZeroDivisionError)" in log


def test_a_provider_that_cannot_be_used_leaves_the_recording(store: Path, base: Path) -> None:
    code = """
class Broken:
    def get_tracer(self, *_, **__):
        raise ValueError("out of order")
start(tracer_provider=Broken())
call()
say("STATUS", flushed=api.flush(30))
"""
    done = python(HOST + code, store, **{session.BASE_ENV: str(base)})
    assert '"collector": "process"' in done.stdout and '"flushed": true' in done.stdout
    assert "tracer_provider cannot be used (ValueError: out of order); recording goes on without it" in done.stderr
    assert len(load(store).requests) == 1


def test_what_is_no_provider_is_said(store: Path, base: Path) -> None:
    done = python(HOST + 'start(tracer_provider="mine")\nsay("STATUS")', store, **{session.BASE_ENV: str(base)})
    assert '"collector": "process"' in done.stdout
    assert "tracer_provider is not used: a TracerProvider has get_tracer(), this str not" in done.stderr


def test_in_a_session_that_another_process_collects(store: Path, base: Path) -> None:
    code = """
start()
start()
say("STATUS", live=call().live is not None)
"""
    command = [
        sys.executable,
        "-m",
        "stagetrace",
        "run",
        "--store",
        str(store),
        "--",
        sys.executable,
        "-c",
        HOST + code,
    ]
    done = subprocess.run([*command, str(store)], capture_output=True, text=True, timeout=60)
    assert '"collector": "process"' in done.stdout and '"live": false' in done.stdout, done.stderr
    assert done.stderr.count("tracer_provider is not used: another process collects this session") == 1
    assert len(load(store).requests) == 1


def test_traces_go_to_the_provider_only(store: Path, base: Path) -> None:
    """Whatever the environment says: it is there for the provider, as a rule, and spans would come twice."""
    with receiver() as endpoint:
        code = f"""
start(otlp={endpoint.url!r})
call()
api.flush(30)
import logging
put("LEVEL", logging.getLogger("opentelemetry").level)
"""
        said, log = run(code, store, base, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{endpoint.url}/v1/traces")
        assert len(said["SPAN"]) == 1 and endpoint.spans() == []
        (point,) = endpoint.metrics()["gen_ai.server.request.duration"].histogram.data_points
        assert point.count == 1
    assert said["LEVEL"] == [0], "the host's loggers are the host's"
    assert log == "stagetrace: traces go to tracer_provider only; otlp gets the metrics\n"


def test_a_killed_host_s_session_is_removed_by_the_next(store: Path, base: Path) -> None:
    killed = "start()\ncall()\nos.kill(os.getpid(), 9)"
    assert python(HOST + killed, store, **{session.BASE_ENV: str(base)}).returncode == -9
    assert len(list(base.iterdir())) == 1
    run("start()", store, base)


def test_without_a_provider_the_host_loads_nothing_of_the_collector(store: Path, base: Path) -> None:
    code = """
        import sys
        from stagetrace import api, runtime
        api.instrument({"store": sys.argv[1]})
        runtime.engine_starts()
        print(*sys.modules)
    """
    done = python(code, store, **{session.BASE_ENV: str(base)})
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "stagetrace" in loaded and not loaded & {"opentelemetry", "sqlite3", "typer", "rich"}
    assert "stagetrace.collect.loop" not in done.stdout.split()


def test_an_ending_interpreter_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on: what is to be closed is closed all the same."""
    with receiver() as endpoint:
        sink = EXPORTER.make(Options(otlp=endpoint.url, tracer_provider=object()), {}, lambda line: None)
        assert sink is not None
        sink.requests(Script().run(Ask()).records())

        class Thread:
            def __init__(self, **_: object) -> None:
                pass

            def start(self) -> None:
                raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(pipeline, "threading", SimpleNamespace(Thread=Thread))
        sink.close()
        assert "gen_ai.server.request.duration" in endpoint.metrics()
