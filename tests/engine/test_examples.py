"""Every file in ``examples/``, run as its readers would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagetrace import load
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.conftest import Starter
from tests.engine.serving import Server, free_port
from tests.invariants import check_all
from tests.receivers import check_rules, receiver

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples"
ARGUMENTS = ("--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
TESTED = {
    "serve.sh", "client.py", "read_store.py", "otlp.sh", "offline.py", "async_engine.py", "own_provider.py",
    "Dockerfile",
}  # fmt: skip


def environment(starter: Starter, name: str = "plain", **more: str) -> dict[str, str]:
    """This machine's, with the programs of this Python first, as in an activated environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    added = {**starter.engine.environment(), **CONFIGURATIONS[name].environment(), **more}
    return {**os.environ, "PATH": path, **added}


def python(example: str, folder: Path, variables: dict[str, str], *arguments: str) -> list[list[str]]:
    """The words of each line that an example printed."""
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@contextmanager
def served(example: str, starter: Starter, model: Path, folder: Path, **more: str) -> Iterator[str]:
    """The URL of a server that an example has started."""
    port = free_port()
    command = ["sh", str(EXAMPLES / example), str(model), "--port", str(port), *ARGUMENTS]
    with Server(command, port=port, log=folder / "log", environment=environment(starter, **more)) as server:
        yield f"http://127.0.0.1:{port}"
        assert server.stop() == 0, server.tail()


def test_every_example_is_here_and_in_the_readme() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == TESTED
    named = re.findall(r"\]\(examples/([^)]+)\)", (REPO / "README.md").read_text())
    assert set(named) == TESTED


def test_a_server_its_client_and_its_store(starter: Starter, model: Path, tmp_path: Path) -> None:
    store = tmp_path / "traces.db"
    with served("serve.sh", starter, model, tmp_path, STORE=str(store)) as url:
        ((response_id, trace_id),) = python("client.py", tmp_path, environment(starter), url)
    (record,) = load(store).requests
    check_all([record], complete=True)
    assert (record.request_id, record.trace_id, record.status) == (response_id, trace_id, "ok")
    lines = python("read_store.py", tmp_path, environment(starter), str(store))
    assert lines[0][:2] == ["1", "requests,"]
    assert response_id in " ".join(lines[1])


def test_traces_for_a_collector(starter: Starter, model: Path, tmp_path: Path) -> None:
    with receiver() as sink:
        with served("otlp.sh", starter, model, tmp_path, ENDPOINT=sink.url) as url:
            ((_, trace_id),) = python("client.py", tmp_path, environment(starter), url)
        spans = sink.wait(13)
    check_rules(sink.traces())
    assert len(spans) == 13
    assert {span.trace_id.hex() for span in spans} == {trace_id}


def test_offline(starter: Starter, model: Path, tmp_path: Path) -> None:
    lines = python("offline.py", tmp_path, environment(starter, "plain_inproc"), str(model))
    assert [line[1] for line in lines if len(line) > 1 and line[1] == "ok"] == ["ok", "ok"]
    check_all(load(tmp_path / "traces.db").requests, complete=True)


def test_own_provider(starter: Starter, model: Path, tmp_path: Path) -> None:
    lines = python("own_provider.py", tmp_path, environment(starter, "plain_inproc"), str(model))
    spans = {line[0]: (line[2], " ".join(line[5:])) for line in lines if len(line) > 5 and line[1] == "below"}
    (batch,) = [span for span, (above, name) in spans.items() if name == "nightly batch"]
    records = load(tmp_path / "traces.db").requests
    check_all(records, complete=True)
    assert {record.span_id: record.parent_span_id for record in records} == {
        span: batch for span, (above, _) in spans.items() if above == batch
    }
    stages = sum(stage.duration_ms is not None for record in records for stage in record.stages)
    assert len(records) == 2 and len(spans) == 1 + 2 + stages


def test_async_engine(starter: Starter, model: Path, tmp_path: Path) -> None:
    lines = python("async_engine.py", tmp_path, environment(starter), str(model))
    said = {line[0]: line[1:3] for line in lines if line and line[0].startswith("request-")}
    assert said == {
        "request-0": ["0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"],
        "request-1": ["4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"],
    }
    check_all(load(tmp_path / "traces.db").requests, complete=True)


@pytest.mark.skipif(not shutil.which("unshare") or os.getuid() != 0, reason="only root can make process 1")
def test_the_container_s_entry_point(starter: Starter, tmp_path: Path) -> None:
    """As process 1, with plain commands for the server. (More of that: tests/unit/test_supervise.py.)"""
    text = (EXAMPLES / "Dockerfile").read_text()
    found = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert found, "the entry point has to be in the form that starts no shell, which would be process 1"
    entry = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *json.loads(found[1])]
    variables = environment(starter)
    said = subprocess.run([*entry, "sh", "-c", "echo $PPID; exit 7"], cwd=tmp_path, env=variables, capture_output=True)
    assert (said.stdout, said.returncode) == (b"1\n", 7), said.stderr
    assert (tmp_path / "traces.db").exists()
    waiting = "trap 'echo got; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    command = [*entry, "sh", "-c", waiting]
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert process.stdout.readline() == "got\n"
        assert process.wait(60) == 3
