"""The outermost ASGI layer of the API server: where a request's first byte arrives and its last one leaves."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

from stagetrace.plugin import Guard, Root, enter, leave, marks, parents, recorder, report

from . import roots

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Route(NamedTuple):
    """A path that ends in the engine: ``marks.OPERATIONS``, and what stands before the number of each prompt in ids."""

    operation: int
    numbered: str = ""


_CHAT, _SCORE, _RERANK = Route(1), Route(7, "-"), Route(8, "-")
#: Not here: what tokenises or renders only, audio, and what administers the server.
ROUTES = {
    "/v1/chat/completions": _CHAT, "/v1/messages": _CHAT, "/v1/responses": Route(1, "_"),
    "/v1/completions": Route(2, "-"), "/inference/v1/generate": Route(3),
    "/v1/embeddings": Route(4, "-"), "/v2/embed": Route(4, "-"), "/pooling": Route(5, "-"),
    "/classify": Route(6, "-"), "/score": _SCORE, "/v1/score": _SCORE,
    "/rerank": _RERANK, "/v1/rerank": _RERANK, "/v2/rerank": _RERANK,
}  # fmt: skip
#: Nothing else of a request's headers is read.
HEADERS = {name.encode("ascii"): name for name in parents.LIMITS}
#: How a stream begins to say that it has failed, when it is too late for a status.
FAILURE = (b'data: {"error"', b"event: error")

guard = Guard(roots.APPLICATION, report)


class Shell:
    """Wraps the application; requests to other routes pass through untouched."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = begin(scope, receive, send)
        if watch is None:
            await self.app(scope, receive, send)
            return
        entered = enter(watch.root)
        try:
            await self.app(scope, watch.receive, watch.send)
        except BaseException as error:
            watch.end(error)
            raise
        else:
            watch.end()
        finally:
            leave(entered)


def begin(scope: Scope, receive: Receive, send: Send) -> Watch | None:
    """Start watching a request to one of our routes; None for everything else."""
    try:
        if guard.off or scope["type"] != "http" or scope.get("method") != "POST":
            return None
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        route = ROUTES.get(path)
        if route is None or recorder.paused():
            return None
        headers = texts(scope.get("headers") or ())
        root = roots.begin(marks.HTTP, route.operation, headers=headers)
        root.numbered, root.judged = route.numbered, "traceparent" in headers
        recorder.text(marks.ROUTE, root.number, path)
        if "x-request-id" in headers:
            recorder.text(marks.CLIENT_ID, root.number, headers["x-request-id"])
        return Watch(root, receive, send)
    except Exception as error:
        guard.failed(error)
        return None


def texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those of a request's headers that are ours to read.

    Of several ids the first is what the engine goes by. Several parents are none, and several states one: so says the
    specification. What is over-long, unprintable or empty is nobody's. A parent that is none is empty.
    """
    given: dict[str, list[bytes]] = {}
    for name, value in headers:
        key = HEADERS.get(name.lower())
        if key is not None:
            given.setdefault(key, []).append(value)
    found: dict[str, str] = {}
    for key, values in given.items():
        text = (b",".join(values) if key == "tracestate" else values[0]).decode("latin-1")
        parent = key == "traceparent"
        usable = text.strip() and parents.kept(key, text) and not (parent and len(values) > 1)
        if usable or parent:
            found[key] = text if usable else ""
    return found


class Watch:
    """The receive and send of one request, with marks."""

    def __init__(self, root: Root, receive: Receive, send: Send) -> None:
        self.root = root
        self._receive = receive
        self._send = send
        self._complete = False

    async def receive(self) -> Message:
        """Pass a message on, counting body bytes and noting a client that goes away."""
        message = await self._receive()
        try:
            if message["type"] == "http.request":
                self.root.received_bytes += len(message.get("body") or b"")
            elif message["type"] == "http.disconnect" and not self._complete:
                recorder.mark(marks.DISCONNECT, self.root.number)
        except Exception as error:
            guard.failed(error)
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on, then note when its bytes had been handed over."""
        await self._send(message)
        try:
            if message["type"] == "http.response.body":
                self._sent(message)
            elif message["type"] == "http.response.start":
                recorder.mark(marks.STATUS, self.root.number, message["status"])
        except Exception as error:
            guard.failed(error)

    def _sent(self, message: Message) -> None:
        root = self.root
        body = message.get("body") or b""
        self._complete = not message.get("more_body", False)
        if body.startswith(FAILURE):
            recorder.mark(marks.FAILED, root.number, named_status(body))
        elif root.streams and not root.text_sent and has_text(body):
            root.text_sent = True
            recorder.mark(marks.FIRST_TEXT, root.number)
        recorder.mark(marks.SENT, root.number, len(body))

    def end(self, raised: BaseException | None = None) -> None:
        """Note that the application has returned, or what it ``raised``."""
        try:
            roots.end(self.root, raised)
        except Exception as error:
            guard.failed(error)


def named_status(chunk: bytes) -> int:
    """The HTTP status that a stream would have had, had it failed before it began."""
    event = next((line[6:] for line in chunk.splitlines() if line.startswith(b"data: {")), b"{}")
    error = json.loads(event).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def has_text(chunk: bytes) -> bool:
    """Whether a chunk of server-sent events carries generated text, and not only a role or usage figures."""
    return any(_generated(json.loads(line[6:])) for line in chunk.splitlines() if line.startswith(b"data: {"))


#: Where the APIs put what was generated: under the chat's ``delta``, a completion's choice, or a message's ``delta``.
_TEXTS = (
    "content", "text", "reasoning", "reasoning_content", "tool_calls", "token_ids", "thinking", "partial_json"
)  # fmt: skip


def _generated(event: dict[str, Any]) -> bool:
    delta = event.get("delta")
    if isinstance(delta, str):  # of the responses API
        return bool(delta)
    choices = [delta] if isinstance(delta, dict) else event.get("choices") or ()
    for choice in choices:
        inner = choice.get("delta")
        if any((inner if isinstance(inner, dict) else choice).get(key) for key in _TEXTS):
            return True
    return False
