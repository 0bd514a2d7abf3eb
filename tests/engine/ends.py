"""Servers that end with requests in them, and what holds of those whatever the end was."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from itertools import chain
from threading import Event
from typing import Any

from stagetrace import load
from stagetrace import session as sessions
from stagetrace.model import RequestRecord
from tests.engine.serving import ClientResult
from tests.engine.ship import Background, Ship, spans_sent
from tests.invariants import trace_violations, unaccounted, violations

#: A call that is on its way, and how many sequences it has.
Call = tuple[Background, int]


def sound(records: list[RequestRecord]) -> None:
    problems = [problem for record in records for problem in violations(record)]
    assert not problems, "\n".join(problems)


def counting(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` as of a client who is told with each chunk how many tokens it has by now: a chunk may have several."""
    return (
        {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}} if body["stream"] else body
    )


def tokens_of(result: ClientResult) -> int:
    """How many tokens a client has been told of who is :func:`counting`."""
    return result.usage["completion_tokens"] if result.usage else 0


def crowd(ship: Ship, slots: int = 8, leaving: Event | None = None) -> list[Call]:
    """Requests that have all slots of the engine, streamed and not and several in one, and two in the queue.

    Their clients wait for ever, or until they are ``leaving``.
    """
    ship.idle()
    body = ship.live.body
    bodies = [
        (counting(body(30, 2000, seed=60)), 1), (body(31, 2000, seed=61, stream=False), 1),
        ({**body(32, 2000, seed=62), "n": slots - 2, "temperature": 0.8}, slots - 2),
    ]  # fmt: skip
    calls = [(Background(lambda b=asked: ship.ask(b, hang_up_when=leaving)), count) for asked, count in bodies]
    ship.running(slots)
    queued = [body(33, 20, seed=63), body(34, 20, seed=64, stream=False)]
    calls += [(Background(lambda b=asked: ship.ask(b, hang_up_when=leaving)), 1) for asked in queued]
    ship.waiting(2)
    ship.in_flight(slots)
    return calls


def ended(ship: Ship, calls: list[Call], code: int) -> list[RequestRecord]:
    """After the server's end: the records of ``calls``, in their order, after all that holds whatever the end was."""
    left_with = ship.live.server.wait(60)
    assert left_with == code, f"it left with {left_with}, not {code}"
    answers = [call.result() for call, _ in calls]
    stored = ship.stored([trace for trace, _ in answers], timeout_s=30)
    counts = [len(records) for records in stored]
    assert counts == [count for _, count in calls], f"sequences: {counts}"
    records = [record for of_one in stored for record in of_one]
    sound(records)
    everything = [r for r in load(ship.store).requests if r.span_id not in ship.before]
    # Sent = stored = exported, and one root each. Some may have been asked under one trace of their own making.
    roots = {(r.trace_id, r.span_id) for r in everything}
    assert len(roots) == ship.asked, f"asked {ship.asked} times, {len(roots)} roots are stored"
    own = set(ship.sent)
    traces = defaultdict(list)
    for span in spans_sent(ship.received):
        if span.trace_id.hex() in own:
            traces[span.trace_id.hex()].append(span)
    kept = [record for record in everything if record.trace_id in own]
    problems = unaccounted(ship.sent, kept, chain.from_iterable(traces.values()), ship.unsampled)
    problems += [said for spans in traces.values() for said in trace_violations(spans)]
    problems += [f"{record.request_id} is in flight" for record in everything if record.status == "in_flight"]
    assert not problems, "\n".join(problems)
    if not ship.before:
        assert any(f"{len(roots)} requests recorded" in line for line in ship.said()), ship.said()
    left = [(path / sessions.OWNER).read_text().split()[0] for path in sessions.base().glob("stagetrace-*-*")]
    assert str(ship.live.server.pid) not in left, "its session is still there"
    return records


def told_to_end(ship: Ship, slots: int = 8) -> list[RequestRecord]:
    """SIGTERM with all slots taken and two requests waiting: their records.

    vLLM tells these that its engine has ended, or forgets them and waits until they leave, as its threads have it.
    """
    leaving = Event()
    calls = crowd(ship, slots, leaving)
    ship.live.server.signal(signal.SIGTERM)
    if ship.live.server.wait(5) is None:
        leaving.set()
    records = ended(ship, calls, code=0)
    assert {r.status for r in records} <= {"aborted", "error"}, [(r.status, r.error_type) for r in records]
    stages = [r.active_stage for r in records]
    assert stages == ["decode"] * slots + ["admission"] * 2, stages
    # One API server of several is ended by its parent, unseen.
    unseen = [(r.error_type, r.e2e_ms) for r in records if (r.e2e_ms is None) != (r.error_type == "process_ended")]
    assert not unseen, unseen
    return records


def kill(ship: Ship, word: str) -> None:
    os.kill(ship.pids(word)[0], signal.SIGKILL)
