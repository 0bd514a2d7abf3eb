"""The step a worker works on, and where its work is timed: by the host, or by events of the device.

Events are read when the engine has waited for the step's result itself, and nothing here ever waits.
"""

from __future__ import annotations

from typing import Any

from stagetrace.plugin import DeviceEvents, Guard, Lease, Placed, Point, Span, marks, now, recorder, report


class Step:
    """The step this worker works on. A worker launches its model from one thread, so one is enough."""

    def __init__(self) -> None:
        self.number: int | None = None
        #: The device goes on working after a call has returned: host times are then those of the launch.
        self.launches = False
        self.lease: Lease | None = None
        self.forward: Point | None = None
        self.head: Point | None = None
        self.embedding: Point | None = None
        self._events: DeviceEvents | None = None
        self._looked = False

    def begin(self, number: int | None, device: Any) -> None:
        """A step reaches the worker; one without a number is not timed."""
        if self.lease is not None and self._events is not None:  # of a step that never came to its end
            self._events.give_back(self.lease)
        self.lease = self.forward = self.head = self.embedding = None
        self.number = number
        if number is None:
            return
        self.launches = getattr(device, "type", "cpu") != "cpu"
        events = self._events if self._looked else self._look(device)
        if events is not None:
            before = events.exhausted
            self.lease = events.lend(number)
            count = events.exhausted
            if count != before and count & (count - 1) == 0:  # at 1, 2, 4, 8, ...
                recorder.text(marks.ENGINE, 0, f"device_events_exhausted={count}")

    def point(self) -> Point:
        """Here; of a step that is not timed, nowhere."""
        lease = self.lease
        return self._events.point(lease) if lease is not None and self._events is not None else Point(now())

    def span(self, kind: int, begin: Point, end: Point, number: int = 0) -> None:
        """What lies between two points: written down, or kept until its events can be read."""
        if self.lease is not None:
            self.lease.spans.append(Span(kind, begin, end, number))
        elif self.number is not None:
            self._by_host(self.number, Span(kind, begin, end, number))

    def call(self, kind: int, entered: int) -> None:
        """A call of the engine's ends."""
        if self.number is not None:
            recorder.mark(kind, self.number, entered, now(), marks.LAUNCHED if self.launches else 0)

    def over(self, result: Any) -> None:
        """Nothing more is launched for it; ``result`` is what the engine gets, maybe before it is there."""
        lease, self.lease, self.number = self.lease, None, None
        if lease is None or self._events is None:
            return
        if lease.broken or not lease.spans:
            self._unread(lease)
            self._events.give_back(lease)
            return
        self._events.send(lease)
        if hasattr(result, "get_output"):  # the engine is going to wait for it there
            result._stagetrace_lease = lease
        elif result is not None:  # it has waited
            self.read(lease, waited=False)

    def running(self, lease: Lease) -> bool:
        """Whether the device has not come to the end of it."""
        return self._events is not None and self._events.running(lease)

    def read(self, lease: Lease, waited: bool) -> None:
        """Write down what the device's events say of ``lease``, and of any before it."""
        for each, placed in self._events.read(lease, waited) if self._events is not None else ():
            if placed is None:
                self._unread(each)
            for span in placed or ():
                _by_device(each.step, span)

    def release(self) -> None:
        """Let go of the events; they are looked for again when there is another step to time."""
        self.number = self.lease = self._events = None
        self._looked = False

    def _unread(self, lease: Lease) -> None:
        for span in lease.spans:
            self._by_host(lease.step, span)

    def _by_host(self, step: int, span: Span) -> None:
        if not self.launches:
            recorder.mark(span.kind, step, span.begin.host_ns, span.end.host_ns, 0, span.number)

    def _look(self, device: Any) -> DeviceEvents | None:
        """Find out whether this process has events that can be used."""
        self._looked = True
        why = Guard("torch.cuda.Event", report)
        try:
            usable = all(hasattr(_event(), name) for name in ("record", "query", "elapsed_time"))
        except Exception as error:  # PyTorch without CUDA has the class, and raises
            if getattr(device, "type", "cpu") == "cuda":
                why.failed(error)
            return None
        self._events = DeviceEvents(_event, _capturing, why) if usable else None
        return self._events


# Both are looked up in PyTorch at each use: a CPU worker puts others in their place while it is being built.


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


def _by_device(step: int, span: Placed) -> None:
    recorder.mark(span.kind, step, span.begin_ns, span.end_ns, marks.ON_DEVICE, span.number)


step = Step()


def output_entered(output: Any) -> tuple[Lease, bool] | None:
    """The engine is about to wait for a result."""
    lease = getattr(output, "_stagetrace_lease", None)
    return None if lease is None else (lease, step.running(lease))


def output_left(state: tuple[Lease, bool] | None, output: Any, _result: Any) -> None:
    """It is there, and with it all that was launched before it."""
    if state is not None:
        output._stagetrace_lease = None
        step.read(*state)
