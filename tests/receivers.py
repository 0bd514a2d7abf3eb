"""OTLP endpoints of our own: one that keeps what it gets, some that misbehave, and the rules for what was sent."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: What a gRPC receiver takes in one message, what a trace store takes of one trace, and what viewers bear.
MESSAGE_BYTES, TRACE_BYTES, TRACE_SPANS = 4 << 20, 5_000_000, 300


@dataclass
class Receiver:
    """Keeps the bodies it gets; ``status`` is what it answers, after ``delay_s``."""

    status: int = 200
    delay_s: float = 0.0
    bodies: list[tuple[str, bytes]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def traces(self) -> list[ExportTraceServiceRequest]:
        bodies = [body for path, body in self.bodies if path == "/v1/traces"]
        return [ExportTraceServiceRequest.FromString(body) for body in bodies]

    def metrics(self) -> dict[str, Any]:
        """The latest state of each metric, by name."""
        bodies = [body for path, body in self.bodies if path == "/v1/metrics"]
        return {
            metric.name: metric
            for body in bodies
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def spans(self) -> list[Any]:
        return list(spans_of(self.traces()))

    def wait(self, spans: int, timeout_s: float = 20.0) -> list[Any]:
        until = time.monotonic() + timeout_s
        while len(found := self.spans()) < spans and time.monotonic() < until:
            time.sleep(0.05)
        return found


@contextmanager
def receiver(status: int = 200, delay_s: float = 0.0) -> Iterator[Receiver]:
    """An OTLP/HTTP endpoint on loopback."""
    kept = Receiver(status, delay_s)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(chunks(self.rfile))
            else:
                body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            time.sleep(kept.delay_s)
            kept.headers.append({name.lower(): value for name, value in self.headers.items()})
            kept.bodies.append((self.path, body))
            try:
                self.send_response(kept.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()
            except OSError:
                pass  # whoever asked has gone

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chunks(file: Any) -> Iterator[bytes]:
    while size := int(file.readline(), 16):
        yield file.read(size)
        file.readline()
    file.readline()


@contextmanager
def silent() -> Iterator[str]:
    """An endpoint that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def spans_of(messages: Iterable[ExportTraceServiceRequest]) -> Iterator[Any]:
    for message in messages:
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                yield from scope.spans


def check_rules(messages: list[ExportTraceServiceRequest]) -> None:
    """What real trace stores insist on, some of them without saying so; looked up in the bytes that were sent."""
    sizes: Counter[bytes] = Counter()
    counts: Counter[bytes] = Counter()
    ids: set[tuple[bytes, bytes]] = set()
    for message in messages:
        assert message.ByteSize() < MESSAGE_BYTES, f"a message of {message.ByteSize()} bytes"
        for resource in message.resource_spans:
            names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            assert len(names) == 1 and names[0], f"service.name is {names}"
    for span in spans_of(messages):
        assert len(span.trace_id) == 16 and any(span.trace_id), span.trace_id
        assert len(span.span_id) == 8 and any(span.span_id), span.span_id
        assert len(span.parent_span_id) in (0, 8) and span.parent_span_id != bytes(8), span.parent_span_id
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0, span
        assert span.name and all(event.time_unix_nano > 0 for event in span.events), span
        assert (span.trace_id, span.span_id) not in ids, f"{span.name} has another span's id"
        ids.add((span.trace_id, span.span_id))
        sizes[span.trace_id] += span.ByteSize()
        counts[span.trace_id] += 1
    assert max(sizes.values(), default=0) < TRACE_BYTES, f"a trace of {max(sizes.values())} bytes"
    assert max(counts.values(), default=0) <= TRACE_SPANS, f"a trace of {max(counts.values())} spans"
    for span in spans_of(messages):
        # A server span's parent is the caller's, which is not ours to send.
        if span.parent_span_id and span.kind != 2:
            assert (span.trace_id, span.parent_span_id) in ids, f"{span.name}'s parent was not sent"


def attributes(span: Any) -> dict[str, Any]:
    """A span's (or event's, or resource's) attributes as plain values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
