"""Comparisons drawn from runs that were really made: how often the gate is wrong at the noise that was there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stagetrace.gate.ab import order
from stagetrace.gate.compare import compare
from stagetrace.gate.decide import FAIL, INCONCLUSIVE, PASS
from stagetrace.gate.match import Sides
from stagetrace.gate.measures import BY_KEY
from stagetrace.gate.runs import Request, Run
from stagetrace.gate.settings import Wishes

#: What is put on top of a stage, and by that of the timers that it is in.
STAGES = ("tokenize", "admission", "prefill", "detokenize", "decode")


@dataclass
class Found:
    """Verdicts on ``comparisons`` of ``runs`` a side; ``named``: those that failed for the right stage.

    ``needed``: the runs a side that each INCONCLUSIVE one asked for, where any number would do. ``noise``: of
    each, by how much runs varied in the stage, and the verdict.
    """

    runs: int
    stage: str | None
    slower: float
    verdicts: Counter[str] = field(default_factory=Counter)
    named: int = 0
    needed: list[int] = field(default_factory=list)
    noise: list[tuple[float, str]] = field(default_factory=list)

    def add(self, sides: Sides) -> None:
        """Compare them, and count what is found."""
        report = compare(sides, Wishes())
        self.verdicts[report.verdict] += 1
        if report.verdict == INCONCLUSIVE and report.runs_needed is not None:
            self.needed.append(report.runs_needed)
        row = next((row for row in report.rows if row.measure.key == self.stage), None)
        if row is not None and row.judged.estimate.noise is not None:
            self.noise.append((row.judged.estimate.noise, report.verdict))
        self.named += report.culprit is not None and report.culprit.measure.key == self.stage

    @property
    def comparisons(self) -> int:
        """How many there were."""
        return sum(self.verdicts.values())

    def shares(self) -> dict[str, float]:
        """Of each verdict."""
        return {name: self.verdicts[name] / self.comparisons for name in (PASS, FAIL, INCONCLUSIVE)}


def draw(
    pool: Sequence[Run],
    runs: int,
    comparisons: int,
    rng: np.random.Generator,
    stage: str | None = None,
    slower: float = 0.0,
) -> Found:
    """Draw ``runs`` a side out of ``pool``, without putting back, A B B A in the order they were made."""
    if len(pool) < 2 * runs:
        raise ValueError(f"{len(pool)} runs are too few to draw two times {runs} of them")
    found = Found(runs, stage, slower)
    in_order = sorted(pool, key=lambda run: run.started_unix_ns)
    for _ in range(comparisons):
        chosen = np.sort(rng.choice(len(in_order), 2 * runs, replace=False))
        found.add(_in_turn([in_order[index] for index in chosen], stage, slower))
    return found


def in_a_row(before: Sequence[Run], after: Sequence[Run], runs: int, stage: str) -> Found:
    """Every ``runs`` in a row of two sides that were made in turn; ``stage`` really was slower ``after``."""
    found = Found(runs, stage, 0.0)
    for first in range(len(after) - runs + 1):
        found.add(Sides(before[first : first + runs], after[first : first + runs]))
    return found


def in_rounds(
    sides: tuple[Sequence[Run], Sequence[Run]], runs: int, comparisons: int, rng: np.random.Generator, stage: str
) -> Found:
    """Draw ``runs`` rounds of those in which two sides were made, without putting back, and compare what was made."""
    found = Found(runs, stage, 0.0)
    for _ in range(comparisons):
        chosen = np.sort(rng.choice(len(sides[0]), runs, replace=False))
        found.add(Sides(*([side[index] for index in chosen] for side in sides)))
    return found


def draw_as_asked(pool: Sequence[Run], first: Found, comparisons: int, rng: np.random.Generator) -> Found:
    """Draw so many runs a side as what was INCONCLUSIVE in ``first`` asked for: putting back, in no order of time."""
    found = Found(first.runs, first.stage, first.slower)
    for runs in first.needed[:comparisons]:
        chosen = rng.choice(len(pool), 2 * runs)
        drawn = [replace(pool[index], started_unix_ns=place) for place, index in enumerate(chosen)]
        found.add(_in_turn(drawn, first.stage, first.slower))
    return found


def _in_turn(runs: Sequence[Run], stage: str | None, slower: float) -> Sides:
    sides: tuple[list[Run], list[Run]] = [], []
    for side, run in zip(order(len(runs) // 2), runs, strict=True):
        sides[side].append(made_slower(run, stage, slower) if side and stage else run)
    return Sides(*sides)


def made_slower(run: Run, stage: str, slower: float) -> Run:
    """The run as if that stage had taken longer in every request."""
    timers = {BY_KEY[stage].of, "e2e_ms"}

    def one(request: Request) -> Request:
        more = request.ms.get(stage, 0.0) * slower
        ms: Mapping[str, float] = {
            key: value + more if key == stage or key in timers else value for key, value in request.ms.items()
        }
        return replace(request, ms=ms)

    return replace(run, requests={key: one(request) for key, request in run.requests.items()})


def noise(pool: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """Measure → mean in ms, and by how much runs vary (coefficient of variation of their means)."""
    out = {}
    for key in BY_KEY:
        means = [
            np.mean([r.ms[key] for r in run.requests.values() if key in r.ms])
            for run in pool
            if any(key in r.ms for r in run.requests.values())
        ]
        if len(means) > 1:
            out[key] = float(np.mean(means)), float(np.std(means, ddof=1) / np.mean(means))
    return out
