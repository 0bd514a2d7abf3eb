"""Requests of every kind, one at a time or together, and what holds for the record of any of them."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stagetrace import load
from stagetrace.model import RequestRecord
from stagetrace.stages import STAGES
from tests.engine.conftest import Live
from tests.engine.serving import ClientResult, send
from tests.engine.ship import engine_has, wait
from tests.invariants import violations

CHAT = "/v1/chat/completions"
#: What an API without templates, or ids instead of text, has no stage for.
NO_TEMPLATE = {"chat_template": "not_applicable"}
IDS_ONLY = {"chat_template": "not_applicable", "tokenize": "not_applicable"}


@dataclass
class Kind:
    """A request of one kind, and what is special about its record."""

    path: str
    body: dict[str, Any]
    operation: str = "chat"
    states: dict[str, str] | None = None
    sequences: int = 1
    #: The engine's reason; a client may read another word for it ("tool_calls").
    finish: str = "length"
    ttft: str | None = "streamed"


@dataclass
class Answered:
    """A kind with its answer and its records, by sequence."""

    kind: Kind
    client: ClientResult
    records: list[RequestRecord]

    @property
    def record(self) -> RequestRecord:
        (record,) = self.records
        return record


def usage(client: ClientResult) -> tuple[int, int]:
    """Prompt and output tokens, whatever the API calls them."""
    found = client.usage or {}
    prompt = found.get("prompt_tokens", found.get("input_tokens"))
    return prompt, found.get("completion_tokens", found.get("output_tokens", 0))


def stored(live: Live, names: list[str], timeout: float = 60.0) -> dict[str, list[RequestRecord]]:
    """The finished records of these requests, by the ``x-request-id`` they were sent with."""
    assert live.store is not None
    until = time.monotonic() + timeout
    while True:
        found: dict[str, list[RequestRecord]] = {}
        for record in load(live.store).requests:
            if record.status != "in_flight":
                found.setdefault(record.external_id or "", []).append(record)
        if found.keys() >= set(names):
            return {name: sorted(found[name], key=lambda record: record.sequence) for name in names}
        assert time.monotonic() < until, f"not in the store: {set(names) - found.keys()}"
        time.sleep(0.2)


def ask_all(live: Live, kinds: dict[str, Kind]) -> dict[str, Answered]:
    """Send every kind by itself; the record of each is known by its name."""
    clients = {name: send(live.port, kind.body, {"x-request-id": name}, path=kind.path) for name, kind in kinds.items()}
    records = stored(live, list(kinds))
    return {name: Answered(kind, clients[name], records[name]) for name, kind in kinds.items()}


def together(live: Live, bodies: dict[str, dict[str, Any]], after: int | None = None) -> dict[str, RequestRecord]:
    """Send these, and return their records; all at a time, or each when the engine has one more than ``after``."""
    threads = [
        threading.Thread(target=send, args=(live.port, body, {"x-request-id": name})) for name, body in bodies.items()
    ]
    for number, thread in enumerate(threads):
        if after is not None:
            in_the_engine(live, after + number)
        thread.start()
    for thread in threads:
        thread.join(120)
    return {name: records[0] for name, records in stored(live, list(bodies)).items()}


def in_the_engine(live: Live, count: int) -> None:
    """Wait until it has so many sequences, running and waiting: an order that does not hang on who gets the CPU."""
    wait(lambda: engine_has(live.port) >= count, f"{count} sequences are in the engine")


def at_once(live: Live, name: str, output: int, *tokens: int, **more: Any) -> list[RequestRecord]:
    """Several prompts of one call, which the engine gets one right after the other; their records."""
    prompts = [text(live, length, zlib.crc32(f"{name} {i}".encode())) for i, length in enumerate(tokens)]
    body = {**live.body(20, output, chat=False, stream=False), "prompt": prompts, **more}
    assert send(live.port, body, {"x-request-id": name}).status == 200
    records = stored(live, [name])[name]
    assert [v for r in records for v in violations(r, complete=True)] == []
    return records


def reasons(records: Iterable[RequestRecord]) -> list[str]:
    return [record.stage("admission").attributes["reason"] for record in records]


def check(answered: Answered) -> None:
    """What holds for a record of any kind."""
    kind, client, records = answered.kind, answered.client, answered.records
    assert client.status == 200, client.error
    assert [r.sequence for r in records] == list(range(kind.sequences))
    assert len({(r.trace_id, r.span_id, r.request_id) for r in records}) == 1, "one root"
    assert records[0].request_id == client.response_id
    states = kind.states or {}
    for record in records:
        assert violations(record, complete=True) == []
        assert (record.operation, record.status, record.finish_reason) == (kind.operation, "ok", kind.finish)
        assert {s.key: s.state for s in record.stages} == {s.key: states.get(s.key, "measured") for s in STAGES}
        assert record.ttft_kind == kind.ttft
        assert record.stage("http_receive").attributes["route"] == kind.path
        adds_up(record)
    assert sum(r.output_tokens or 0 for r in records) == usage(client)[1]


def adds_up(record: RequestRecord) -> None:
    """Its tokens' latencies add up to the decode, but for the way of the last token, which is of the teardown."""
    decode, teardown = record.stage("decode"), record.stage("teardown")
    if decode.duration_ms is None or teardown.duration_ms is None:
        return
    waited = record.token_times_ms[-1] - record.token_times_ms[0]
    assert decode.duration_ms - 1 <= waited <= decode.duration_ms + teardown.duration_ms + 0.01


def text(live: Live, tokens: int, seed: int) -> str:
    found: str = live.prompts(tokens, seed)
    return found


def chat(live: Live, tokens: int, output: int, seed: int, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    return {**live.body(tokens, output, seed=seed, stream=stream), **more}
