"""OTLP endpoints in processes of their own: a good one, and every way in which one can be bad.

``python -m benchmarks.endpoints BEHAVIOUR PROTOCOL TALLY`` says its port and serves until it is killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.engine.serving import free_port

from .tally import Tally

HOST = "127.0.0.1"
HTTP, GRPC = "http/protobuf", "grpc"
GOOD, DEAD, DYING, HANGING, BUSY, UNAVAILABLE = "good", "dead", "dying", "hanging", "429", "503"
#: What an endpoint that has too much to do asks for, in seconds.
RETRY_AFTER_S = 3
#: The spans it took, and whether it is to die of its next message.
NUMBERS = ("spans", "die")


@dataclass(frozen=True)
class Kind:
    """One behaviour over one protocol."""

    behaviour: str
    protocol: str

    @property
    def name(self) -> str:
        """For the command line and the tables: ``429-http``."""
        return f"{self.behaviour}-{self.protocol.partition('/')[0]}"


KINDS = {
    kind.name: kind
    for behaviour in (GOOD, DEAD, DYING, HANGING, BUSY, UNAVAILABLE)
    for kind in (Kind(behaviour, HTTP), Kind(behaviour, GRPC))
}


class Endpoint:
    """An endpoint that runs; ``taken`` counts the spans it has said yes to, also after its death."""

    def __init__(self, kind: Kind, port: int, tally: Tally) -> None:
        self.kind = kind
        self.url = f"http://{HOST}:{port}"
        self._tally = tally

    @property
    def taken(self) -> int:
        """Spans."""
        return self._tally["spans"]

    def die(self) -> None:
        """Be gone with the next message of traces half-way through: read, and never answered."""
        self._tally["die"] = 1

    def environment(self) -> dict[str, str]:
        """What tells an exporter which protocol is meant."""
        return {"OTEL_EXPORTER_OTLP_PROTOCOL": self.kind.protocol}


@contextmanager
def endpoint(kind: Kind, folder: Path) -> Iterator[Endpoint]:
    """Start one; its tally lies in ``folder``."""
    tally = Tally(folder / f"endpoint-{kind.name}", *NUMBERS)
    if kind.behaviour == DEAD:
        yield Endpoint(kind, free_port(), tally)
        return
    command = [sys.executable, "-m", "benchmarks.endpoints", kind.behaviour, kind.protocol, str(tally.path)]
    here = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(command, cwd=here, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Endpoint(kind, int(process.stdout.readline()), tally)
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------- in its process


def take(body: bytes, tally: Tally) -> int:
    """The spans of one message of traces; this process ends with it if it is to die."""
    if tally["die"]:
        os._exit(1)
    message = ExportTraceServiceRequest.FromString(body)
    return sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)


def over_http(behaviour: str, tally: Tally) -> tuple[int, object]:
    """Serve in threads; the port, and what has to be kept."""
    status = {BUSY: 429, UNAVAILABLE: 503}.get(behaviour, 200)
    counting = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            spans = take(body, tally) if self.path == "/v1/traces" and status == 200 else 0
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", str(RETRY_AFTER_S))
            self.send_header("Content-Length", "0")
            self.end_headers()
            with counting:
                tally["spans"] += spans

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port, server


def over_grpc(behaviour: str, tally: Tally) -> tuple[int, object]:
    """The same; this server stops when nobody keeps it."""
    import grpc
    from google.rpc.error_details_pb2 import RetryInfo

    refusal = {BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED, UNAVAILABLE: grpc.StatusCode.UNAVAILABLE}.get(behaviour)
    counting = threading.Lock()

    def handle(method: str) -> Callable[[bytes, Any], bytes]:
        def answer(body: bytes, context: Any) -> bytes:
            if behaviour == BUSY:
                delay = RetryInfo()
                delay.retry_delay.seconds = RETRY_AFTER_S
                context.set_trailing_metadata((("google.rpc.retryinfo-bin", delay.SerializeToString()),))
            if refusal:
                context.abort(refusal, behaviour)
            spans = take(body, tally) if "trace" in method else 0
            with counting:
                tally["spans"] += spans
            return b""

        return answer

    class Both(grpc.GenericRpcHandler):  # type: ignore[misc]
        """Traces and metrics alike."""

        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(handle(details.method))

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Both()])
    port: int = server.add_insecure_port(f"{HOST}:0")
    server.start()
    return port, server


def hanging() -> tuple[int, object]:
    """Accept whoever comes, and never say a word."""
    server = socket.create_server((HOST, 0))

    def accept() -> None:
        held = []
        while True:
            held.append(server.accept())

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1]), server


def main(behaviour: str, protocol: str, path: str) -> None:
    """Serve until killed."""
    tally = Tally(Path(path), *NUMBERS)
    over = over_grpc if protocol == GRPC else over_http
    port, _kept = hanging() if behaviour == HANGING else over(behaviour, tally)
    print(port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
