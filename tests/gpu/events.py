"""Events as the worker uses them, on PyTorch alone: against a host that waits, eager and captured, and their cost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

from stagetrace.plugin import marks
from stagetrace_vllm import worker_events
from tests.gpu.devices import Gpu, Paper, device, now
from tests.gpu.part import Part

STEPS = 60
WARM_UP = 10
#: One GPU's decode step, of an 8B model in bf16.
STEP_US = 6000.0
KINDS = {marks.FORWARD: "forward", marks.LM_HEAD: "lm_head", marks.SAMPLE: "sample"}
CUDA = SimpleNamespace(type="cuda")
Times = dict[str, tuple[int, int]]


def gpu() -> dict[str, Any]:
    """The card and its driver, as PyTorch names them."""
    try:
        import torch

        if torch.cuda.is_available():
            card = torch.cuda.get_device_properties(0)
            memory = round(card.total_memory / 2**30, 1)
            return {"gpu": card.name, "gpu_memory_gib": memory, "cuda": torch.version.cuda}
    except ImportError:
        pass
    return {"gpu": None, "gpu_memory_gib": None, "cuda": None}


class Worker:
    """Runs steps and records them exactly as the hooks of a vLLM worker do, but for the ring it writes to."""

    def __init__(self, on: Gpu | Paper, forward: Callable[[], None] | None = None) -> None:
        self.on, self.forward = on, forward or on.forward
        self.step = worker_events.Step()
        self.number = 0
        #: By step: what is written of it.
        self.found: dict[int, Times] = {}

    def launch(self) -> tuple[int, Any, int]:
        """Launch a step; returns its number, its result, and when its forward was asked for."""
        step = self.step
        self.number += 1
        step.begin(self.number, CUDA)
        asked = now()
        entered = step.point()
        self.forward()
        step.span(marks.FORWARD, entered, step.point())
        head = step.point()
        self.on.head()
        drawn = step.point()
        step.span(marks.LM_HEAD, head, drawn)
        self.on.sample()
        step.span(marks.SAMPLE, drawn, step.point())
        result = Result(self.on.result())
        step.over(result)
        return self.number, result, asked

    def wait(self, result: Result) -> int:
        """Wait as the engine does, and read; returns when the result was there."""
        lease = result._stagetrace_lease
        running = self.step.running(lease)
        result.copied.synchronize()
        seen = now()
        self.step.read(lease, running)
        return seen


class Result:
    """What the engine waits for."""

    _stagetrace_lease: Any = None

    def __init__(self, copied: Any) -> None:
        self.copied = copied

    def get_output(self) -> None:
        """It has one, so it is waited for."""


@contextmanager
def recording(worker: Worker) -> Iterator[None]:
    """What would go into the ring goes to ``worker.found``."""

    def mark(kind: int, key: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        if kind in KINDS and c == marks.ON_DEVICE:
            worker.found.setdefault(key, {})[KINDS[kind]] = (a, b)

    ring = worker_events.recorder
    worker_events.recorder = type("Ring", (), {"mark": staticmethod(mark), "text": lambda *_: None})()
    try:
        yield
    finally:
        worker_events.recorder = ring


def reference(on: Gpu | Paper, forward: Callable[[], None]) -> dict[str, int]:
    """A step, ns by part, by a host that waits for the device after each."""
    spent = {}
    on.synchronize()
    for name, work in (("forward", forward), ("lm_head", on.head), ("sample", on.sample)):
        begun = now()
        work()
        on.synchronize()
        spent[name] = now() - begun
    return spent


def compared(part: Part, on: Gpu | Paper, forward: Callable[[], None]) -> None:
    """By turns: a step with events, and one where the host waits."""
    worker = Worker(on, forward)
    waited: dict[str, list[int]] = {name: [] for name in KINDS.values()}
    late: list[int] = []
    early: list[int] = []
    with recording(worker):
        for turn in range(WARM_UP + STEPS):
            number, result, asked = worker.launch()
            seen = worker.wait(result)
            by_host = reference(on, forward)
            if turn < WARM_UP:
                worker.found.pop(number, None)
                continue
            times = worker.found.get(number)
            if times is None:
                raise AssertionError("the events of a step could not be read")
            late.append(seen - times["sample"][1])
            early.append(times["forward"][0] - asked)
            for name in waited:
                waited[name].append(by_host[name])
    for name, spent in waited.items():
        ours = median(times[name][1] - times[name][0] for times in worker.found.values()) / 1e3
        theirs = median(spent) / 1e3
        part.figures[f"{name}_us"] = {"events": round(ours, 2), "host_that_waits": round(theirs, 2)}
        # A host that waits also counts its own launching and being woken, each time.
        part.hold(f"{name}: the two apart", abs(ours - theirs), 60.0 + 0.03 * theirs, "µs")
    part.hold("placed before it was asked for", max(0.0, -min(early) / 1e3), 0.0, "µs")
    # It is looked for a little before the events are read, which is what they are held to.
    part.hold("placed after it was seen", max(0.0, -min(late) / 1e3), 20.0, "µs")
    part.hold("from the sampler's end to the engine's hearing of it", median(late) / 1e3, 300.0, "µs")
    part.hold("from asking for a forward to its start", median(early) / 1e3, 300.0, "µs")


def eager(part: Part) -> None:
    """Kernels launched one by one."""
    on = device(part)
    compared(part, on, on.forward)


def graph(part: Part) -> None:
    """The forward captured and replayed; while it is captured, nothing of ours is."""
    on = device(part)
    worker = Worker(on)
    leases: list[Any] = []

    def while_capturing() -> None:
        worker.step.begin(1, CUDA)
        leases.append(worker.step.lease)
        worker.step.span(marks.FORWARD, worker.step.point(), worker.step.point())
        worker.step.over(None)

    with recording(worker):
        replay = on.captured(while_capturing)
    part.hold("leases while a graph is captured", sum(lease is not None for lease in leases), 0, "leases")
    compared(part, on, replay)


def overlapped(part: Part) -> None:
    """As under asynchronous scheduling: a step is launched before the one before it is read."""
    on = device(part)
    worker = Worker(on)
    flight: deque[tuple[int, Any, int]] = deque()
    late: list[int] = []
    with recording(worker):
        for _ in range(WARM_UP + STEPS):
            flight.append(worker.launch())
            if len(flight) == 2:
                number, result, _ = flight.popleft()
                seen = worker.wait(result)
                late.append(seen - worker.found[number]["sample"][1])
        worker.wait(flight.popleft()[1])
    steps = [worker.found[number] for number in sorted(worker.found)][WARM_UP:]
    part.figures["forward_us"] = round(median(t["forward"][1] - t["forward"][0] for t in steps) / 1e3, 2)
    part.figures["gap_us"] = round(median(b["forward"][0] - a["sample"][1] for a, b in pairwise(steps)) / 1e3, 2)
    overlap = max(a["sample"][1] - b["forward"][0] for a, b in pairwise(steps))
    part.hold("steps that overlap, by", max(0.0, overlap / 1e3), 1.0, "µs")
    # It is looked for a little before the events are read, which is what they are held to.
    part.hold("placed after it was seen", max(0.0, -min(late) / 1e3), 20.0, "µs")
    part.hold("from the sampler's end to the engine's hearing of it", median(late[WARM_UP:]) / 1e3, 300.0, "µs")


def no_synchronisation(part: Part) -> None:
    """PyTorch is told to raise at anything that waits, but for the engine's own wait."""
    on = device(part)
    worker = Worker(on)
    with recording(worker):
        for _ in range(20):
            with on.refusing_to_wait():
                _, result, _ = worker.launch()
                lease = result._stagetrace_lease
                running = worker.step.running(lease)
            result.copied.synchronize()
            with on.refusing_to_wait():
                worker.step.read(lease, running)
    part.hold("steps of 20 that could not be read", 20 - len(worker.found), 0, "steps")


def overhead(part: Part) -> None:
    """What the host spends on a step's events, and whether steps get longer: with and without, by turns."""
    on = device(part, 1024, 8, 16)
    with_events, without = Worker(on), Worker(on)
    without.step._looked = True  # as where no events are to be had
    spent: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * WARM_UP + 200):
        recorded = turn % 4 in (0, 3)
        worker = with_events if recorded else without
        with recording(worker):
            on.synchronize()
            begun = time.perf_counter_ns()
            _, result, _ = worker.launch()
            worker.wait(result) if recorded else result.copied.synchronize()
            if turn >= 2 * WARM_UP:
                spent[recorded].append((time.perf_counter_ns() - begun) / 1e3)
    part.figures["step_us"] = {"with": round(median(spent[True]), 2), "without": round(median(spent[False]), 2)}
    added = median(spent[True]) - median(spent[False])
    part.figures["added_us"] = round(added, 2)
    part.hold("added to a step, of a usual one of 6 ms", 100 * added / STEP_US, 1.0, "%")
