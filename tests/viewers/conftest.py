"""A real server whose requests a real viewer shows, and a caller that traces its own call to the same place."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind

from stagetrace.model import RequestRecord
from stagetrace_vllm.demo_server import DemoServer
from tests.engine.conftest import Live
from tests.engine.serving import Server, free_port, run_many, send
from tests.viewers.spans import Span, exported
from tests.viewers.viewers import Viewer

CALLER = "answer a question"
#: Twice what the server takes in at once.
CROWD = 16
#: On a busy machine a viewer may be longer over its first traces than the ten seconds that exporters wait.
PATIENCE_S = 120


@dataclass
class Shown:
    """What was sent, what the store says of it, and what the viewer has. ``records`` are by kind of request."""

    viewer: Viewer
    records: dict[str, RequestRecord] = field(default_factory=dict)
    exported: list[Span] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    log: str = ""

    @property
    def ours(self) -> list[Span]:
        """The viewer's spans that are not the caller's."""
        return [span for span in self.spans if span.name != CALLER]


@pytest.fixture(scope="session")
def engine() -> DemoServer:
    server = DemoServer()
    missing = server.missing()
    if missing:
        pytest.fail(f"{missing}; or run `make bootstrap`, which installs what the tests need", pytrace=False)
    return server


def shown(viewer: Viewer, engine: DemoServer, folder: Path) -> Shown:
    """Serve, ask, stop serving."""
    model, port, store = engine.make_model(folder / "tiny"), free_port(), folder / "store.db"
    run = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--otlp", viewer.url, "--"]
    log = folder / "server.log"
    made = Shown(viewer)
    environment = {**engine.environment(), **viewer.variables, "OTEL_EXPORTER_OTLP_TIMEOUT": str(PATIENCE_S)}
    command = [*run, *engine.command(model, port)]
    with Server(command, port=port, log=log, environment=environment, deadline=600.0) as server:
        live = Live(server, port, store, lambda tokens, seed: engine.prompt_of(model, tokens, seed), folder)
        made.records = ask(live, viewer)
        export = ["export", str(store), "--format", "otlp-json", "-o", str(folder / "traces.jsonl")]
        subprocess.run([sys.executable, "-m", "stagetrace", *export], check=True)
        made.exported = list(exported(folder / "traces.jsonl"))
        # While it serves: a server that leaves does not wait that long.
        made.spans = arrived(viewer, lambda spans: len(spans) > len(made.exported))
    made.log = log.read_text()
    return made


def arrived(viewer: Viewer, complete: Callable[[list[Span]], bool]) -> list[Span]:
    """What the viewer has when it is ``complete``, or when we have lost patience."""
    until = time.monotonic() + PATIENCE_S
    while not complete(spans := viewer.spans()) and time.monotonic() < until:
        time.sleep(1)
    return spans


def ask(live: Live, viewer: Viewer) -> dict[str, RequestRecord]:
    """A request of each kind; the caller's comes when the server is full."""
    results = {"first": send(live.port, live.body(40, 8))}
    results["completion"] = send(live.port, live.body(600, 50, seed=1, chat=False, stream=False))
    results["aborted"] = send(live.port, live.body(100, 2000, seed=2), hang_up_after_chunks=5)
    crowd = [live.body(400, 60, seed=3 + n) for n in range(CROWD)]
    body = live.body(1500, 200, seed=99)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(run_many, live.port, crowd, CROWD)
        time.sleep(0.1)
        results["caller"] = call(live.port, body, viewer)
        results |= {f"crowd {n}": result for n, result in enumerate(others.result())}
    return dict(zip(results, live.records(list(results.values())), strict=True))


def call(port: int, body: dict[str, Any], viewer: Viewer) -> Any:
    """Ask as a program that traces itself, and has some work left when the answer is there."""
    headers = dict(pair.split("=") for pair in filter(None, [viewer.variables.get("OTEL_EXPORTER_OTLP_HEADERS")]))
    exporter = OTLPSpanExporter(f"{viewer.url}/v1/traces", headers=headers, timeout=PATIENCE_S)
    provider = TracerProvider(resource=Resource({"service.name": "caller"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("caller").start_as_current_span(CALLER, kind=SpanKind.CLIENT):
        brought: dict[str, str] = {}
        inject(brought)
        result = send(port, body, headers=brought)
        time.sleep(0.2)
    provider.shutdown()
    return result
