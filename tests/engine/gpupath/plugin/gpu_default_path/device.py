"""A device on paper, for tests: work takes time after its launch, and what a GPU forbids raises; see ../../README.md.

It has one stream. Whatever is launched before an event that is timed takes the device ``WORK_NS``, before any other (a
result's copy, say) ``COPY_NS``. It begins ``LATENCY_NS`` after its launch, and not before what was launched earlier is
done. The device's clock counts from an epoch of its own, and drifts.
"""

from __future__ import annotations

import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

WORK_NS = 500_000
COPY_NS = 20_000
LATENCY_NS = 100_000
EPOCH_NS = 123_456_789_000
DRIFT = 40e-6


class Device:
    """What its events share. ``counts`` are calls by what was called and by whose code (a top-level package)."""

    def __init__(
        self, clock: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep,
        failing: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.clock, self.sleep = clock, sleep
        #: Methods of events with timing that raise; ``make`` stands for the constructor.
        self.failing = set(failing)
        self.counts: Counter[str] = Counter()
        self.capturing = False
        #: How many events are recorded, and the last of them that the host has waited for.
        self.recorded = self.waited_for = 0
        self.busy_until = 0

    def called(self, what: str, timing: bool = True) -> None:
        """Count a call, and fail where that was asked for."""
        caller = sys._getframe(2).f_globals.get("__name__", "?").partition(".")[0]
        self.counts[f"{what} {caller}"] += 1
        if timing and what in self.failing:
            raise RuntimeError(f"CUDA error: {what} was told to fail")

    def synchronize(self, *_: Any) -> None:
        """Be ``torch.cuda.synchronize``."""
        self.called("synchronize the device", timing=False)
        self.wait_until(self.busy_until, self.recorded)

    def wait_until(self, done: int, position: int) -> None:
        """Block the host."""
        while (left := done - self.clock()) > 0:
            self.sleep(left / 1e9)
        self.waited_for = max(self.waited_for, position)

    def is_capturing(self) -> bool:
        """Be ``torch.cuda.is_current_stream_capturing``."""
        self.called("is_current_stream_capturing")
        return self.capturing


class StrictEvent:
    """An event of ``device``. Its time can be had only once the host has waited for it or for a later one."""

    device = Device()

    def __init__(self, enable_timing: bool = False, blocking: bool = False, *_: Any, **__: Any) -> None:
        self.timing = enable_timing
        self.position = self.done = 0
        self.device.called("make", enable_timing)

    def record(self, *_: Any) -> None:
        self.device.called("record", self.timing)
        if self.device.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        start = max(self.device.clock() + LATENCY_NS, self.device.busy_until)
        self.done = self.device.busy_until = start + (WORK_NS if self.timing else COPY_NS)
        self.device.recorded += 1
        self.position = self.device.recorded

    def query(self) -> bool:
        self.device.called("query", self.timing)
        return self.device.clock() >= self.done

    def wait(self, *_: Any) -> None:
        self.device.called("wait", self.timing)

    def synchronize(self) -> None:
        self.device.called("synchronize", self.timing)
        self.device.wait_until(self.done, self.position)

    def elapsed_time(self, end_event: Any) -> float:
        self.device.called("elapsed_time", self.timing)
        if not (self.timing and end_event.timing):
            raise RuntimeError("CUDA error: events without timing have no times")
        if not (self.position and end_event.position):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self.position, end_event.position) > self.device.waited_for:
            self.device.counts["elapsed_time too early"] += 1
            raise RuntimeError("CUDA error: device not ready")
        return single((end_event.device_ns - self.device_ns) / 1e6)

    @property
    def device_ns(self) -> float:
        """What the device's clock says."""
        return EPOCH_NS + self.done * (1 + DRIFT)


def single(value: float) -> float:
    """``value`` in single precision, as CUDA returns it."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
