"""A small OpenAI-compatible server whose behaviour a test chooses; five characters are a token, a chat's frame is 7."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHARACTERS_PER_TOKEN = 5
FRAME_TOKENS = 7


@dataclass
class Fake:
    """What it answers, and what it was asked."""

    models: tuple[str, ...] = ("paper",)
    max_model_len: int | None = None
    metrics: str = ""
    usage: bool = True
    pause_s: float = 0.0
    #: Who does not send it is refused.
    key: str = ""
    #: Prompts that are refused, broken off in the middle, or answered with an error event, by index of the request.
    refused: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    #: Requests that go ahead of the load: they are answered whatever is said above.
    ahead: int = 2
    asked: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    port: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def note(self, headers: dict[str, str], body: dict[str, Any]) -> int:
        """Which request of the load this is; negative for those ahead of it."""
        with self._lock:
            self.asked.append((headers, body))
            return len(self.asked) - 1 - self.ahead

    def texts(self) -> list[str]:
        return [text(body) for _, body in self.asked]


def text(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"] if "messages" in body else body["prompt"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self._whole(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            extra = {} if self.fake.max_model_len is None else {"max_model_len": self.fake.max_model_len}
            self._whole(200, {"data": [{"id": name, **extra} for name in self.fake.models]})
        elif self.path == "/metrics" and self.fake.metrics:
            self._bytes(200, self.fake.metrics.encode())
        else:
            self._whole(404, {"error": "not here"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        index = self.fake.note({name.lower(): value for name, value in self.headers.items()}, body)
        tokens = round(len(text(body)) / CHARACTERS_PER_TOKEN) + (FRAME_TOKENS if "messages" in body else 0)
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]} if self.fake.usage else None
        if index in self.fake.refused:
            self._whole(400, {"error": {"type": "BadRequestError", "message": "too\nlong"}})
        elif not body["stream"]:
            choice = {"index": 0, "message": {"content": "word"}, "finish_reason": "length"}
            self._whole(200, {"id": f"answer-{index}", "choices": [choice], "usage": usage})
        else:
            self._stream(index, body, usage)

    def _stream(self, index: int, body: dict[str, Any], usage: dict[str, int] | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = "messages" in body
        if chat:
            self._event(
                {"id": f"answer-{index}", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            )
        for number in range(body["max_tokens"]):
            time.sleep(self.fake.pause_s)
            if index in self.fake.failing:
                self._event({"error": {"type": "InternalServerError", "message": "gone"}})
                break
            if index in self.fake.broken:
                self.close_connection = True
                return
            end = "length" if number + 1 == body["max_tokens"] else None
            piece = {"delta": {"content": "word "}} if chat else {"text": "word "}
            self._event({"id": f"answer-{index}", "choices": [{"index": 0, **piece, "finish_reason": end}]})
        if usage:
            self._event({"id": f"answer-{index}", "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _whole(self, status: int, document: object) -> None:
        self._bytes(status, json.dumps(document).encode())

    def _bytes(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Serve ``fake`` on a port of its own."""
    handler = type("HandlerOfATest", (Handler,), {"fake": fake})
    with _Server(("127.0.0.1", 0), handler) as server:
        fake.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
