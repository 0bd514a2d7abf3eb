"""An engine and its device on paper: a host whose time passes when it is told to, and steps launched on a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagetrace import device_events
from stagetrace.device_events import DeviceEvents, Lease, Placed
from stagetrace.guard import Guard
from tests.engine.gpupath.plugin.gpu_default_path.device import Device, StrictEvent

US, MS, S = 1_000, 1_000_000, 1_000_000_000
START = 5_000 * S
#: Kinds of spans, as good as any.
FORWARD, HEAD, SAMPLE = 1, 2, 3


class Host:
    """Its clock stands still unless it works or waits."""

    def __init__(self) -> None:
        self.t = START

    def now(self) -> int:
        return self.t

    def work(self, ns: int) -> None:
        self.t += ns

    def sleep(self, seconds: float) -> None:
        self.t += max(round(seconds * 1e9), 1)


@dataclass
class Launched:
    """A step that is on its way: its lease, when each of its events really is reached, and its result."""

    lease: Lease | None
    truth: list[int]
    result: StrictEvent


class Engine:
    """Launches steps of five events each on ``device``, and waits for their results as an engine does."""

    def __init__(self, failing: Iterable[str] = (), sets: int = device_events.SETS) -> None:
        self.host = Host()
        self.device = Device(self.host.now, self.host.sleep, failing)
        self.event: type[StrictEvent] = type("Event", (StrictEvent,), {"device": self.device})
        self.told: list[tuple[str, str]] = []
        self.guard = Guard("torch.cuda.Event", lambda name, state: self.told.append((name, state)))
        self.events = DeviceEvents(lambda: self.event(enable_timing=True), self.device.is_capturing, self.guard, sets)
        self.number = 0

    def launch(self, host_ns: int = 50 * US) -> Launched:
        """Launch a step; between two events the host works ``host_ns``."""
        self.number += 1
        lease = self.events.lend(self.number)
        if lease is not None:
            points = []
            for _ in range(5):
                points.append(self.events.point(lease))
                self.host.work(host_ns)
            for kind, begin, end in ((FORWARD, 0, 1), (HEAD, 2, 3), (SAMPLE, 3, 4)):
                lease.spans.append(device_events.Span(kind, points[begin], points[end], 0))
            if lease.broken:
                self.events.give_back(lease)
            else:
                self.events.send(lease)
        result = self.event(blocking=True)
        result.record()
        truth = [getattr(event, "done", 0) for event in lease.events[:5]] if lease else []
        return Launched(lease, truth, result)

    def wait(self, step: Launched) -> list[tuple[Lease, list[Placed] | None]]:
        """Wait for the step's result, and read its events."""
        waits = step.lease is not None and self.events.running(step.lease)
        step.result.synchronize()
        return self.events.read(step.lease, waits) if step.lease is not None else []

    def run(self, steps: int, host_ns: int = 50 * US, between_ns: int = 200 * US, depth: int = 1) -> Iterator[Timed]:
        """Launch and wait for ``steps``, ``depth`` of them at a time, and yield each."""
        flight: deque[Launched] = deque()
        for _ in range(steps):
            flight.append(self.launch(host_ns))
            if len(flight) >= depth:
                yield self.timed(flight.popleft())
            self.host.work(between_ns)
        while flight:
            yield self.timed(flight.popleft())

    def timed(self, step: Launched) -> Timed:
        ((_, placed),) = self.wait(step)
        return Timed(step, placed, self.host.t)


@dataclass
class Timed:
    """A step that was read: what its events said (None: nothing), and when that was."""

    step: Launched
    placed: list[Placed] | None
    seen: int

    def late_by(self) -> list[int]:
        """By how many ns each edge was placed after where it really was."""
        assert self.placed is not None
        edges = [edge for span in self.placed for edge in (span.begin_ns, span.end_ns)]
        truth = [self.step.truth[i] for i in (0, 1, 2, 3, 3, 4)]
        return [edge - true for edge, true in zip(edges, truth, strict=True)]
