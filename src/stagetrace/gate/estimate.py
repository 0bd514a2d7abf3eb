"""How much slower one side's runs are than the other's, and how sure that is. Arrays in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, stdtr, stdtrit

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]
#: Of each run's requests, so many at either end count as no further out than the next one in.
CLIPPED = 0.1
RESAMPLES = 500
#: Runs whose sides lie this far apart in time are not interleaved: a trend would be the side itself.
INTERLEAVED = 0.3
#: Shorter than any clock here can tell (ms).
SHORTEST_MS = 1e-3


@dataclass(frozen=True)
class Estimate:
    """A change as the logarithm of current over baseline; ``error`` is its standard error with ``df`` degrees.

    ``noise`` is the standard deviation of runs, which for small ones is their coefficient of variation. Both are None
    where there are too few runs to know.
    """

    change: float
    error: float | None
    df: int
    noise: float | None
    runs: tuple[int, int]

    def slower(self) -> float:
        """The probability of a change this large where there is none (one-sided p)."""
        if self.error is None:
            return 1.0
        return float(stdtr(self.df, -self.change / self.error)) if self.error else float(self.change <= 0)

    def upper(self, level: float) -> float:
        """What the change surely stays below, but for a share ``level`` of cases."""
        return float("inf") if self.error is None else self.change + float(quantile(level, self.df)) * self.error


def estimate(ms: Array, current: Flags, order: Array | None) -> Estimate:
    """Compare the runs that are ``current`` with the others.

    ``ms`` is runs × requests: the same prompts in the same columns. ``order`` is each run's place in time where the
    sides were interleaved: what drifts then counts as a trend, not as noise.
    """
    logs = np.log(np.maximum(ms, SHORTEST_MS))
    # Paired by prompt: what is left of each is how it differs from the same prompt in other runs.
    paired = logs - np.median(logs, axis=0)
    low, high = np.quantile(paired, [CLIPPED, 1 - CLIPPED], axis=1, keepdims=True)
    paired = np.clip(paired, low, high)
    means = paired.mean(axis=1)
    design = np.stack([np.ones(len(ms)), current, *([] if order is None else [order - order.mean()])], axis=1)
    solve = np.linalg.pinv(design)
    weights, df = solve[1], len(ms) - design.shape[1]
    sides = int((~current).sum()), int(current.sum())
    change = float(weights @ means)
    if df < 1:
        return Estimate(change, None, df, None, sides)
    residual = means - design @ (solve @ means)
    noise = float(np.sqrt(residual @ residual / df))
    error = _resampled(residual, paired - means[:, None], weights, df)
    own, own_df = _by_side(residual, current, weights, len(ms) - 2 - df)
    return Estimate(change, max(error, own), min(df, own_df or df), noise, sides)


def _by_side(residual: Array, current: Flags, weights: Array, trends: int) -> tuple[float, int]:
    """The standard error, and its degrees, where each side varies in its own way (Welch); 0 for sides of equal size.

    Many quiet runs on one side say nothing of how far off a few noisy ones on the other can be.
    """
    flags = ~current, current
    counts = [int(side.sum()) for side in flags]
    if counts[0] == counts[1] or min(counts) < 2:
        return 0.0, 0
    variances = [
        float(weights[side] @ weights[side]) * float(residual[side] @ residual[side]) / (count - 1)
        for side, count in zip(flags, counts, strict=True)
    ]
    spread = sum(variance**2 / (count - 1) for variance, count in zip(variances, counts, strict=True))
    return sum(variances) ** 0.5, max(1, int(sum(variances) ** 2 / spread) - trends) if spread else 0


def _resampled(residual: Array, within: Array, weights: Array, df: int) -> float:
    """The standard error: runs are drawn anew, and in each of them requests.

    A run's mean already contains the noise of its requests; that part is taken out before they are drawn, or it would
    count twice. It is what remains where runs differ by less than their requests say.
    """
    runs, requests = within.shape
    total = float(residual @ residual)
    of_requests = float((within**2).sum()) / runs / requests / max(1, requests - 1)
    between = max(0.0, total / df - of_requests)
    kept = np.sqrt(between / (total / runs)) if total else 0.0
    drawn, counts = _draws(runs, requests)
    # Not by BLAS, whose threads wait for each other by turning in circles: on a busy machine for minutes.
    shifts = np.einsum("sk,rk->sr", counts, within) / requests
    again = kept * residual[drawn] + np.take_along_axis(shifts, drawn, axis=1)
    return float((again @ weights).std())


@lru_cache(maxsize=32)
def _draws(runs: int, requests: int) -> tuple[Indices, Array]:
    """Which runs, and how often which requests, are in each sample. The same input is to have the same verdict."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(runs, size=(RESAMPLES, runs))
    return drawn, rng.multinomial(requests, np.full(requests, 1 / requests), size=RESAMPLES).astype(np.float64)


def interleaved(current: Flags, started: Array) -> Array | None:
    """Each run's place in time, if both sides were measured over the same time; None if one came after the other."""
    order = np.argsort(np.argsort(started)).astype(np.float64)
    if current.all() or not current.any() or len(current) < 6:
        return None
    return order if abs(np.corrcoef(order, current)[0, 1]) <= INTERLEAVED else None


def quantile(level: float, df: Any) -> Any:
    """Student's t that is exceeded in a share ``level`` of cases; ``df`` may be an array."""
    return -stdtrit(df, level)


def understated(df: int, level: float) -> float:
    """The true noise is less than so many times the one seen, but for a share ``level`` of cases."""
    return float(np.sqrt(df / chdtri(df, 1 - level)))
