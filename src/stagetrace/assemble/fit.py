"""What the device's clock says, held against the host's: the two agree to some tens of microseconds, no better."""

from __future__ import annotations

from typing import NamedTuple

from ..model import StepRecord
from .book import Span


class Fitted(NamedTuple):
    """A span in its place, and by how many ns its ends had to be moved for that."""

    span: Span
    moved: int = 0


def fitted(step: StepRecord, span: Span, after: int = 0) -> Fitted:
    """``span`` of ``step``, where it can have been: since ``after`` and the worker's call, until the step's update.

    What the host's clock has timed is left as it is.
    """
    if not step.device_timed:
        return Fitted(span)
    low = max(after, step.execute_ns[0] if step.execute_ns else 0)
    high = max(low, step.update_ns[0] if step.update_ns else span[1])
    place = inside(span, (low, high))
    return Fitted(place, abs(place[0] - span[0]) + abs(place[1] - span[1]))


def inside(span: Span, outer: Span) -> Span:
    """``span``, as far as it lies in ``outer``; else the edge it is next to."""
    low, high = outer
    return min(max(span[0], low), high), min(max(span[1], low), high)
