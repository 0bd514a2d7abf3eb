"""Statistics of interleaved rounds; nothing here touches a clock or the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Standard deviations on either side that hold 95 %.
_95 = 1.96


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie, interpolated; ``values`` must not be empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the middle two."""
    return quantile(values, 0.5)


def interval(values: Sequence[float], share: float = 0.5) -> tuple[float, float]:
    """A 95 % interval of a quantile, from the order of ``values`` alone: no shape of their noise is assumed."""
    ordered = sorted(values)
    last = len(ordered) - 1
    off = _95 * math.sqrt(len(ordered) * share * (1 - share))
    low, high = math.floor(len(ordered) * share - off), math.ceil(len(ordered) * share + off) - 1
    return ordered[min(max(0, low), last)], ordered[min(max(0, high), last)]


@dataclass(frozen=True)
class Spread:
    """The median of rounds, where four fifths of the rounds lie, and how sure the median is."""

    value: float
    p10: float
    p90: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], share: float = 0.5) -> Spread:
        """Summarise one value per round; ``share`` asks for another quantile than the median."""
        ends = quantile(values, 0.1), quantile(values, 0.9)
        return cls(quantile(values, share), *ends, *interval(values, share))

    def minus(self, other: Spread) -> Spread:
        """The difference of two independent medians; its bounds are the widest that both allow."""
        return Spread(
            self.value - other.value, self.p10 - other.p90, self.p90 - other.p10, self.low - other.high,
            self.high - other.low,
        )  # fmt: skip


def interleave(arms: Sequence[Callable[[], float]], rounds: int, tick: Callable[[], None]) -> list[list[float]]:
    """Call every arm once a round, A B then B A, so that a drift of the machine meets all alike; one list per arm."""
    found: list[list[float]] = [[] for _ in arms]
    for number in range(rounds):
        order = range(len(arms)) if number % 2 == 0 else range(len(arms) - 1, -1, -1)
        for index in order:
            found[index].append(arms[index]())
        tick()
    return found


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """One ratio per round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """One difference per round."""
    return [a - b for a, b in zip(left, right, strict=True)]
