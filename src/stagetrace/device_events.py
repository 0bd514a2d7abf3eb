"""Times from the device's own clock: events recorded while a step is launched, read once the engine has waited for it.

Nothing here waits. Whoever uses it brings the library: a function that makes an event, and one that says whether the
calls of this moment are being captured into a graph instead of carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .clock import now
from .guard import Guard

#: Steps whose events may be on their way at once. Engines have two or three in flight; the rest is for stragglers.
SETS = 16
#: What was learnt of the two clocks is used for this long, and then for as long again while it is renewed.
SPAN_NS = 1_000_000_000
#: Bounds as close as this name the same moment, early and late by about as much: the truth is taken to be between.
CLOSE_NS = 200_000


class Event(Protocol):
    """What is used of one."""

    def record(self) -> None:
        """Have the device note the time when it gets here."""

    def query(self) -> bool:
        """Whether it has."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another, both of them past."""


class Point(NamedTuple):
    """A place in the launched work: when the host passed it (monotonic ns), and which event of its step is there."""

    host_ns: int
    place: int = -1


class Span(NamedTuple):
    """What lies between two points: a kind of mark, and the number that goes with it."""

    kind: int
    begin: Point
    end: Point
    number: int


class Placed(NamedTuple):
    """A span as the device timed it, monotonic ns."""

    kind: int
    begin_ns: int
    end_ns: int
    number: int


class Lease:
    """The events of one step, and what they bound; leases are numbered by ``order``."""

    def __init__(self, order: int, step: int, events: list[Event]) -> None:
        self.order = order
        self.step = step
        #: More than are recorded, as a rule: those of earlier steps are used again.
        self.events = events
        self.points: list[Point] = []
        self.spans: list[Span] = []
        #: An event could not be recorded: then none of them is read.
        self.broken = False

    @property
    def last(self) -> Event:
        """Behind all others."""
        return self.events[len(self.points) - 1]


class DeviceClock:
    """Turns a device's times into monotonic ns, from bounds that every step gives for nothing.

    An event is past no earlier than the host has asked for it, and no later than the host has seen that it is. The
    difference of the clocks lies between the two; it is close to the second where the engine was waiting for just
    that, and else, since then the device was waiting for the host, close to the first. Bounds are forgotten after two
    spans, so that the clocks may drift, and all of them after a rest.
    """

    def __init__(self) -> None:
        self._base: Event | None = None
        self._base_ns = 0
        self._based = 0
        self._low: list[int] = []
        self._high: list[int] = []
        self._ended = 0

    def place(self, asked_ns: list[int], events: list[Event], seen_ns: int, waited: bool) -> list[int]:
        """When each event was reached, monotonic ns, in the order they were recorded in.

        ``asked_ns``: when the host recorded each; ``seen_ns``: when it saw that all of them are past; ``waited``: that
        it did so as soon as it could. No event lies before the one or after the other. Keeps one of the events.
        """
        afresh = self._base is None or asked_ns[0] - self._based > 2 * SPAN_NS
        base, base_ns = (events[0], 0) if afresh or self._base is None else (self._base, self._base_ns)
        times = [base_ns + round(base.elapsed_time(event) * 1e6) for event in events]
        low = max(asked - time for asked, time in zip(asked_ns, times, strict=True))
        high = seen_ns - times[-1]
        if afresh:
            self._low, self._high, self._ended = [], [], 0
        # Times from far away are coarse: they come in single precision.
        if afresh or asked_ns[0] - self._based > SPAN_NS:
            self._base, self._base_ns, self._based = events[-1], times[-1], asked_ns[0]
            self._low, self._high = [*self._low[-1:], low], [*self._high[-1:], _NONE]
        self._low[-1] = max(self._low[-1], low)
        if waited:
            self._high[-1] = min(self._high[-1], high)
        # What is launched later runs later: no step begins before the end of the one before.
        offset = min(max(self._estimate(), low, self._ended - times[0]), high)
        self._ended = times[-1] + offset
        return [time + offset for time in times]

    def keeps(self, event: Event) -> bool:
        """Whether ``event`` is the one that others are measured from."""
        return event is self._base

    def _estimate(self) -> int:
        """Host time less device time."""
        low, high = max(self._low), min(self._high)
        if high == _NONE:
            return low
        return (low + high) // 2 if high - low < CLOSE_NS else high


_NONE = 1 << 62


class DeviceEvents:
    """A worker's events: lent to a step, read with its result, used again. Where one fails, the step has no such times.

    One thread lends and one reads; they may be two. ``guard`` counts what the device's library raises, and ends it.
    """

    def __init__(
        self, make: Callable[[], Event], capturing: Callable[[], bool], guard: Guard, sets: int = SETS
    ) -> None:
        self.guard = guard
        #: Steps that went without, since all events were on their way.
        self.exhausted = 0
        self._make = make
        self._capturing = capturing
        self._free: deque[list[Event]] = deque([] for _ in range(sets))
        self._sent: deque[Lease] = deque()
        self._order = 0
        self._clock = DeviceClock()

    def lend(self, step: int) -> Lease | None:
        """Events for ``step``; None where it is to do without."""
        if self.guard.off:
            return None
        try:
            if self._capturing():
                return None
        except Exception as error:
            self.guard.failed(error)
            return None
        if not self._free:
            self.exhausted += 1
            return None
        self._order += 1
        return Lease(self._order, step, self._free.popleft())

    def point(self, lease: Lease) -> Point:
        """Here: recorded behind whatever has been launched so far."""
        point = Point(now(), len(lease.points))
        try:
            if lease.broken:
                return point
            if point.place == len(lease.events):
                lease.events.append(self._make())
            lease.events[point.place].record()
        except Exception as error:
            lease.broken = True
            self.guard.failed(error)
        lease.points.append(point)
        return point

    def give_back(self, lease: Lease) -> None:
        """It has not been used after all, or has served."""
        for index, event in enumerate(lease.events):
            if self._clock.keeps(event):
                del lease.events[index]
                break
        self._free.append(lease.events)

    def send(self, lease: Lease) -> None:
        """All of it is recorded, and the step's result is on its way."""
        self._sent.append(lease)

    def running(self, lease: Lease) -> bool:
        """Whether the device is still at it, and the engine about to wait for it."""
        try:
            return not self.guard.off and not lease.last.query()
        except Exception as error:
            self.guard.failed(error)
            return False

    def read(self, lease: Lease, waited: bool) -> list[tuple[Lease, list[Placed] | None]]:
        """``lease`` and any sent before it that was not read, with their times; None: the device has none.

        To be called when the engine has waited for something that was launched after ``lease`` was.
        """
        seen = now()
        found = []
        while self._sent and self._sent[0].order <= lease.order:
            first = self._sent.popleft()
            found.append((first, self._times(first, seen, waited and first is lease)))
            self.give_back(first)
        return found

    def _times(self, lease: Lease, seen: int, waited: bool) -> list[Placed] | None:
        if lease.broken or self.guard.off:
            return None
        try:
            if not lease.last.query():
                return None
            asked = [point.host_ns for point in lease.points]
            at = self._clock.place(asked, lease.events[: len(asked)], seen, waited)
        except Exception as error:
            self.guard.failed(error)
            return None
        return [Placed(span.kind, at[span.begin.place], at[span.end.place], span.number) for span in lease.spans]
