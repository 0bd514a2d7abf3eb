"""``stagetrace run`` and ``stagetrace export`` with exporters: what CMD is told, what gets out, and at what cost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from stagetrace import load, session
from stagetrace.collect.spawn import spawn
from stagetrace.model import RunRecord
from stagetrace.store import StoreWriter
from tests.receivers import check_rules, receiver, silent
from tests.unit.helpers import DEADLINE_S, wait_until
from tests.unit.scripted import MS, Ask, Script

STAGETRACE = [sys.executable, "-m", "stagetrace"]
#: A server of COUNT calls, which says that it is done and stays for SECONDS or until SIGTERM.
SERVE = """
import os, signal, sys, time
from pathlib import Path
from stagetrace import marks
from stagetrace.context import new_root
from stagetrace.recorder import Recorder

signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
recorder = Recorder(Path(os.environ["STAGETRACE_SESSION"]))
for number in range(int(sys.argv[1])):
    root = new_root()
    recorder.mark(marks.ROOT, root.number, root.trace_high >> 1, root.trace_low >> 1, 1)
    recorder.mark(marks.END, root.number)
print("served", os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(5)
"""
CALLER = f"00-{'a' * 32}-{'b' * 16}-00"
Done = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, base: Path, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def run(*before: str, calls: int = 3, seconds: float = 0.0) -> Done:
    command = [*STAGETRACE, "run", *before, "--", sys.executable, "-c", SERVE, str(calls), str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_calls_come_out_as_traces_and_metrics() -> None:
    with receiver() as endpoint:
        done = run("--no-store", "--otlp", endpoint.url)
        assert (done.returncode, done.stdout) == (5, "served None\n")
        assert done.stderr.count("\n") == 1 and "recording (session" in done.stderr
        check_rules(endpoint.traces())
        assert len({span.trace_id for span in endpoint.spans()}) == 3
        (point,) = endpoint.metrics()["gen_ai.server.request.duration"].histogram.data_points
        assert point.count == 3


def test_the_variable_that_engines_act_on_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{endpoint.url}/v1/traces")
        done = run("--no-store")
        assert (done.returncode, done.stdout) == (5, "served None\n")
        said, _began = done.stderr.splitlines()
        assert said.startswith("stagetrace: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is for stagetrace's export")
        assert len({span.trace_id for span in endpoint.spans()}) == 3


def test_sampling_is_for_the_export_only(tmp_path: Path) -> None:
    with receiver() as endpoint:
        assert run("--otlp", endpoint.url, "--sample", "0").returncode == 5
        assert not endpoint.spans()
        (point,) = endpoint.metrics()["gen_ai.server.request.duration"].histogram.data_points
        assert point.count == 3
    assert len(load(tmp_path / "stagetrace.db").requests) == 3


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_an_endpoint_that_hangs_keeps_the_exit_code_and_is_given_up(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with silent() as url:
        command = [*STAGETRACE, "run", "--no-store", "--otlp", url, "--", sys.executable, "-c", SERVE, "3", "1.5"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout and process.stderr
        process.stdout.read()  # until the server has gone
        began = time.monotonic()
        assert process.wait(DEADLINE_S) == 5
        assert time.monotonic() - began < 9.0  # gives up after 3 s; the endpoint itself has 10
        assert "spans were not exported (shutdown 3)" in process.stderr.read()


def test_signals_still_reach_the_command() -> None:
    """Threads of the exporters would take them, and end the parent, were they not told to leave them alone."""
    with receiver() as endpoint:
        options = ["--no-store", "--otlp", endpoint.url, "--prometheus", "127.0.0.1:0"]
        command = [*STAGETRACE, "run", *options, "--", sys.executable, "-c", SERVE, "3", "60"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "served None\n"
        assert len(endpoint.wait(3)) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 9, process.stderr.read()
        process.communicate()


def test_prometheus_can_scrape_while_the_command_runs() -> None:
    options = ["--no-store", "--prometheus", "127.0.0.1:0"]
    command = [*STAGETRACE, "run", *options, "--", sys.executable, "-c", SERVE, "3", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    url = process.stderr.readline().split()[-1]
    assert url.startswith("http://127.0.0.1:")
    process.stdout.readline()

    def counted() -> bool:
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return any(
            li.startswith("gen_ai_server_request_duration_seconds_count") and li.endswith(" 3.0") for li in lines
        )

    wait_until(counted, "three calls on the page")
    process.terminate()
    assert process.wait(DEADLINE_S) == 9
    process.communicate()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--otlp", "localhost:4318"), "--otlp localhost:4318"),
        (("--otlp", "http://user:secret@a..b:1"), "--otlp http://a..b:1: not a URL"),
        (("--sample", "2"), "--sample 2"),
        (("--sample", "x"), "--sample"),
        (("--prometheus", "nowhere"), "--prometheus nowhere"),
        (("--prometheus", "TAKEN"), "Address already in use"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    options: tuple[str, str], says: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        option, value = options
        value = value.replace("TAKEN", f"127.0.0.1:{server.getsockname()[1]}")
        command = [*STAGETRACE, "run", option, value, "--", "touch", str(tmp_path / "started")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert says in said and said.startswith("stagetrace: ")
    assert not (tmp_path / "started").exists()


def test_a_collector_beside_an_engine_exports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as endpoint:
        directory = session.create()
        code = "import os, sys\nfrom pathlib import Path\n" + SERVE
        environment = {**os.environ, session.ENV: str(directory)}
        collector = spawn(directory, {"store": None, "otlp": endpoint.url, "sample": 1.0, "prometheus": None})
        subprocess.run([sys.executable, "-c", code, "3", "0"], env=environment, timeout=DEADLINE_S, check=False)
        assert len(endpoint.wait(3)) == 3
        collector.terminate()  # which it ignores: it ends when this process does
        collector.kill()
        collector.wait(DEADLINE_S)
    for path in directory.glob("*"):
        path.unlink()
    directory.rmdir()


# ---------------------------------------------------------------- files


def stored(path: Path) -> Path:
    with StoreWriter(path) as writer:
        writer.write_run(RunRecord("s", "paper", "1", "tiny"))
        writer.write_requests(Script().run(*(Ask(at=n * MS) for n in range(4)), Ask(traceparent=CALLER)).records())
    return path


def export(*arguments: object) -> Done:
    command = [*STAGETRACE, "export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_store_is_exported_with_the_spans_that_would_have_been_sent(tmp_path: Path) -> None:
    store, out = stored(tmp_path / "s.db"), tmp_path / "out.json"
    done = export(store, "--format", "otlp-json", "-o", out)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"5 requests in {out}\n")
    found = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in out.read_text().splitlines()]
    assert [len(spans) for spans in found] == [13] * 5
    assert {spans[0]["traceId"] for spans in found} == {record.trace_id for record in load(store).requests}
    kept = {(record.caller_sampled, record.engine, record.process) for record in load(store).requests}
    assert kept == {(None, 7, 101), (False, 7, 101)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("s.db", "--format", "otlp-yaml", "-o", "o"), "--format otlp-yaml: not known; there is otlp-json"),
        (("s.db",), "-o OUT"),
        (("gone.db", "-o", "o"), "gone.db"),
        (("s.db", "-o", "s.db"), "s.db: is the store itself"),
        (("s.db", "-o", "no/such/place"), "no/such/place: No such file or directory"),
        (("s.db", "-o", "."), ".: Is a directory"),
        (("letter", "-o", "o"), "not a stagetrace store"),
        (("s.db", "-o", "o"), "-o o: there is something else"),
        (("s.db", "-o", "another.db"), "-o another.db: there is something else"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_overwritten(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    before = stored(tmp_path / "s.db").read_bytes()
    (tmp_path / "letter").write_text("Dear reader")
    (tmp_path / "o").write_text("keep")
    (tmp_path / "another.db").write_bytes(before)
    done = export(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert says in said and said.startswith("stagetrace: ")
    assert (tmp_path / "o").read_text() == "keep" and (tmp_path / "s.db").read_bytes() == before
    assert (tmp_path / "another.db").read_bytes() == before


@pytest.mark.parametrize("out", ["-", "out/stdout", "/dev/fd/1"])
def test_what_leads_to_stdout_is_written_there_and_stays(out: str, tmp_path: Path) -> None:
    store = stored(tmp_path / "s.db")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    done = export(store, "-o", out)
    assert (done.returncode, done.stderr) == (0, f"5 requests in {out}\n")
    assert len(done.stdout.splitlines()) == 5 and all(map(json.loads, done.stdout.splitlines()))
    with open(tmp_path / "log", "w+b") as log:
        log.write(b"before\n")
        log.flush()
        command = [*STAGETRACE, "export", str(store), "-o", out]
        assert subprocess.run(command, stdout=log, stderr=subprocess.PIPE, timeout=DEADLINE_S).returncode == 0
    assert [line[:6] for line in (tmp_path / "log").read_text().splitlines()] == ["before"] + ['{"reso'] * 5
    assert (tmp_path / "out" / "stdout").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "base") == ["log", "out", "s.db"]


def test_a_link_is_followed_and_a_descriptor_written(tmp_path: Path) -> None:
    store = stored(tmp_path / "s.db")
    assert export(store, "-o", tmp_path / "target").returncode == 0
    with open(tmp_path / "target", "a") as old:
        old.write("of an earlier export\n")
    (tmp_path / "link").symlink_to("target")
    assert export(store, "--output", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink() and len((tmp_path / "target").read_text().splitlines()) == 5
    with open(tmp_path / "third", "wb") as third:
        command = [*STAGETRACE, "export", str(store), "-o", f"/dev/fd/{third.fileno()}"]
        assert subprocess.run(command, pass_fds=[third.fileno()], timeout=DEADLINE_S).returncode == 0
    assert len((tmp_path / "third").read_text().splitlines()) == 5


def test_a_variable_that_others_read_too_keeps_no_server_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "jaeger_remote")
    done = run("--no-store")
    assert (done.returncode, done.stdout) == (5, "served None\n")
    assert "OTEL_TRACES_SAMPLER=jaeger_remote" in done.stderr and "nothing is exported" in done.stderr
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "user:secret@foo")
    done = run("--no-store")
    assert (done.returncode, done.stdout) == (5, "served None\n") and "secret" not in done.stderr
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=foo: not a URL" in done.stderr and "nothing is exported" in done.stderr
    refused = run("--no-store", "--otlp", "http://127.0.0.1:9")
    assert (refused.returncode, refused.stdout) == (2, "")
