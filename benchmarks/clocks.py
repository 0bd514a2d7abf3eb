"""Timing a piece of code by the CPU time of the thread that runs it.

On a shared machine wall time is mostly about the neighbours; the thread's own CPU time is not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

cpu_ns = time.thread_time_ns
T = TypeVar("T")


def per_call(loop: Callable[[int], None], calls: int) -> Callable[[], float]:
    """An arm for :func:`~benchmarks.stats.interleave`: CPU ns per call of what ``loop(calls)`` repeats."""

    def arm() -> float:
        before = cpu_ns()
        loop(calls)
        return (cpu_ns() - before) / calls

    return arm


def shifted(depth: int, function: Callable[[], T]) -> T:
    """Call ``function`` with the stack moved down by ``depth`` frames, interpreter's and machine's.

    Where a stack happens to lie can cost or save a long step 1 %, differently with one wrapper more on it, and it
    stays there for the life of a process. Moved at random from round to round, that becomes noise, which averages out.
    """
    if depth == 0:
        return function()
    return next(shifted(depth - 1, function) for _ in (0,))


def settle_heap() -> None:
    """Leave what is there out of further collections, as the engine does when it has started."""
    gc.collect()
    gc.freeze()
