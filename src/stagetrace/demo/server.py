"""The demo's server: started under ``stagetrace run``, in a process group of its own, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..serve import free_port
from .client import answers

READY_S = 600.0
STOP_S = 20.0


class DemoEngine(Protocol):
    """What an integration offers for the demo."""

    name: str
    model: str
    ready_path: str
    max_num_seqs: int

    def missing(self) -> str | None: ...
    def make_model(self, path: Path) -> Path: ...
    def prompt_of(self, model_dir: Path, tokens: int, seed: int) -> str: ...
    def command(self, model_dir: Path, port: int) -> list[str]: ...
    def environment(self) -> dict[str, str]: ...


class ServerFailed(Exception):
    """One line with the end of the server's log."""


class Server:
    """A context manager around the server's process group; its log is kept only when something went wrong."""

    def __init__(self, engine: DemoEngine, model_dir: Path, store: Path) -> None:
        self.port = free_port()
        self._ready_path = engine.ready_path
        inner = engine.command(model_dir, self.port)
        self._command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--", *inner]
        self._environment = {**os.environ, **engine.environment()}
        descriptor, name = tempfile.mkstemp(prefix="stagetrace-demo-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)

    def __enter__(self) -> Server:
        with open(self.log, "wb") as log:
            # A group of its own, but not a session: schedulers weigh sessions against each other, and beside one
            # full of an engine's busy threads the demo's client would wait for a CPU.
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=os.setpgrp,
            )  # fmt: skip
        return self

    def wait_ready(self, tick: Callable[[], None]) -> None:
        """Return once the server answers; ``tick`` is called while waiting."""
        until = time.monotonic() + READY_S
        while not answers(self.port, self._ready_path):
            if self._process.poll() is not None or time.monotonic() > until:
                raise ServerFailed(f"the server did not start; its log is {self.log}; its last line: {self._last()}")
            tick()
            time.sleep(0.25)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if kind is None or not issubclass(kind, Exception):  # Ctrl-C: nothing went wrong
            self.log.unlink(missing_ok=True)

    def _last(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "(nothing)"
