"""From estimates to a verdict: surely slower, surely not, or cannot tell with so few runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from .estimate import Array, Estimate, quantile, understated

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
#: What is promised: of comparisons without a change, no more than this share is FAIL, all stages together.
FALSE_ALARMS = 0.01
#: What is worked with, so that the promise has a margin.
ALPHA = 0.0075
#: The share of those with a stage slower by the effect of interest that may PASS.
BETA = 0.05
#: With fewer runs a side there is no verdict.
FEWEST_RUNS = 3
#: What is advised where nothing is known of the noise.
USUAL_RUNS = 5
#: Runs are planned so that this share of comparisons is decided ...
POWER = 0.9
#: ... unless the noise was underestimated, which happens to this share of plans.
LUCK = 0.3
MOST_RUNS = 1000
#: No time is taken for shorter, ms: of nothing there is no logarithm.
LEAST_MS = 1e-6
#: No logarithm of a ratio is said to be larger; that of the largest number is 709.
MOST_LOG = 500.0
#: A part of at least this share of its timer has a full share of ALPHA.
FULL_SHARE = 0.05
#: A timer slows down with one of its parts, as a rule: it is judged for what is in no single one.
TIMER_WEIGHT = 1 / 6


@dataclass(frozen=True)
class Effect:
    """The smallest slowdown of interest: relative, and in ms; the greater of them counts."""

    relative: float = 0.05
    absolute_ms: float = 0.2

    def log(self, base_ms: float) -> float:
        """The logarithm of the ratio from which on a measure of ``base_ms`` is of interest."""
        return math.log1p(max(self.relative, self.absolute_ms / max(base_ms, 1e-9)))


@dataclass(frozen=True)
class Judged:
    """What is known of one measure. ``share`` is its part of its timer; None for a timer."""

    estimate: Estimate
    base_ms: float
    share: float | None
    effect: Effect

    @property
    def weight(self) -> float:
        """Its share of ALPHA, relative to others: small parts can only matter by growing many times over."""
        return TIMER_WEIGHT if self.share is None else min(1.0, self.share / FULL_SHARE)

    @property
    def threshold(self) -> float:
        """The logarithm of the smallest ratio of interest."""
        return self.effect.log(self.base_ms)


@dataclass(frozen=True)
class Outcome:
    """The verdict on one measure: with what was at stake, could have been seen, and would have to be done."""

    verdict: str
    #: Logarithm of the slowdown that would have been caught in 19 of 20 such comparisons; None: nothing is known.
    detectable: float | None
    #: Runs a side that would decide; None where that is decided, or no number would do.
    runs_needed: int | None


def decide(measures: Mapping[str, Judged]) -> dict[str, Outcome]:
    """Judge all measures of one comparison together."""
    levels = _levels(measures)
    slower = _surely_slower(measures)
    return {key: _outcome(judged, key in slower, levels[key]) for key, judged in measures.items()}


def overall(verdicts: Sequence[str]) -> str:
    """One verdict out of several: the worst. Nothing judged is no PASS."""
    if FAIL in verdicts:
        return FAIL
    return INCONCLUSIVE if INCONCLUSIVE in verdicts or not verdicts else PASS


def _levels(measures: Mapping[str, Judged]) -> dict[str, float]:
    whole = sum(judged.weight for judged in measures.values())
    return {key: ALPHA * judged.weight / whole for key, judged in measures.items() if whole}


def _surely_slower(measures: Mapping[str, Judged]) -> set[str]:
    """Holm's correction, weighted: whatever is rejected leaves its share of ALPHA to the others."""
    left = {key: judged.weight for key, judged in measures.items() if judged.weight > 0}
    odds = {key: measures[key].estimate.slower() / weight for key, weight in left.items()}
    found: set[str] = set()
    for key in sorted(odds, key=lambda k: odds[k]):
        if odds[key] > ALPHA / sum(left.values()):
            break
        found.add(key)
        del left[key]
        if not left:
            break
    return found


def _outcome(judged: Judged, surely: bool, level: float) -> Outcome:
    found, threshold = judged.estimate, judged.threshold
    enough = min(found.runs) >= FEWEST_RUNS and found.error is not None
    detectable = _detectable(judged, level) if enough else None
    if enough and surely and found.change >= threshold:
        return Outcome(FAIL, detectable, None)
    if enough and found.upper(BETA) < threshold:
        return Outcome(PASS, detectable, None)
    return Outcome(INCONCLUSIVE, detectable, _runs_needed(judged, level) if enough else USUAL_RUNS)


def kept(seen: Array, most: float, budgets: int) -> tuple[str, int | None]:
    """The verdict on one of ``budgets`` budgets, and the runs that would decide it; ``seen`` is each run's percentile.

    Surely above ``most`` is FAIL (what the stages leave of FALSE_ALARMS is the budgets'), surely not above it is PASS.
    On logarithms, as all else: what runs vary by is a share of a time, and one 60 times its limit is surely above it.
    """
    if len(seen) < FEWEST_RUNS:
        return INCONCLUSIVE, USUAL_RUNS
    logs = np.log(np.maximum(seen, LEAST_MS)) - math.log(most)
    level, df, spread = (FALSE_ALARMS - ALPHA) / budgets, len(seen) - 1, float(logs.std(ddof=1))
    over = float(logs.mean())
    error = spread / math.sqrt(len(seen))
    if over > quantile(level, df) * error:
        return FAIL, None
    if over <= -quantile(BETA, df) * error:
        return PASS, None
    runs = np.arange(len(seen) + 1, MOST_RUNS + 1)
    sure = quantile(level if over > 0 else BETA, runs - 1) + quantile(1 - POWER, runs - 1)
    enough = sure * spread * understated(df, LUCK) / np.sqrt(runs) <= abs(over)
    return INCONCLUSIVE, int(runs[enough][0]) if enough.any() else None


def _detectable(judged: Judged, level: float) -> float:
    """The slowdown that is FAIL in all but BETA of such comparisons."""
    found = judged.estimate
    assert found.error is not None
    limit = float(quantile(level, found.df))
    # With few runs the next comparison's own error may be quite another: t of what is there spreads by far more than 1.
    sure = (limit - float(ndtri(BETA)) * math.sqrt(1 + limit**2 / (2 * found.df))) * found.error
    return min(max(sure, judged.threshold + float(quantile(BETA, found.df)) * found.error), MOST_LOG)


def _runs_needed(judged: Judged, level: float) -> int | None:
    """The least number of runs a side that would tell none from twice the effect of interest; None beyond MOST_RUNS."""
    found, threshold = judged.estimate, judged.threshold
    assert found.error is not None
    runs = np.arange(max(FEWEST_RUNS, min(found.runs) + 1), MOST_RUNS + 1)
    df = 2 * runs - 2 - min(sum(found.runs) - 2 - found.df, 1)  # less one for a trend
    twice = math.log1p(2 * math.expm1(threshold))
    one_run = found.error / math.sqrt(sum(1 / n for n in found.runs)) * understated(found.df, LUCK)
    error = one_run * np.sqrt(2 / runs)
    spare = quantile(1 - POWER, df) * error
    none, slow = quantile(BETA, df) * error + spare <= threshold, quantile(level, df) * error + spare <= twice
    enough = none & slow
    return int(runs[enough][0]) if enough.any() else None
