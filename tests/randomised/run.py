"""Sends what hypothesis draws to a real server, many at a time, and holds every record and every trace to the rules."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from stagetrace.model import RequestRecord
from stagetrace.store import load
from tests.engine.serving import ClientResult
from tests.engine.ship import Ship, spans_sent
from tests.invariants import SERVER, trace_violations, unaccounted, violations

from .mix import Ask
from .verdict import contradiction

ROUND = 50
CONCURRENCY = (1, 8, 16, 64)
#: For the last records to be stored, and the last traces to be sent.
SETTLE_S = 60.0
Answer = tuple[Ask, str, ClientResult]


@dataclass
class Outcome:
    """Of one server: how many requests of each kind, how they ended, and which rules were broken."""

    asked: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    #: (status, the stage it ended in or why) → requests.
    endings: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: What the engine did for how many sequences.
    facts: Counter[str] = field(default_factory=Counter)
    records: int = 0
    spans: int = 0
    problems: list[str] = field(default_factory=list)


def random_run(
    ship: Ship, asks: st.SearchStrategy[Ask], count: int, number: int, tick: Callable[[int], Any] = lambda done: None
) -> Outcome:
    """At least ``count`` requests in rounds, drawn from ``asks`` with the seed ``number``; what became of them."""
    answers: list[Answer] = []

    def send(drawn: list[Ask], concurrency: int) -> None:
        found = ship.ask_many([ask.arguments() for ask in drawn], concurrency)
        answers.extend((ask, trace, result) for ask, (trace, result) in zip(drawn, found, strict=True))
        tick(len(drawn))

    began = time.monotonic()
    size = min(count, ROUND)
    while len(answers) < count:
        _rounds(asks, size, -(-(count - len(answers)) // size), number + len(answers), send)
    outcome = judge(ship, answers)
    outcome.seconds = time.monotonic() - began
    return outcome


def _rounds(
    asks: st.SearchStrategy[Ask], size: int, rounds: int, number: int, send: Callable[[list[Ask], int], None]
) -> None:
    """The test that hypothesis runs never fails: what is wrong is known when everything has been stored."""

    @seed(number)
    @settings(
        max_examples=rounds, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(asks, min_size=size, max_size=size), st.sampled_from(CONCURRENCY))
    def each(drawn: list[Ask], concurrency: int) -> None:
        send(drawn, concurrency)

    each()


def judge(ship: Ship, answers: list[Answer]) -> Outcome:
    """Wait until all is stored and sent, and look at it."""
    sent = [trace for _, trace, _ in answers]
    hidden = set(ship.unsampled)
    stored = _stored(ship, sent)
    exported = _exported(ship, {trace for trace in sent if stored[trace] and trace not in hidden})
    records = [record for trace in sent for record in stored[trace]]
    spans = [span for trace in sent for span in exported[trace]]
    outcome = Outcome(len(answers), records=len(records), spans=len(spans))
    outcome.problems += unaccounted(sent, records, spans, hidden)
    outcome.problems += [said for record in records for said in violations(record, complete=True)]
    outcome.problems += [said for trace in sent if exported[trace] for said in trace_violations(exported[trace])]
    outcome.problems += filter(None, (contradiction(ask, got, stored[trace]) for ask, trace, got in answers))
    outcome.problems += [line for line in ship.said() if "lost" in line or "failed" in line]
    for ask, trace, _ in answers:
        outcome.kinds[ask.kind] += 1
        outcome.endings.update({_ending(record) for record in stored[trace][:1]})
    outcome.facts.update(word for record in records for word in _facts(record))
    return outcome


def _stored(ship: Ship, sent: Iterable[str]) -> dict[str, list[RequestRecord]]:
    """Records by trace; of a trace that is not there in time, none."""
    until = time.monotonic() + SETTLE_S
    while True:
        found: dict[str, list[RequestRecord]] = {trace: [] for trace in sent}
        for record in load(ship.store, steps=False).requests:
            if record.trace_id in found and record.span_id not in ship.before:
                found[record.trace_id].append(record)
        complete = all(rows and all(row.status != "in_flight" for row in rows) for rows in found.values())
        if complete or time.monotonic() > until:
            return {trace: sorted(rows, key=lambda row: row.sequence) for trace, rows in found.items()}
        time.sleep(0.5)


def _exported(ship: Ship, wanted: set[str]) -> dict[str, list[Any]]:
    """Spans by trace, when every one that is wanted has its root, or it has become too late."""
    until = time.monotonic() + SETTLE_S
    while True:
        found: dict[str, list[Any]] = defaultdict(list)
        for span in spans_sent(ship.received):
            found[span.trace_id.hex()].append(span)
        rooted = {trace for trace, spans in found.items() if any(span.kind == SERVER for span in spans)}
        if wanted <= rooted or time.monotonic() > until:
            return found
        time.sleep(0.5)


def _ending(record: RequestRecord) -> tuple[str, str]:
    if record.status == "ok":
        return "ok", record.finish_reason or "null"
    why = f" ({record.error_type})" if record.status == "error" else ""
    return record.status, f"in {record.active_stage}{why}"


def _facts(record: RequestRecord) -> list[str]:
    admission = record.stage("admission").attributes.get("reason")
    chunks = record.stage("prefill").attributes.get("chunks") or 0
    found = {
        "preempted": record.preemptions > 0, "had tokens in the prefix cache": (record.cached_tokens or 0) > 0,
        "prefilled in chunks": chunks > 1, f"waited: {admission}": bool(admission),
        "constrained by a grammar": bool(record.stage("sample").attributes.get("grammar")),
    }  # fmt: skip
    return [word for word, holds in found.items() if holds]
