"""Who a request is: whatever its headers say, however many there are at once, and without a word of what it says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagetrace import load
from stagetrace.model import RequestRecord
from tests.engine.conftest import NAME
from tests.engine.fleet import Fleet, Rigged
from tests.engine.saboteur.saboteur_control import ENTER
from tests.engine.serving import HOST, get
from tests.engine.ship import CANARY, KEY, Background, Ship
from tests.invariants import violations

#: Whichever of these tests comes first waits for several servers to start.
pytestmark = pytest.mark.timeout(900)

PARENT = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
OTHER = b"00-" + b"c" * 32 + b"-" + b"d" * 16 + b"-01"
Headers = list[tuple[bytes, bytes]]


def raw(ship: Ship, headers: Headers, body: dict[str, Any]) -> int:
    """Send a request with exactly these headers, byte by byte; the status."""
    data = json.dumps(body).encode()
    lines = [
        b"POST /v1/chat/completions HTTP/1.1", b"Host: here", b"Content-Type: application/json", b"Connection: close",
        b"Content-Length: %d" % len(data), b"Authorization: Bearer " + KEY.encode(),
        *(name + b": " + value for name, value in headers),
    ]  # fmt: skip
    with socket.create_connection((HOST, ship.live.port), timeout=30) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + data)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split(b" ", 2)[1])


def new(ship: Ship, before: set[str]) -> list[RequestRecord]:
    """The finished records of roots that are not in ``before``."""
    return [r for r in load(ship.store).requests if r.span_id not in before and r.status != "in_flight"]


#: Headers → the trace's caller (None: nobody), the client's id, and whether the answer's id is kept.
HOSTILE: dict[str, tuple[Headers, bytes | None, str | None, bool]] = {
    "two parents": ([(b"traceparent", PARENT), (b"traceparent", OTHER)], None, None, True),
    "a parent in capitals": ([(b"traceparent", PARENT.upper())], None, None, True),
    "no trace": ([(b"traceparent", b"00-" + b"0" * 32 + b"-" + b"b" * 16 + b"-01")], None, None, True),
    "version ff": ([(b"traceparent", b"ff" + PARENT[2:])], None, None, True),
    "version 0 with more": ([(b"traceparent", PARENT + b"-more")], None, None, True),
    "a later version with more": ([(b"traceparent", b"01" + PARENT[2:] + b"-more")], PARENT, None, True),
    "no parent at all": ([(b"traceparent", b"nobody")], None, None, True),
    "a huge parent": ([(b"traceparent", PARENT + b"x" * 5000)], None, None, True),
    "a parent in bytes": ([(b"traceparent", b"\xff\xfe\xe9")], None, None, True),
    "a huge state": ([(b"traceparent", PARENT), (b"tracestate", b"k=" + b"v" * 5000)], PARENT, None, True),
    "states without end": ([(b"traceparent", PARENT), *[(b"tracestate", b"k=v")] * 40], PARENT, None, True),
    "two ids": ([(b"X-Request-Id", b"one"), (b"x-request-id", b"two")], None, "one", True),
    "an empty id": ([(b"X-Request-Id", b"")], None, None, True),
    "an id in bytes": ([(b"X-Request-Id", "é✓".encode())], None, None, False),
    "an id with a tab": ([(b"X-Request-Id", b"a\tb")], None, None, False),
    "a huge id": ([(b"X-Request-Id", b"i" * 30000)], None, None, False),
    "a huge id and another": ([(b"X-Request-Id", b"i" * 300), (b"X-Request-Id", b"two")], None, None, False),
    "an id for terminals": ([(b"X-Request-Id", b"[bold]x[/bold]")], None, "[bold]x[/bold]", True),
    "many headers": ([(b"X-%d" % i, b"v" * 100) for i in range(90)], None, None, True),
    "a huge header": ([(b"X-Huge", b"v" * 200_000)], None, None, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def hostile(ships: Fleet) -> dict[str, RequestRecord]:
    """The one record of each of them."""
    found: dict[str, RequestRecord] = {}
    for name, (headers, *_) in HOSTILE.items():
        before = {r.span_id for r in load(ships.two.store).requests}
        ships.two.asked += 1
        assert raw(ships.two, headers, ships.two.live.body(20, 2)) == 200, name
        # The next one's record comes after it, so that there is nothing more to wait for.
        after, _ = ships.two.ask(ships.two.live.body(20, 2))
        ships.two.record(after)
        (found[name],) = [r for r in new(ships.two, before) if r.trace_id != after]
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(hostile: dict[str, RequestRecord], name: str) -> None:
    _, caller, identifier, kept = HOSTILE[name]
    record = hostile[name]
    assert violations(record, complete=True) == [] and record.status == "ok"
    trace, span = caller.decode().split("-")[1:3] if caller else (None, None)
    assert record.parent_span_id == span
    assert record.trace_id == trace if trace else record.trace_id not in ("a" * 32, "c" * 32, "0" * 32)
    assert record.external_id == identifier
    assert (record.request_id.startswith("chatcmpl-"), record.internal_id is not None) == (kept, kept)
    assert len(record.request_id) < 200 and record.request_id.isprintable()


def test_no_mix_up_under_64_concurrent_requests(ships: Fleet) -> None:
    """Each has its own caller, id, lengths and answer; none has anything of another's."""
    two = ships.two
    asks = [
        {
            "body": two.live.body(14 + i % 50, 3 + i % 41, seed=i % 5, stream=i % 3 > 0, chat=i % 2 == 0),
            "headers": {"X-Request-Id": f"mine-{i}", "tracestate": f"number={i}"},
        }
        for i in range(128)
    ]
    answers = two.ask_many(asks, 64)
    stored = two.stored([trace for trace, _ in answers])
    for index, ((trace, result), records) in enumerate(zip(answers, stored, strict=True)):
        (record,) = records
        assert violations(record, complete=True) == []
        assert (record.trace_id, record.parent_span_id) == (trace, trace[16:])
        assert (record.external_id, record.tracestate) == (f"mine-{index}", f"number={index}")
        assert record.request_id == result.response_id
        assert (record.prompt_tokens, record.output_tokens) == (
            result.usage["prompt_tokens"], asks[index]["body"]["max_tokens"]
        )  # fmt: skip
        assert record.stage("http_receive").attributes["max_tokens"] == asks[index]["body"]["max_tokens"]
    assert len({r.span_id for records in stored for r in records}) == 128
    assert len({r.internal_id for records in stored for r in records}) == 128


def test_equal_client_ids(ships: Fleet) -> None:
    """Ids are the clients' own affair: who uses one again, even at the same time, is someone else."""
    two = ships.two
    asks = [{"body": two.live.body(20, 20 + i, seed=i % 5), "headers": {"X-Request-Id": "same"}} for i in range(16)]
    stored = two.stored([trace for trace, _ in two.ask_many(asks, 16)])
    records = [record for (record,) in stored]
    assert {(r.request_id, r.external_id) for r in records} == {("chatcmpl-same", "same")}
    assert [r.output_tokens for r in records] == [20 + i for i in range(16)]
    assert [problem for r in records for problem in violations(r, complete=True)] == []
    assert len({(r.span_id, r.internal_id) for r in records}) == 16


@pytest.mark.parametrize("jump_s", [3600, -7200])
def test_a_clock_that_jumps(ships: Fleet, jump_s: int) -> None:
    """The wall clock of every process of the server and of ours jumps while requests run: no duration notices."""
    two = ships.two
    calls = [Background(lambda i=i: two.ask(two.live.body(300, 500, seed=i, stream=i % 2 == 0))) for i in range(4)]
    two.in_flight(4)
    two.control.order(clock_ns=jump_s * 10**9)
    try:
        answers = [call.result() for call in calls]
        inside, _ = two.ask(two.live.body(20, 5))
        created = json.loads(get(two.live.port, "/version")[1])  # the server is well
        assert created
        records = [two.record(trace) for trace, _ in answers]
        after = two.record(inside)
    finally:
        two.control.order()
    for record, (_, result) in zip(records, answers, strict=True):
        assert violations(record, complete=True) == [] and record.status == "ok"
        assert record.e2e_ms is not None
        # Never more than the client saw, and most of that: no stage has gained or lost an hour.
        assert 0.5 * result.e2e_ms <= record.e2e_ms <= result.e2e_ms + 500
        assert record.coverage is not None and record.coverage > 0.8
    # Nor does it move the requests of one server against each other, which take minutes at most.
    order = [record.start_unix_ns for record in [*records, after]]
    assert max(order) - min(order) < 1800 * 10**9


# ---------------------------------------------------------------- privacy


def spoken() -> list[tuple[Any, dict[str, str]]]:
    """Requests, good and bad, with the canary wherever a client can put one that is not meant for tracing."""
    chat = {"model": NAME, "messages": [{"role": "user", "content": f"say {CANARY}"}], "max_tokens": 5}
    headers = {"X-Other": CANARY, "Cookie": f"k={CANARY}", "baggage": f"k={CANARY}", "User-Agent": CANARY}
    return [
        (chat, headers),
        ({**chat, "stream": True, "stop": [CANARY], "user": CANARY, "metadata": {"k": CANARY}, CANARY: CANARY}, {}),
        ({"model": NAME, "prompt": CANARY * 3, "max_tokens": 5, "echo": True, "suffix": None}, {}),
        ({**chat, "messages": [{"role": "system", "content": CANARY}, *chat["messages"]], "n": 2}, {}),
        ({**chat, "request_id": "x" * 200 + CANARY}, {}),
        (chat, {"X-Request-Id": "x" * 200 + CANARY}),
        (chat, {"traceparent": CANARY, "tracestate": f"k={CANARY * 60}"}),
        # Errors that echo what was sent.
        ({**chat, "model": CANARY}, {}),
        ({**chat, "temperature": CANARY}, {}),
        ({**chat, "messages": CANARY}, {}),
        ({**chat, "structured_outputs": {"regex": f"(({CANARY}"}}, {}),
        ({**chat, "logprobs": True, "top_logprobs": 999, "stream": True, "user": CANARY}, {}),
        ({**chat, "messages": [{"role": "user", "content": f"{CANARY} " * 20000}]}, {}),
        (f'{{"{CANARY}'.encode(), {}),
        (chat, {"Authorization": f"Bearer {CANARY}"}),
    ]


def places(ship: Rigged) -> Iterator[tuple[str, bytes]]:
    """Everything of ours that lasts or can be read, in bytes."""
    for file in [*ship.live.session.rglob("*"), *Path(ship.store).parent.glob(f"{Path(ship.store).name}*")]:
        if file.is_file():
            yield str(file), file.read_bytes()
    yield from ((f"OTLP {path}", body) for path, body in ship.received.bodies)
    yield "OTLP headers", repr(ship.received.headers).encode()
    yield "Prometheus", get(ship.prometheus, "/metrics")[1].encode()
    for command in (["stages", "STORE", "--json"], ["stages", "STORE"], ["numbers", "STORE", "--json"], ["doctor"]):
        asked = [str(ship.store) if word == "STORE" else word for word in command]
        run = subprocess.run([sys.executable, "-m", "stagetrace", *asked], capture_output=True, timeout=120)
        yield " ".join(command), run.stdout + run.stderr
    yield "what we have said", "\n".join(ship.said()).encode()


def test_nothing_of_what_was_said_is_kept(ships: Fleet) -> None:
    two = ships.two
    (traces, answers) = zip(*[two.ask(body, headers) for body, headers in spoken()], strict=True)
    assert {answer.status for answer in answers} == {200, 400, 401, 404}
    # Our own hooks, raising with it in their message.
    for hook in ("vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "stagetrace_vllm.asgi:has_text"):
        two.control.order(hook, ENTER)
        for body in (two.live.body(20, 3), two.live.body(20, 3)):
            two.ask(body)
    two.control.order()
    two.stored([trace for trace, (_, headers) in zip(traces, spoken(), strict=True) if "traceparent" not in headers])
    assert len(two.received.bodies) > 3
    found = [where for where, content in places(two) if CANARY.encode() in content]
    assert found == []
    assert os.path.getsize(two.live.server.log) > 0
