"""Whose energy it was: a step's is shared by its tokens, and what no step used belongs to nobody.

See docs/decisions/0012-whose-joules.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..model import StepRecord

Span = tuple[int, int]


def computing(step: StepRecord, before: StepRecord | None) -> Span | None:
    """When the device worked on ``step``: from the worker's taking it up to the engine's having its result.

    Not before the result of the step ``before`` was there. None while it is not over, and where nothing was computed.
    """
    if step.update_ns is None or not step.batch_size or not step.tokens:
        return None
    start = (step.execute_ns or (step.schedule_ns[1], 0))[0]
    if before is not None and before.update_ns is not None:
        start = max(start, before.update_ns[0])
    return (start, step.update_ns[0]) if start < step.update_ns[0] else None


def intervals(steps: Iterable[StepRecord]) -> Iterator[tuple[StepRecord, Span]]:
    """The steps of any number of engines that computed something, with the time each took."""
    last: dict[int, StepRecord] = {}
    for step in sorted(steps, key=lambda each: (each.engine, each.step)):
        before = last.get(step.engine)
        if span := computing(step, before if before and before.step == step.step - 1 else None):
            yield step, span
        last[step.engine] = step
