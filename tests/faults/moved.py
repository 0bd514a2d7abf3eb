"""A control that waits as long, one place earlier: what a wait does to the rest of a request is then in both of them.

A request that has waited is slower in what comes after, wherever the wait was: processes that had nothing to do come
back to caches that are others' by then. Against a control that nobody delays this is in the other stages, where it
belongs. Against one that was delayed elsewhere it cancels out, and what is left is time booked under a wrong name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.stats import Spread
from stagetrace.model import RequestRecord

from .measure import (
    CONTROL,
    DELAYED,
    IDLE_S,
    ONE_TOKEN,
    PROMPT_TOKENS,
    UNCLEAR,
    Pair,
    Plan,
    Row,
    fault_of,
    judge,
    least,
    met,
    orders,
    tokens_of,
)
from .plugin.stagetrace_faults.places import GAPS, PLACES, STAGES, Place
from .server import FaultyServer, Sent

#: Those a request meets once, in the order it meets them. What the first is compared with comes after it.
ONCE = tuple(name for name in PLACES if name in (*STAGES, *GAPS) and not PLACES[name].per_token)


def earlier(name: str) -> str:
    """The place before ``name`` that the same request can be delayed at; for the first one, the place after it."""
    at = ONCE.index(name)
    before = [other for other in ONCE[:at] if name in ONE_TOKEN or other not in ONE_TOKEN]
    return before[-1] if before else ONCE[1]


@dataclass
class Moved(Row):
    """Requests delayed at ``place`` beside others delayed as long at ``other``."""

    other: Place = field(kw_only=True)

    @property
    def elsewhere(self) -> dict[str, Spread]:
        """The changes of what neither was delayed in."""
        return {name: change for name, change in super().elsewhere.items() if name != self.other.lands}

    def judged(self) -> list[tuple[str, str]]:
        """(verdict, of what): the delay is in the one stage, is not in the other, and next to nothing is elsewhere."""
        made = []
        for place, sign in ((self.place, 1.0), (self.other, -1.0)):
            off = Spread.of([pair.changes()[place.lands] - sign * pair.injected_ms for pair in self.pairs])
            limit = max(self.limits.own * self.injected.value, self.limits.floor_ms)
            made.append((judge(abs(off.value), least(off), limit), place.lands))
        surely = sum(map(least, self.elsewhere.values()))
        limit = max(self.limits.elsewhere * self.injected.value, self.limits.floor_ms)
        return [*made, (judge(self.elsewhere_ms, surely, limit), "elsewhere")]


def moved(server: FaultyServer, name: str, size_ms: float, plan: Plan, tick: Callable[[], None]) -> Moved:
    """Delay requests at ``name`` by ``size_ms``, each beside one that is delayed as long at the place before."""
    row = Moved(PLACES[name], size_ms, plan.limits, other=PLACES[earlier(name)])
    for _ in range(plan.rounds):
        row.pairs += _pairs(server, row, plan.pairs, tick)
        if row.verdict != UNCLEAR:
            break
    server.inject(None)
    return row


def _pairs(server: FaultyServer, row: Moved, count: int, tick: Callable[[], None]) -> list[Pair]:
    places = {CONTROL: row.other, DELAYED: row.place}
    tokens = tokens_of(row.place, server.layout)
    sent: list[dict[str, tuple[int, Sent]]] = []
    for order in orders(count, (CONTROL, DELAYED)):
        pair = {}
        for arm in order:
            number = server.inject(replace(fault_of(places[arm], row.size_ms), only=arm))
            time.sleep(IDLE_S)
            pair[arm] = number, server.send(arm, PROMPT_TOKENS, tokens)
        sent.append(pair)
        tick()
    records = server.records([each.name for pair in sent for _, each in pair.values()])
    return [_pair(server, places, pair, records) for pair in sent]


def _pair(
    server: FaultyServer, places: dict[str, Place], sent: dict[str, tuple[int, Sent]], records: dict[str, RequestRecord]
) -> Pair:
    long = {arm: met(server.delays_ms(n), each.name, places[arm].name, 1) for arm, (n, each) in sent.items()}
    control, delayed = sent[CONTROL][1], sent[DELAYED][1]
    return Pair(records[control.name], records[delayed.name], long[DELAYED], delayed.e2e_ms - control.e2e_ms)
