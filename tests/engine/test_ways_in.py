"""The ways to have a server recorded, on the real engine: from its own code, by a launcher, by process 1.

Others: `stagetrace run` in most tests here; offline and ``AsyncLLM`` in test_parents; beside the engine's own tracing
in test_native_tracing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagetrace import load
from tests.engine.conftest import NAME, Starter
from tests.engine.serving import Server, free_port, run_many
from tests.engine.ways import COMPLETION, IDS, came_in

STORE = "stagetrace.db"
CALLER = ("c" * 32, "d" * 16)
API_SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
SERVING = """
import stagetrace
stagetrace.instrument(store="stagetrace.db")

from vllm.entrypoints.launchers.api_server.entry import main

if __name__ == "__main__":  # the engine may start its processes by importing this file again
    main()
"""


def from_its_code(arguments: list[str], folder: Path) -> list[str]:
    (folder / "serving.py").write_text(SERVING)
    return [sys.executable, "serving.py", *arguments]


def by_a_launcher(arguments: list[str], _folder: Path) -> list[str]:
    launcher = str(Path(sys.executable).with_name("opentelemetry-instrument"))
    nowhere = [f"--{signal}_exporter=none" for signal in ("traces", "metrics", "logs")]
    return [launcher, *nowhere, *API_SERVER, *arguments]


def by_process_1(arguments: list[str], _folder: Path) -> list[str]:
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return [*inside, sys.executable, "-m", "stagetrace", "run", "--store", STORE, "--", *API_SERVER, *arguments]


namespaces = pytest.mark.skipif(not shutil.which("unshare") or os.getuid() != 0, reason="only root can make process 1")


@pytest.mark.parametrize("way", [from_its_code, by_a_launcher, pytest.param(by_process_1, marks=namespaces)])
def test_a_server(
    way: Callable[[list[str], Path], list[str]], starter: Starter, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    port = free_port()
    command = way(starter.engine.command(model, port)[len(API_SERVER) :], tmp_path)
    about = {"model": NAME, "max_tokens": 6, "ignore_eos": True}
    text = starter.prompt(60, 1)
    bodies = [
        {**about, "messages": [{"role": "user", "content": text}], "stream": True},
        {**about, "prompt": text},
        {**about, "prompt": [5, 6, 7, 8]},
    ]
    header = {"traceparent": f"00-{CALLER[0]}-{CALLER[1]}-01"}
    with Server(command, port=port, log=tmp_path / "log", environment=starter.engine.environment()) as server:
        results = run_many(port, bodies, 3, [header, {}, header])
        if way is by_process_1:  # unshare itself, which waits for it, takes no signals
            (first,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            assert server.wait(60) == 0, server.tail()
    assert server.returncode == 0, server.tail()
    until = time.monotonic() + 20  # a collector that nobody waits for ends after the server has
    while Path(f"{STORE}-lock").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    records = {record.request_id: record for record in load(STORE).requests}
    chat, completion, ids = (records.pop(result.response_id or "") for result in results)
    came_in([chat], parent=CALLER)
    came_in([completion], *COMPLETION)
    came_in([ids], *COMPLETION, *IDS, parent=CALLER)
    assert not records
