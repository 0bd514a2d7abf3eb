"""Pairs of requests, one of them delayed: where the difference is in what stagetrace recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.stats import Spread
from stagetrace.model import RequestRecord
from stagetrace.stages import STAGES

from .plugin.stagetrace_faults.control import Fault
from .plugin.stagetrace_faults.places import PLACES, Place
from .server import FaultyServer, Sent

#: Too short for a block of the prefix cache, so that nothing of one prompt is ever found by another.
PROMPT_TOKENS = 60
#: Nine further tokens where decoding is delayed, of which eight are delayed by a part of the size each.
DECODE_TOKENS, DELAYED_TOKENS, PER_TOKEN = 10, 8, 1 / 4
#: While the front end is held up at its first token, the engine would be ahead with the next one.
ONE_TOKEN = ("detokenize", "detokenize.emit")
#: Between two requests, so that neither finds the server warmer than the other.
IDLE_S = 0.04
CONTROL, DELAYED = "control", "delayed"
Arm = TypeVar("Arm")
PASS, UNCLEAR, FAIL = "PASS", "unclear", "FAIL"


@dataclass(frozen=True)
class Limits:
    """What may be missing or too much where a delay belongs, and what may be elsewhere: a share of it, or so many ms.

    The floor is the machine's noise: 5 % of 5 ms is a quarter of a millisecond, and twelve stages of two requests
    that nobody delays differ by more than that.
    """

    own: float = 0.10
    elsewhere: float = 0.05
    floor_ms: float = 1.0


LIMITS = Limits()


@dataclass(frozen=True)
class Pair:
    """A delayed request and its control, how long the delays really were, and what they came to for the client."""

    control: RequestRecord
    delayed: RequestRecord
    injected_ms: float
    client_ms: float

    def changes(self) -> dict[str, float]:
        """Stage, or ``unattributed`` → how much longer it was for the delayed one, in ms."""
        before, after = times(self.control), times(self.delayed)
        return {name: after[name] - before[name] for name in after}

    def site(self, place: Place) -> float:
        """The same for the part of the stage that the delay was in, where it has parts."""
        return site_ms(self.delayed, place) - site_ms(self.control, place)


def times(record: RequestRecord) -> dict[str, float]:
    """The twelve stages' durations and what is nobody's, in ms; a stage without a time is an error here."""
    found = {stage.key: record.stage(stage.key).duration_ms for stage in STAGES}
    if record.stage("decode").state == "not_applicable":  # there was one token only
        found["decode"] = 0.0
    found["unattributed"] = record.unattributed_ms
    missing = [name for name, took in found.items() if took is None]
    if missing:
        raise RuntimeError(f"request {record.external_id} has no time for {', '.join(missing)}")
    return {name: took for name, took in found.items() if took is not None}


def site_ms(record: RequestRecord, place: Place) -> float:
    """How long that part was."""
    if not place.part:
        return times(record)[place.lands]
    if place.lands == "unattributed":
        return record.gaps_ms.get(place.part, 0.0)
    value = record.stage(place.lands).attributes
    for key in place.part.split("."):
        value = value[key]
    return float(value)  # type: ignore[arg-type]


@dataclass
class Row:
    """What became of one delay: ``pairs``, and what they come to. All in ms."""

    place: Place
    size_ms: float
    limits: Limits
    pairs: list[Pair] = field(default_factory=list)

    @property
    def injected(self) -> Spread:
        """How long the delays really were."""
        return Spread.of([pair.injected_ms for pair in self.pairs])

    @property
    def client(self) -> Spread:
        """How much longer the request was by its client's clock: the delay, and what followed from it."""
        return Spread.of([pair.client_ms for pair in self.pairs])

    @property
    def changes(self) -> dict[str, Spread]:
        """Stage, or ``unattributed`` → how much longer it was, pair by pair."""
        found = [pair.changes() for pair in self.pairs]
        return {name: Spread.of([change[name] for change in found]) for name in found[0]}

    @property
    def site(self) -> Spread:
        """How much longer the very part was that the delay was in; the stage, where it has no parts."""
        return Spread.of([pair.site(self.place) for pair in self.pairs])

    @property
    def elsewhere(self) -> dict[str, Spread]:
        """The other stages' changes, and that of ``unattributed``."""
        return {name: change for name, change in self.changes.items() if name != self.place.lands}

    @property
    def elsewhere_ms(self) -> float:
        """All of it, whichever way it went."""
        return sum(abs(change.value) for change in self.elsewhere.values())

    def judged(self) -> list[tuple[str, str]]:
        """(verdict, of what) for each of the three things that must hold.

        The stage must have the change that the client has measured, its part what was injected, and the other stages
        next to nothing. Within its limit is PASS, surely beyond it (even the near end of the median's 95 % interval
        is) is FAIL.
        """
        lands, limits = self.place.lands, self.limits
        apart = Spread.of([pair.changes()[lands] - pair.client_ms for pair in self.pairs])
        off = Spread.of([pair.site(self.place) - pair.injected_ms for pair in self.pairs])
        client = self.client.value
        surely = sum(map(least, self.elsewhere.values()))
        return [
            (judge(abs(apart.value), least(apart), max(limits.own * client, limits.floor_ms)), lands),
            (judge(abs(off.value), least(off), max(limits.own * self.injected.value, limits.floor_ms)), self.site_name),
            (judge(self.elsewhere_ms, surely, max(limits.elsewhere * client, limits.floor_ms)), "elsewhere"),
        ]

    @property
    def site_name(self) -> str:
        """What :attr:`site` is about."""
        return self.place.part or self.place.lands

    @property
    def verdict(self) -> str:
        """The worst of them."""
        verdicts = {verdict for verdict, _ in self.judged()}
        return next(verdict for verdict in (FAIL, UNCLEAR, PASS) if verdict in verdicts)

    @property
    def words(self) -> str:
        """The verdict, and what it is about where it is not PASS."""
        off = ", ".join(what for verdict, what in self.judged() if verdict != PASS)
        return self.verdict + (f": {off}" if off else "")


def judge(value: float, surely: float, limit: float) -> str:
    """PASS, FAIL or unclear."""
    return PASS if value <= limit else FAIL if surely > limit else UNCLEAR


def least(change: Spread) -> float:
    """The smallest amount that the median surely differs from 0 by."""
    return max(change.low, -change.high, 0.0)


@dataclass(frozen=True)
class Plan:
    """How a row is measured: so many pairs, and while it is unclear as many again, ``rounds`` times at most.

    What was measured before stays in.
    """

    pairs: int
    rounds: int = 1
    limits: Limits = LIMITS


def measure(server: FaultyServer, name: str, size_ms: float, plan: Plan, tick: Callable[[], None]) -> Row:
    """Delay requests at the place ``name``, each beside a control. ``tick`` is called for every pair."""
    made = Row(PLACES[name], size_ms, plan.limits)
    number = server.inject(fault_of(made.place, size_ms))
    for _ in range(plan.rounds):
        made.pairs += _pairs(server, made.place, number, plan.pairs, tick)
        if made.verdict != UNCLEAR:
            break
    server.inject(None)
    return made


def tokens_of(place: Place, layout: str) -> int:
    """How many tokens the requests of a row ask for.

    One further token where decoding is not what is delayed: its noise is not to drown the rest. None on the GPU's
    path, where that one is made before the first is handed back; but for blocks to be returned after it.
    """
    if place.per_token:
        return DECODE_TOKENS
    return 1 if place.name in ONE_TOKEN or (layout == "gpu" and place.name != "teardown") else 2


def fault_of(place: Place, size_ms: float) -> Fault:
    """The delay of a row."""
    return Fault(place.name, size_ms * PER_TOKEN if place.per_token else size_ms, only=DELAYED)


def _pairs(server: FaultyServer, place: Place, number: int, count: int, tick: Callable[[], None]) -> list[Pair]:
    tokens = tokens_of(place, server.layout)
    sent: list[dict[str, Sent]] = []
    for order in orders(count, (CONTROL, DELAYED)):
        pair = {}
        for arm in order:
            time.sleep(IDLE_S)
            pair[arm] = server.send(arm, PROMPT_TOKENS, tokens)
        sent.append(pair)
        tick()
    records = server.records([each.name for pair in sent for each in pair.values()])
    delays = server.delays_ms(number)
    due = DELAYED_TOKENS if place.per_token else 1
    return [
        Pair(
            records[pair[CONTROL].name],
            records[pair[DELAYED].name],
            met(delays, pair[DELAYED].name, place.name, due),
            pair[DELAYED].e2e_ms - pair[CONTROL].e2e_ms,
        )
        for pair in sent
    ]


def orders(count: int, arms: tuple[Arm, Arm]) -> Iterator[tuple[Arm, Arm]]:
    """Who goes first in each of ``count`` pairs: by turns, so that a drift of the machine meets both alike."""
    for turn in range(count):
        yield arms if turn % 2 else (arms[1], arms[0])


def met(delays: dict[str, list[float]], name: str, place: str, due: int) -> float:
    """All that one request was delayed, in ms; a delay that did not happen, or happened too often, proves nothing."""
    found = [ms for request, each in delays.items() if name in request for ms in each]
    if len(found) != due:
        raise RuntimeError(f"{place}: request {name} met {len(found)} delays, not {due}")
    return sum(found)


def landed(rows: Sequence[Row], names: Sequence[str]) -> int:
    """How many of the places ``names`` are PASS at every size they were measured at."""
    return sum(
        bool(mine := [row for row in rows if row.place.name == name]) and all(row.verdict == PASS for row in mine)
        for name in names
    )
