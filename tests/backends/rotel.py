"""Rotel, a third party's OTLP collector, in front of an endpoint of ours that keeps what it forwards."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stagetrace.serve import free_port
from tests.receivers import Receiver, receiver


@dataclass
class Rotel:
    """Where it listens, and the endpoint that it forwards to."""

    grpc: str
    http: str
    sink: Receiver


@contextmanager
def rotel_agent(folder: Path) -> Iterator[Rotel]:
    """The collector, running; its log is in ``folder``."""
    found = importlib.util.find_spec("rotel")
    assert found and found.submodule_search_locations, "rotel is not installed: make bootstrap"
    agent = Path(found.submodule_search_locations[0], "rotel-agent")
    grpc, http = free_port(), free_port()
    with receiver() as sink, open(folder / "rotel.log", "w+") as log:
        command = [
            str(agent), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
            "--otlp-http-endpoint", f"127.0.0.1:{http}", "--exporter", "otlp", "--otlp-exporter-protocol", "http",
            "--otlp-exporter-endpoint", sink.url, "--pid-file", str(folder / "rotel.pid"),
        ]  # fmt: skip
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "ROTEL_"))}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=plain, start_new_session=True)
        try:
            for port in (grpc, http):
                listening(port, process, folder / "rotel.log")
            yield Rotel(f"http://127.0.0.1:{grpc}", f"http://127.0.0.1:{http}", sink)
        finally:
            process.terminate()
            process.wait(20)


def listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}: {log.read_text()}")
