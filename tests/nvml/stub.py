"""Cards on paper: a script for the stub of the driver's library, which says the same as the stub will."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCE = Path(__file__).parent / "stub.c"
NAME = "NVIDIA H100 80GB HBM3"
Points = Sequence[tuple[float, float]]


@cache
def library() -> Path:
    """The folder of ``libnvidia-ml.so.1``, for ``LD_LIBRARY_PATH``; made once."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.fail("these tests compile a stub of the GPU driver's library: install gcc", pytrace=False)
    folder = Path(mkdtemp(prefix="stagetrace-nvml-"))
    made = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(made), str(SOURCE), "-lm"],
        check=True,
    )
    return folder


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-1111-2222-333344445555"


@dataclass
class Card:
    """A card: counters as curves over the seconds since the script began, and what is wrong with it."""

    number: int = 0
    name: str = NAME
    power: Points = ((0, 100.0),)
    util: Points = ((0, 50.0),)
    curves: dict[str, Points] = field(default_factory=dict)
    #: Further lines, as they are.
    more: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return uuid(self.number)

    def lines(self) -> list[str]:
        usual: dict[str, Points] = {
            "power": self.power, "util": self.util, "membw": ((0, 30.0),), "memused": ((0, 60e9),),
            "memtotal": ((0, 80e9),), "sm": ((0, 1980.0),), "mem": ((0, 2619.0),), "temp": ((0, 55.0),),
            "throttle": ((0, 0.0),),
        }  # fmt: skip
        points = [f"at {name} {t} {v}" for name, curve in {**usual, **self.curves}.items() for t, v in curve]
        return [f"gpu {self.id} 00000000:{self.number + 0x3B:02X}:00.0 {self.name}", *points, *self.more]


@dataclass
class Script:
    """A machine's cards; written once, from then on its curves run."""

    cards: list[Card]
    #: What the library's start returns.
    init: int = 0
    started_ns: int = 0

    def write(self, folder: Path) -> dict[str, str]:
        """Let the curves begin; returns the environment that makes the real bindings load these cards."""
        self.started_ns = self.started_ns or time.monotonic_ns()
        lines = [f"t0 {self.started_ns}", f"init {self.init}", *(line for card in self.cards for line in card.lines())]
        path = folder / "cards.txt"
        path.write_text("\n".join(lines) + "\n")
        before = os.environ.get("LD_LIBRARY_PATH")
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library()), before])),
            "NVML_STUB": str(path),
            "NVML_STUB_CALLS": str(folder / "calls.txt"),
            "STAGETRACE_GPU_UUIDS": ",".join(card.id for card in self.cards),
        }

    def calls(self, folder: Path) -> dict[str, int]:
        """What was called, and how often, once the library was closed."""
        rows = (line.split() for line in (folder / "calls.txt").read_text().splitlines())
        return {name: int(times) for name, times in rows}

    def seconds(self, monotonic_ns: float) -> float:
        """A moment on the script's own clock."""
        return (monotonic_ns - self.started_ns) / 1e9


def at(points: Points, s: float) -> float:
    """The value of a curve at ``s``."""
    index = bisect_right([t for t, _ in points], s)
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (a, low), (b, high) = points[index - 1], points[index]
    return low + (high - low) * (s - a) / (b - a)


def integral(points: Points, a: float, b: float) -> float:
    """Exactly, of the straight lines between the points."""
    cuts = [a, *(t for t, _ in points if a < t < b), b]
    return sum((right - left) * (at(points, left) + at(points, right)) / 2 for left, right in pairwise(cuts))


def extremes(points: Points, a: float, b: float) -> tuple[float, float]:
    """The smallest and the largest value from ``a`` to ``b``."""
    values = [at(points, a), at(points, b), *(v for t, v in points if a < t < b)]
    return min(values), max(values)
