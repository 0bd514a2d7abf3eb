"""Length mixes: ``400``, ``100-500``, or several with weights, ``200:0.7,2000:0.3``."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from ..faults import Fault

MOST = 10_000_000
_PART = re.compile(r"\s*([0-9]{1,8})(?:\s*-\s*([0-9]{1,8}))?\s*(?::\s*([0-9]*\.?[0-9]+))?\s*")


@dataclass(frozen=True)
class Mix:
    """Ranges of lengths (both ends included) and their weights."""

    ranges: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        """A length; always two numbers of ``rng``, so that one mix does not shift what another draws."""
        position, where = rng.random() * sum(self.weights), rng.random()
        chosen = self.ranges[-1]
        for candidate, weight in zip(self.ranges, self.weights, strict=True):
            position -= weight
            if position < 0:
                chosen = candidate
                break
        low, high = chosen
        return low + int(where * (high - low + 1))

    @property
    def shortest(self) -> int:
        """The smallest length it can draw."""
        return min(low for (low, _), weight in zip(self.ranges, self.weights, strict=True) if weight)

    @property
    def longest(self) -> int:
        """The greatest length it can draw."""
        return max(high for (_, high), weight in zip(self.ranges, self.weights, strict=True) if weight)


def parse_mix(option: str, text: str) -> Mix:
    """Read a mix; Fault, naming ``option``, if it is none."""
    ranges, weights = [], []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise Fault(f"{option} {text}: not a mix of lengths; write 400, 100-500 or 200:0.7,2000:0.3")
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high <= MOST:
            raise Fault(f"{option} {text}: {part.strip()} is not a length; they go from 1 to {MOST:,}, smaller first")
        ranges.append((low, high))
        weights.append(float(match[3] or 1))
    if not sum(weights):
        raise Fault(f"{option} {text}: all weights are 0")
    return Mix(tuple(ranges), tuple(weights))
