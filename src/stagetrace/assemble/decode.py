"""Stage 11 by what the engine did meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from ..model import StepRecord
from .book import Span
from .case import Case
from .periods import LABELS

#: The parts of `split_ms`; they add up to the stage.
PARTS = (*LABELS, "stalled", "preempted", "other")


def split(case: Case, window: Span) -> tuple[dict[str, float], float]:
    """The parts of ``window``, and the engine's own work under cover of a forward, which is no part; all in ms.

    It goes by the periods of the steps after the first token's. Where the sequence was in the step, each label has
    its time. The whole period is ``preempted`` from an eviction to the end of the recomputation, and ``stalled``
    where the step passed it over.
    """
    total = dict.fromkeys(PARTS, 0)
    overlapped = 0
    turns = {turn.step.step: turn for turn in case.turns}
    for step in _steps(case, window):
        parts = case.periods.split(step, window)
        overlapped += parts.get("overlapped", 0)
        turn = turns.get(step.step)
        whole = None
        if turn is None:
            whole = "preempted" if _evicted(case, step) else "stalled"
        elif turn.redo:
            whole = "preempted"
        for label in PARTS:
            total[whole or label] += parts.get(label, 0)
    total["other"] += window[1] - window[0] - sum(total.values())
    return {label: spent / 1e6 for label, spent in total.items()}, overlapped / 1e6


def _steps(case: Case, window: Span) -> Iterator[StepRecord]:
    """The steps whose periods may reach into ``window``."""
    if not case.turns:
        return
    start = (case.first or case.turns[0]).step
    for number in range(start.step + 1, case.book.last_step.get(start.engine, 0) + 1):
        step = case.book.steps.get(number)
        if step is None:
            continue
        bounds = case.periods.bounds(step)
        if bounds is not None and bounds[0] >= window[1]:
            return
        yield step


def _evicted(case: Case, step: StepRecord) -> bool:
    """Whether an eviction came after the last step that had the sequence in it."""
    evictions = [t for t in case.sequence.preempted if t <= step.schedule_ns[1]] if case.sequence else []
    last = next((turn.step for turn in reversed(case.turns) if turn.step.step < step.step), None)
    return bool(evictions) and (last is None or evictions[-1] > last.schedule_ns[1])
