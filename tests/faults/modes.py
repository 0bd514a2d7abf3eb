"""The other ways to be slow: for some requests only, and growing with the batch or the position."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.stats import Spread, median
from stagetrace.model import RequestRecord

from .measure import CONTROL, DELAYED, IDLE_S, LIMITS, PROMPT_TOKENS, Limits, judge, least, orders
from .plugin.stagetrace_faults.calls import DECODING
from .plugin.stagetrace_faults.control import Fault
from .server import FaultyServer

TOKENS = 18
BATCHES = (1, 2, 4)
BYSTANDER_MS, POSITION_MS, BATCH_MS = 40.0, 1.0, 4.0
Tick = Callable[[], None]


@dataclass(frozen=True)
class Shown:
    """One thing that the records should show: what was ``expected`` of it and what was ``found``, in ms."""

    what: str
    expected: float
    found: Spread
    limits: Limits = LIMITS

    @property
    def verdict(self) -> str:
        """As a row's change is judged."""
        off = self.found.minus(Spread(*[self.expected] * 5))
        return judge(abs(off.value), least(off), max(self.limits.own * self.expected, self.limits.floor_ms))


def bystanders(server: FaultyServer, count: int, tick: Tick) -> Shown:
    """A request that the delay is not meant for takes as long as one without any: the file changes in between."""
    fault = Fault("prefill", BYSTANDER_MS, only=DELAYED)
    sent = []
    for order in orders(count, (False, True)):
        pair = {}
        for switched in order:
            server.inject(fault if switched else None)
            pair[switched] = _one(server, CONTROL, 2)
        sent.append(pair)
        tick()
    server.inject(None)
    records = server.records([name for pair in sent for name in pair.values()])
    changes = [_e2e(records[pair[True]]) - _e2e(records[pair[False]]) for pair in sent]
    return Shown(f"{BYSTANDER_MS:g} ms for others: a request's end-to-end time", 0.0, Spread.of(changes))


def by_position(server: FaultyServer, count: int, tick: Tick) -> Shown:
    """Each further token takes longer than the one before: the slope of the inter-token times over the position."""
    server.inject(Fault("decode", POSITION_MS, DELAYED, "position"))
    sent = []
    for order in orders(count, (CONTROL, DELAYED)):
        sent.append({arm: _one(server, arm, TOKENS) for arm in order})
        tick()
    server.inject(None)
    records = server.records([name for pair in sent for name in pair.values()])
    slopes = []
    for pair in sent:
        before, after = (between_tokens(records[pair[arm]]) for arm in (CONTROL, DELAYED))
        slopes.append(slope([b - a for a, b in zip(before, after, strict=True)][DECODING - 1 :]))
    what = f"{POSITION_MS:g} ms × position: inter-token time, growth per token"
    return Shown(what, POSITION_MS, Spread.of(slopes), Limits(floor_ms=0.0))


def by_batch(server: FaultyServer, count: int, tick: Tick) -> list[Shown]:
    """The median inter-token time grows by the delay times the batch's size."""
    found = []
    for size in BATCHES:
        number = server.inject(Fault("decode", BATCH_MS, DELAYED, "batch"))
        sent = []
        for order in orders(count, (CONTROL, DELAYED)):
            sent.append({arm: _together(server, arm, size) for arm in order})
            tick()
        server.inject(None)
        records = server.records([name for pair in sent for names in pair.values() for name in names])
        grown = [_itl(records, pair[DELAYED]) - _itl(records, pair[CONTROL]) for pair in sent]
        delays = [ms for each in server.delays_ms(number).values() for ms in each]
        what = f"{BATCH_MS:g} ms × batch: inter-token time p50, {size} at once"
        found.append(Shown(what, median(delays), Spread.of(grown)))
    return found


def _one(server: FaultyServer, arm: str, tokens: int) -> str:
    time.sleep(IDLE_S)
    return server.send(arm, PROMPT_TOKENS, tokens).name


def _together(server: FaultyServer, arm: str, size: int) -> list[str]:
    time.sleep(IDLE_S)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda _: server.send(arm, PROMPT_TOKENS, TOKENS).name, range(size)))


def _e2e(record: RequestRecord) -> float:
    assert record.e2e_ms is not None, f"{record.external_id} has not ended"
    return record.e2e_ms


def _itl(records: dict[str, RequestRecord], names: list[str]) -> float:
    return median([value for name in names if (value := records[name].itl_ms["p50"]) is not None])


def between_tokens(record: RequestRecord) -> list[float]:
    """The times between tokens, in ms."""
    return [b - a for a, b in pairwise(record.token_times_ms)]


def slope(values: list[float]) -> float:
    """Of the straight line through ``values`` at 0, 1, 2, ...: the median of the slopes between all pairs of them."""
    return median([(values[j] - values[i]) / (j - i) for i in range(len(values)) for j in range(i + 1, len(values))])
