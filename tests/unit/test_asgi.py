"""The outermost layer of the API server: what it notes of a request, and that it changes nothing of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagetrace import marks
from stagetrace.context import current
from stagetrace.marks import Mark
from stagetrace.recorder import Recorder
from stagetrace_vllm import api_hooks, asgi, roots
from tests.unit.helpers import rings

BODY = b'{"stream": true}'


def chunk(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": content}}]}).encode() + b"\n\n"


FAILURE = b"data: " + json.dumps({"error": {"message": "no", "code": 400}}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def recorder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = Recorder(directory)
    for module in (roots, asgi, api_hooks):
        monkeypatch.setattr(module, "recorder", made)
    yield
    assert current.get() is None, "a root is left in the context"


class Request:
    """What the handler is given."""

    stream, n, max_tokens = True, 1, 7


def call(chunks: list[bytes], leaves: bool = False, error: Exception | None = None) -> list[dict[str, Any]]:
    """Serve one streamed request; return what the client was sent."""
    incoming = [{"type": "http.request", "body": BODY}] + [{"type": "http.disconnect"}] * leaves
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        api_hooks.handler_entered(None, Request())
        await send({"type": "http.response.start", "status": 200})
        for index, body in enumerate(chunks):
            await send({"type": "http.response.body", "body": body, "more_body": index + 1 < len(chunks)})
        if leaves:
            await receive()
        if error:
            raise error

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(asgi.Shell(app)(scope, receive, send))
    return sent


def noted(directory: Path) -> list[tuple[int, int]]:
    """(kind, first value) of what was noted, the root's own mark apart."""
    found = [mark for ring in rings(directory) for mark in ring.read(final=True) if isinstance(mark, Mark)]
    assert found[0].kind == marks.ROOT and len({mark.key for mark in found}) == 1
    return [(mark.kind, mark.a) for mark in found[1:]]


def test_a_stream(directory: Path) -> None:
    chunks = [chunk(""), chunk("a"), chunk("b"), DONE]
    sent = call(chunks)
    assert [message.get("body") for message in sent] == [None, *chunks]
    sizes = [(marks.SENT, len(body)) for body in chunks]
    assert noted(directory) == [
        (marks.HANDLER, len(BODY)), (marks.STATUS, 200), sizes[0], (marks.FIRST_TEXT, 0), *sizes[1:], (marks.END, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("before", [[], [chunk(""), chunk("a")]])
def test_a_stream_that_fails(before: list[bytes], directory: Path) -> None:
    call([*before, FAILURE, DONE])
    found = noted(directory)
    assert [mark for mark in found if mark[0] in (marks.STATUS, marks.FAILED)] == [
        (marks.STATUS, 200),
        (marks.FAILED, 400),
    ]
    assert sum(kind == marks.FIRST_TEXT for kind, _ in noted(directory)) == bool(before)


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        (b'data: {"error": {"message": "no", "type": "x", "code": 400}}\n\n', 400),
        (b'data: {"error": {"message": "no", "code": "unfit"}}\n\n', 500),
        (b'data: {"error": "no"}\n\n', 500),
        (b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no"}}\n\n', 500),
        (b"event: error\n\n", 500),
    ],
)
def test_how_streams_say_that_they_have_failed(chunk: bytes, status: int, directory: Path) -> None:
    call([chunk])
    assert dict(noted(directory))[marks.FAILED] == status


def test_text_that_speaks_of_errors_is_no_failure(directory: Path) -> None:
    call([chunk('data: {"error"'), DONE])
    assert marks.FAILED not in dict(noted(directory))


def test_a_client_that_leaves(directory: Path) -> None:
    call([chunk("a"), DONE], leaves=True)
    assert marks.DISCONNECT not in dict(noted(directory)), "it had everything"


def test_an_exception_is_the_applications(directory: Path) -> None:
    with pytest.raises(OSError, match="theirs"):
        call([chunk("a")], error=OSError("theirs"))
    assert noted(directory)[-1] == (marks.END, 1)
