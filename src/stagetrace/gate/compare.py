"""Two sides in, one report out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .decide import FAIL, FULL_SHARE, INCONCLUSIVE, LEAST_MS, Judged, Outcome, decide, kept, overall
from .estimate import Array, Flags, estimate, interleaved
from .match import Sides, columns
from .measures import BY_KEY, MEASURES, Measure
from .runs import Request, Run
from .settings import Budget, Wishes

#: Of the requests that show a change best, so many are named.
SHOWN = 5


@dataclass(frozen=True)
class Row:
    """One measure: what was seen, and what follows."""

    measure: Measure
    judged: Judged
    outcome: Outcome

    @property
    def change(self) -> float:
        """Slower by this share (negative: faster)."""
        return math.expm1(self.judged.estimate.change)

    @property
    def change_ms(self) -> float:
        """The same in ms, for a request of the baseline's length."""
        return self.judged.base_ms * self.change


@dataclass(frozen=True)
class BudgetRow:
    """A budget and how it was kept. ``seen_ms`` is the geometric mean over runs of the percentile.

    ``runs_needed`` is as in :class:`Outcome`.
    """

    budget: Budget
    seen_ms: float
    verdict: str
    runs_needed: int | None = None


@dataclass(frozen=True)
class Shown:
    """A request that shows the change: how long its prompt took before, and now; ``id`` is one of now."""

    prompt: str
    prompt_tokens: int
    before_ms: float
    after_ms: float
    id: str
    run: str


@dataclass(frozen=True)
class Report:
    """The whole comparison. ``unjudged``: stages that neither side has, and why."""

    verdict: str
    sides: Sides
    rows: list[Row]
    budgets: list[BudgetRow]
    unjudged: dict[str, str]
    #: The stage that carried the change; a timer where no stage did; None where nothing is slower.
    culprit: Row | None
    shown: list[Shown] = field(default_factory=list)
    #: Whether the sides were run in turn, in enough runs to know it: only then is the rate of false alarms known.
    interleaved: bool = False

    @property
    def runs(self) -> tuple[int, int]:
        """Runs of the baseline, and of the current side."""
        return len(self.sides.baseline), len(self.sides.current)

    @property
    def runs_needed(self) -> int | None:
        """Runs a side that would decide all that is undecided; None where none would do, or none is needed."""
        needed = [row.outcome.runs_needed for row in self.rows if row.outcome.verdict == INCONCLUSIVE]
        needed += [row.runs_needed for row in self.budgets if row.verdict == INCONCLUSIVE]
        return max((n for n in needed if n is not None), default=None) if None not in needed else None

    @property
    def detectable(self) -> Row | None:
        """Of timers and of stages that are a good part of theirs, the one whose slowdown would be seen last."""
        known = [
            row for row in self.rows
            if row.outcome.detectable is not None
            and (row.judged.share is None or row.judged.share >= FULL_SHARE)
        ]  # fmt: skip
        return max(known, key=lambda row: row.outcome.detectable or 0.0, default=None)


def compare(sides: Sides, wishes: Wishes) -> Report:
    """Judge the current side against the baseline. Fault if the two have too little in common."""
    found = columns(sides)
    current = np.array([False] * len(sides.baseline) + [True] * len(sides.current))
    order = interleaved(current, np.array([run.started_unix_ns for run in sides.runs], dtype=np.float64))
    judged = {
        measure.key: _judged(measure, found, current, order, wishes)
        for measure in MEASURES
        if measure.judged and measure.key in found
    }
    outcomes = decide(judged)
    rows = [Row(BY_KEY[key], judged[key], outcomes[key]) for key in judged]
    budgets = [_kept(budget, sides.current, len(wishes.budgets)) for budget in wishes.budgets]
    culprit = _culprit(rows)
    return Report(
        overall([row.outcome.verdict for row in rows] + [row.verdict for row in budgets]),
        sides, rows, budgets, _unjudged(sides, found), culprit,
        _shown(culprit, sides, found) if culprit else [], order is not None,
    )  # fmt: skip


def _judged(
    measure: Measure, found: dict[str, tuple[list[str], Array]], current: Flags, order: Array | None, wishes: Wishes
) -> Judged:
    _, ms = found[measure.key]
    before = np.median(ms[~current], axis=0)
    timer_ms = None
    if measure.of is not None:  # what is pooled has no time to a first text
        _, whole = found.get(measure.of, found["e2e_ms"])
        timer_ms = float(np.median(whole[~current], axis=0).mean())
    base_ms = float(before.mean())
    share = base_ms / timer_ms if timer_ms else None
    return Judged(estimate(ms, current, order), base_ms, share, wishes.effect(measure, timer_ms))


def _unjudged(sides: Sides, found: dict[str, tuple[list[str], Array]]) -> dict[str, str]:
    states: dict[str, str] = {}
    for run in sides.runs:
        states |= run.without
    return {m.key: states.get(m.key, "unknown") for m in MEASURES if m.judged and m.key not in found}


def _culprit(rows: Sequence[Row]) -> Row | None:
    slower = [row for row in rows if row.outcome.verdict == FAIL]
    parts = [row for row in slower if row.measure.of is not None]
    return max(parts or slower, key=lambda row: row.change_ms, default=None)


def _shown(culprit: Row, sides: Sides, found: dict[str, tuple[list[str], Array]]) -> list[Shown]:
    """The prompts that became slower by most, each with the current request that was nearest to its median."""
    keys, ms = found[culprit.measure.key]
    split = len(sides.baseline)
    before, after = np.median(ms[:split], axis=0), np.median(ms[split:], axis=0)
    out = []
    for column in np.argsort(before - after, kind="stable")[:SHOWN]:
        row = int(np.abs(ms[split:, column] - after[column]).argmin())
        run = sides.current[row]
        request: Request = run.requests[keys[column]]
        times = float(before[column]), float(after[column])
        out.append(Shown(keys[column], request.prompt_tokens, *times, request.id, run.name))
    return out


def _kept(budget: Budget, runs: Sequence[Run], budgets: int) -> BudgetRow:
    """Of each run the percentile; what is judged is their geometric mean."""
    key = budget.measure.key
    values = [[r.ms[key] for r in run.requests.values() if key in r.ms] for run in runs]
    seen = np.array([np.percentile(of_run, budget.q) for of_run in values if of_run])
    if not len(seen):
        return BudgetRow(budget, math.nan, INCONCLUSIVE)
    verdict, needed = kept(seen, budget.most_ms, budgets)
    return BudgetRow(budget, float(np.exp(np.log(np.maximum(seen, LEAST_MS)).mean())), verdict, needed)
