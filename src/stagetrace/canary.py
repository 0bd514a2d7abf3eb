"""One span through the official OTLP exporter, to see whether anything listens where traces are to go."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from . import address

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

LIMIT_S = 3.0
_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ALL = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Canary(NamedTuple):
    """What became of it. ``endpoint`` is None where none is configured; ``fault`` is a line with the cure."""

    sent: int = 0
    failed: int = 0
    endpoint: str | None = None
    fault: str | None = None


def fly(otlp: str | None = None) -> Canary:
    """Send it to ``otlp``, or to where the environment says; at most :data:`LIMIT_S` are spent on it."""
    origin, endpoint = _endpoint(otlp)
    if endpoint is None:
        return Canary()
    parts, place = address.parse(endpoint), address.shown(endpoint)
    if parts is None:
        return _failed(place, f"{origin} {place}: not an address; write it as http://HOST:4318")
    said = _Said()
    if _send(endpoint, _grpc(origin, endpoint), said):
        return Canary(1, 0, place)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    why = _unreachable(parts.hostname or "", port) or said.why() or "no answer in time"
    cure = f"start a collector there, or correct {origin}"
    return _failed(place, f"{origin}: no span arrives at {place} ({why}); {cure}")


def _failed(endpoint: str, fault: str) -> Canary:
    return Canary(0, 1, endpoint, fault)


def _endpoint(otlp: str | None) -> tuple[str, str | None]:
    """What names it, and where to: the whole address for HTTP, whose general endpoint is the base of a path."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if off or "otlp" not in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"):
        return "", None
    if not otlp and os.environ.get(_TRACES):
        return _TRACES, os.environ[_TRACES]
    origin, base = ("--otlp", otlp) if otlp else (_ALL, os.environ.get(_ALL))
    if not base or _grpc(origin, base):
        return origin, base or None
    return origin, base.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"


def _grpc(origin: str, endpoint: str) -> bool:
    """As the exporter decides it: by the environment, else by the usual port of a plain ``--otlp``."""
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "")
    parts = address.parse(endpoint)
    usual = parts is not None and parts.port == 4317 and parts.path in ("", "/")
    return protocol == "grpc" if protocol else origin == "--otlp" and usual


def _send(endpoint: str, grpc: bool, said: _Said) -> bool:
    """Whether it arrived."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult

    # Of our own: the environment's globals are the host's.
    provider = TracerProvider(resource=Resource.create({"service.name": "stagetrace"}), shutdown_on_exit=False)
    span = provider.get_tracer("stagetrace").start_span("stagetrace.canary")
    span.end()
    assert isinstance(span, ReadableSpan)
    results: list[bool] = []
    ready = threading.Event()

    def work() -> None:
        try:
            exporter = _exporter(endpoint, grpc)
            # The imports are over: from here on it is the endpoint's time.
            ready.set()
            results.append(exporter.export([span]) is SpanExportResult.SUCCESS)
        except Exception as error:  # whatever an exporter makes of a strange address
            said.lines.append(f"{type(error).__name__}: {error}")
            results.append(False)
        finally:
            ready.set()

    with _listening(said):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        ready.wait()
        thread.join(LIMIT_S)
        return bool(results) and results[0]


@contextmanager
def _listening(said: logging.Handler) -> Iterator[None]:
    """The exporter's words are the reason, whatever this process has made of its loggers; none are for the terminal."""
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "opentelemetry.exporter")]
    before = [(logger, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.addHandler(said)
    try:
        yield
    finally:
        for logger, propagate, level in before:
            logger.removeHandler(said)
            logger.setLevel(level)
            logger.propagate = propagate


def _exporter(endpoint: str, grpc: bool) -> SpanExporter:
    if grpc:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint, insecure=urlsplit(endpoint).scheme == "http", timeout=LIMIT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=endpoint, timeout=LIMIT_S)


def _unreachable(host: str, port: int) -> str:
    """Why there is no connection, in the system's few words; empty if there is one."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class _Said(logging.Handler):
    """What the exporter says in its log: it returns no reason."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def why(self) -> str:
        """The first line, in one line and not for ever."""
        return " ".join(self.lines[0].split())[:200] if self.lines else ""
