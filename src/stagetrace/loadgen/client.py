"""One request over a connection of its own, stamped as its bytes come and go (``time.monotonic_ns``)."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from .settings import Target
from .wire import Broken, Response, events


@dataclass
class Exchange:
    """What a client knows of one request. Times are monotonic nanoseconds; what did not happen is None."""

    index: int
    request_id: str
    traceparent: str
    asked_prompt_tokens: int = 0
    asked_output_tokens: int = 0
    due_ns: int | None = None
    sent_ns: int | None = None
    first_text_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    end_ns: int | None = None
    status: int | None = None
    #: A class, never the server's words: those may echo what was sent.
    error: str | None = None
    response_id: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    #: For the terminal only: the beginning of what the server said of an error.
    said: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer came, and to its end."""
        return self.error is None and self.end_ns is not None

    @property
    def ttft_ms(self) -> float | None:
        """Sent → first text that is not empty (streams only)."""
        return _ms(self.sent_ns, self.first_text_ns)

    @property
    def e2e_ms(self) -> float | None:
        """Sent → last byte."""
        return _ms(self.sent_ns, self.end_ns)

    def to_json(self) -> dict[str, Any]:
        """The exchange in the client file."""
        out = asdict(self)
        del out["said"]
        return out


def _ms(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) / 1e6


class Reader(asyncio.Protocol):
    """Reads one answer: the stamp is taken before anything is done with the bytes."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.response = Response()
        self.done = asyncio.get_running_loop().create_future()
        self._finished = False

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        now = time.monotonic_ns()
        if self.done.done():
            return
        try:
            self.response.feed(data)
            self.exchange.status = self.response.status or None
            if "event-stream" in self.response.headers.get("content-type", ""):
                for event in events(self.response.take()):
                    self._event(event, now)
            if self.response.complete:
                self._close(now)
        except Broken as error:
            self._fail(f"broken answer: {error}", now)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed the connection, or it broke."""
        now = time.monotonic_ns()
        if self.done.done():
            return
        self.response.eof()
        if self.response.complete:
            self._close(now)
        else:
            self._fail("broken off" if exc is None else type(exc).__name__, now)

    def _event(self, event: dict[str, Any] | None, now: int) -> None:
        if event is None:
            self._finished = True
        elif "error" in event:
            self._refused(event)
        else:
            absorb(event, self.exchange, now)

    def _close(self, now: int) -> None:
        exchange, body = self.exchange, self.response.body()
        streamed = "event-stream" in self.response.headers.get("content-type", "")
        if not streamed:
            try:
                document = json.loads(body)
            except ValueError:
                document = None
            if self.response.status != 200:
                self._refused(document if isinstance(document, dict) else {"error": body[:200].decode("latin-1")})
                exchange.error = f"HTTP {self.response.status}" + (f" {exchange.error}" if exchange.error else "")
            elif isinstance(document, dict):
                absorb(document, exchange, None)
            else:
                exchange.error = "broken answer: no JSON object"
        elif not self._finished and exchange.error is None:
            exchange.error = "broken off"
        self._end(now)

    def _refused(self, document: dict[str, Any]) -> None:
        told = document.get("error", document)
        kind = told.get("type") if isinstance(told, dict) else None
        words = told.get("message") if isinstance(told, dict) else told
        self.exchange.error = kind if isinstance(kind, str) and kind.isidentifier() else "error"
        self.exchange.said = " ".join(str(words).split())[:200]

    def _fail(self, error: str, now: int) -> None:
        self.exchange.error = self.exchange.error or error
        self._end(now)

    def _end(self, now: int) -> None:
        self.exchange.end_ns = now
        self.done.set_result(None)


def absorb(event: dict[str, Any], exchange: Exchange, now: int | None) -> None:
    """Take in an event that came at ``now``, or (None) the whole document of an answer that was not streamed."""
    exchange.response_id = event.get("id") or exchange.response_id
    usage = event.get("usage")
    if isinstance(usage, dict):
        exchange.prompt_tokens = usage.get("prompt_tokens")
        exchange.output_tokens = usage.get("completion_tokens")
        exchange.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in event.get("choices") or ():
        message = choice.get("delta") or choice.get("message") or {}
        exchange.finish_reason = choice.get("finish_reason") or exchange.finish_reason
        if now is not None and (message.get("content") or message.get("reasoning_content") or choice.get("text")):
            exchange.first_text_ns = exchange.first_text_ns or now
            exchange.chunk_ns.append(now)


async def send(
    target: Target, path: str, headers: dict[str, str], body: bytes, exchange: Exchange, limit_s: float
) -> None:
    """POST ``body`` and read the answer into ``exchange``; what goes wrong is noted there, never raised."""
    lines = {
        "Host": target.netloc, "Connection": "close", "Accept": "*/*",
        "Content-Type": "application/json", "Content-Length": str(len(body)), **headers,
    }  # fmt: skip
    head = f"POST {target.base}{path} HTTP/1.1\r\n" + "".join(f"{name}: {v}\r\n" for name, v in lines.items())
    request = head.encode("latin-1") + b"\r\n" + body
    try:
        await asyncio.wait_for(_exchange(target, request, exchange), limit_s)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        exchange.error = exchange.error or "timeout"
    except OSError as error:
        exchange.error = type(error).__name__
        exchange.said = error.strerror or str(error)
    except asyncio.CancelledError:  # whoever cancels us wants what there is so far
        exchange.error = exchange.error or "cancelled"
    if exchange.end_ns is None and exchange.sent_ns is not None:
        exchange.end_ns = time.monotonic_ns()


async def _exchange(target: Target, request: bytes, exchange: Exchange) -> None:
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(lambda: Reader(exchange), target.host, target.port, ssl=target.tls)
    try:
        exchange.sent_ns = time.monotonic_ns()
        transport.write(request)
        await reader.done
    finally:
        transport.abort()
