"""However a request or a server ends, its record says so, or says that it does not know; and there is exactly one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from stagetrace import load
from stagetrace.model import RequestRecord
from stagetrace.stages import BY_KEY
from tests.engine.conftest import NAME
from tests.engine.ends import counting, crowd, ended, kill, sound, tokens_of
from tests.engine.fleet import Fleet
from tests.engine.saboteur.saboteur_control import ARRIVAL, SLOW
from tests.engine.serving import send_half
from tests.engine.ship import Background, roots_sent

#: Whichever of these tests comes first waits for several servers to start.
pytestmark = pytest.mark.timeout(900)


def interrupted(record: RequestRecord, key: str) -> None:
    """It ended in this stage, which lasted until then, and nothing came after."""
    sound([record])
    assert record.active_stage == key
    stage = record.stage(key)
    assert (stage.state, stage.attributes.get("interrupted")) == ("measured", True)
    assert stage.start_ms is not None and stage.duration_ms is not None and record.e2e_ms is not None
    assert stage.start_ms + stage.duration_ms <= record.e2e_ms + 1e-3
    assert {later.state for later in record.stages[BY_KEY[key].number :]} <= {"not_reached"}


@pytest.fixture(params=[True, False], ids=["stream", "whole"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# ---------------------------------------------------------------- clients that leave


def test_a_client_that_leaves_in_the_queue(ships: Fleet, stream: bool) -> None:
    two = ships.two
    two.idle()
    crowd = Background(lambda: two.ask({**two.live.body(30, 1200), "n": 8, "temperature": 0.8}, hang_up_after_s=4))
    two.running(8)
    trace, _ = two.ask(two.live.body(30, 20, seed=1, stream=stream), hang_up_after_s=1.0)
    record = two.record(trace)
    assert (record.status, record.finish_reason, record.error_type) == ("aborted", "abort", "aborted")
    interrupted(record, "admission")
    assert record.queue_ms is not None and record.queue_ms > 100
    (sequences,) = two.stored([crowd.result()[0]])
    assert [r.sequence for r in sequences] == list(range(8))
    assert {(r.status, r.active_stage) for r in sequences} <= {("aborted", "decode"), ("ok", None)}
    sound(sequences)


def test_a_client_that_leaves_in_prefill(ships: Fleet, stream: bool) -> None:
    two = ships.two
    two.control.order(engine=SLOW)
    trace, _ = two.ask(two.live.body(2000, 20, seed=50 + stream, stream=stream), hang_up_after_s=0.5)
    two.control.order()
    record = two.record(trace)
    assert (record.status, record.output_tokens, record.ttft_ms) == ("aborted", 0, None)
    interrupted(record, "prefill")
    assert record.prefill_ms is None, "no prefill is known to have taken that long"


def test_a_client_that_leaves_in_decode(ships: Fleet, stream: bool) -> None:
    two = ships.two
    trace, result = two.ask(counting(two.live.body(30, 2000, seed=3, stream=stream)), hang_up_after_s=0.8)
    record = two.record(trace)
    assert (record.status, record.finish_reason) == ("aborted", "abort")
    interrupted(record, "decode")
    # A token that is made is not a token that has arrived; what was on its way when the client left may count.
    assert (record.output_tokens is not None and 0 <= record.output_tokens - tokens_of(result) <= 40) or not stream


def test_a_client_that_leaves_while_it_still_sends(ships: Fleet) -> None:
    two = ships.two
    trace, _ = two.ask(b'{"model": ', by=send_half)
    record = two.record(trace)
    assert record.status == "aborted"
    interrupted(record, "http_receive")


# ---------------------------------------------------------------- requests that are refused

OVER_LONG = "hello " * 20000
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
TEXT = {"model": NAME, "prompt": "hello", "max_tokens": 5}
#: Name → (body, status, the stage it ended in).
REFUSED: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{nonsense", 400, "http_receive"),
    "nothing": (b"", 400, "http_receive"),
    "of another shape": ({"model": NAME, "messages": "hello"}, 400, "http_receive"),
    "of another type": ({**CHAT, "temperature": "warm"}, 400, "http_receive"),
    "a model that is not there": ({**CHAT, "model": "other"}, 404, "http_receive"),
    "more tokens than fit": ({**CHAT, "max_tokens": 9000}, 400, "http_receive"),
    "over-long chat": ({**CHAT, "messages": [{"role": "user", "content": OVER_LONG}]}, 400, "tokenize"),
    "over-long completion": ({**TEXT, "prompt": OVER_LONG}, 400, "tokenize"),
    "over-long ids": ({**TEXT, "prompt": [5] * 9000}, 400, "tokenize"),
    "a parameter out of range": ({**CHAT, "temperature": -3.0}, 400, "tokenize"),
    "a parameter the engine refuses": ({**CHAT, "logprobs": True, "top_logprobs": 999}, 400, "tokenize"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_is_refused(ships: Fleet, name: str) -> None:
    body, status, key = REFUSED[name]
    trace, result = ships.two.ask(body)
    assert result.status == status, result.error
    record = ships.two.record(trace)
    sound([record])
    assert (record.status, record.active_stage, record.error_type) == ("error", key, str(status))
    assert (record.http_status, record.finish_reason, record.ttft_ms) == (status, None, None)
    assert record.stage(key).state == "measured"


def test_a_request_without_its_key(ships: Fleet) -> None:
    trace, result = ships.two.ask(CHAT, {"Authorization": "Bearer nobody's"})
    assert result.status == 401
    record = ships.two.record(trace)
    assert (record.status, record.error_type) == ("error", "401")
    interrupted(record, "http_receive")


def test_a_stream_that_is_refused_after_its_200(ships: Fleet) -> None:
    trace, result = ships.two.ask({**CHAT, "logprobs": True, "top_logprobs": 999, "stream": True})
    assert result.status == 200 and result.error
    record = ships.two.record(trace)
    sound([record])
    assert (record.status, record.active_stage) == ("error", "tokenize")
    assert (record.http_status, record.error_type) == (200, "400")


def test_an_engine_that_fails_at_one_request(ships: Fleet, stream: bool) -> None:
    two = ships.two
    two.control.order(engine=ARRIVAL)
    trace, result = two.ask(two.live.body(30, 5, stream=stream))
    two.control.order()
    assert result.status == (200 if stream else 500) and result.error
    record = two.record(trace)
    sound([record])
    assert (record.status, record.active_stage) == ("error", "admission")
    assert (record.http_status, record.error_type) == ((200, "engine_error") if stream else (500, "500"))
    assert record.output_tokens in (0, None)
    after, _ = two.ask(two.live.body(30, 5, stream=stream))
    assert two.record(after).status == "ok"


# ---------------------------------------------------------------- many, and more than one server


def test_two_servers_on_one_machine(ships: Fleet) -> None:
    """The same ids at both, at the same time: each has its own, and nothing of the other's."""
    pair = (ships.plain, ships.two)
    assert ships.plain.live.session != ships.two.live.session
    bodies = [ships.plain.live.body(20 + i, 5 + i, seed=i) for i in range(8)]
    calls = [
        Background(
            lambda ship=ship: ship.ask_many([{"body": b, "headers": {"X-Request-Id": "same"}} for b in bodies], 8)
        )
        for ship in pair
    ]
    for ship, call in zip(pair, calls, strict=True):
        answers = call.result()
        for (records), (_, result) in zip(ship.stored([trace for trace, _ in answers]), answers, strict=True):
            (record,) = records
            sound([record])
            assert (record.external_id, record.output_tokens) == ("same", result.usage["completion_tokens"])
    assert not {r.trace_id for r in load(ships.plain.store).requests} & set(ships.two.sent)
    assert not {r.trace_id for r in load(ships.two.store).requests} & set(ships.plain.sent)


# ---------------------------------------------------------------- servers that end; these come last


def test_a_killed_api_server(ships: Fleet, ends: None) -> None:
    """Nobody saw its requests end; what the engine goes on to make reached no client."""
    calls = crowd(ships.plain)
    kill(ships.plain, "api_server")
    records = ended(ships.plain, calls, code=128 + signal.SIGKILL)
    assert {(r.status, r.error_type, r.finish_reason) for r in records} == {("error", "process_ended", None)}
    stages = [r.active_stage for r in records]
    # Until its end reaches the engine, that may come to the two in the queue.
    assert stages[:8] == ["decode"] * 8 and set(stages[8:]) <= {"admission", "prefill", "decode"}, stages
    assert {(r.e2e_ms, r.coverage, r.unattributed_ms) for r in records} == {(None, None, None)}
    (_, streamed), (_, whole), *_ = [call.result() for call, _ in calls]
    assert records[0].output_tokens is not None
    assert 0 <= records[0].output_tokens - tokens_of(streamed) <= 40
    assert whole.status == 0


def test_one_killed_api_server_of_two(ships: Fleet, ends: None) -> None:
    """Its requests ended unseen. The other one's are given up when the server goes down with it, or end unseen, too."""
    two = ships.two
    calls = crowd(two)
    more = [(Background(lambda i=i: two.ask(two.live.body(40, 20, seed=70 + i))), 1) for i in range(8)]
    two.waiting(10)
    (killed,) = two.pids("APIServer_1")
    os.kill(killed, signal.SIGKILL)
    records = ended(two, [*calls, *more], code=1)
    for record in records:
        seen = record.process != killed and record.error_type != "process_ended"
        assert record.status in (("aborted", "error") if seen else ("error",))
        assert (record.e2e_ms is not None) == seen
        assert record.active_stage in ("admission", "prefill", "decode")
    assert len({record.process for record in records}) == 2


def test_a_server_that_is_never_asked(ships: Fleet, ends: None) -> None:
    ships.idle.live.server.signal(signal.SIGTERM)
    assert ships.idle.live.server.wait(60) == 0
    found = load(ships.idle.store)
    assert (list(found.requests), list(found.steps)) == ([], [])
    assert roots_sent(ships.idle.received) == []
    assert [line for line in ships.idle.said() if "recorded" in line or "lost" in line] == []
