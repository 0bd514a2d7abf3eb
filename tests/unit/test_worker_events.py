"""The worker's hooks on both model runners, called as the engine calls them: what they write, and by which clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace import device_events, marks
from stagetrace_vllm import worker_events, worker_hooks
from tests.engine.gpupath.plugin.gpu_default_path.device import WORK_NS
from tests.unit.paper_device import MS, US, Engine

HOST, LAUNCHED, ON_DEVICE = 0, marks.LAUNCHED, marks.ON_DEVICE
TIMED = (marks.FORWARD, marks.LM_HEAD, marks.SAMPLE)
PARALLEL = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1, world_size=1)


class Output:
    """What an engine is given before it is there; it waits for it by asking for it."""

    def __init__(self, waits: Any) -> None:
        self.waits = waits

    def get_output(self) -> str:
        self.waits.synchronize()
        return "tokens"


class Worker:
    """Runs steps of a model runner that does nothing, with the hooks around its calls."""

    def __init__(self, paper: Engine, runner: str, device: str = "cuda") -> None:
        self.paper, self.runner = paper, runner
        self.rank, self.parallel_config, self.device = 0, PARALLEL, SimpleNamespace(type=device)
        self.number = 0

    def work(self) -> None:
        self.paper.host.work(50 * US)

    def execute(self, stamped: bool = True, tokens: int = 5, pools: bool = False) -> int:
        """Worker.execute_model and what it calls; returns the step's number."""
        self.number += 1
        output = SimpleNamespace(total_num_scheduled_tokens=tokens)
        if stamped:
            output._stagetrace_step = self.number
        entered = worker_hooks.execute_entered(self, output)
        self.forward(result="pooled" if pools else None)
        worker_hooks.execute_left(entered, self, "pooled" if pools else None)
        return self.number

    def forward(self, result: Any = None) -> None:
        """What a dummy run calls, too."""
        self.work()
        if self.runner == "V1":
            entered = worker_hooks.v1_forward_entered(None)
            self.embed()
            worker_hooks.v1_forward_left(entered, None, None)
            self.work()
            worker_hooks.v1_execute_left(None, None, result)
        else:
            worker_hooks.v2_forward_entered(None)
            self.embed()
            worker_hooks.v2_execute_left(None, None, None)

    def embed(self) -> None:
        self.work()
        worker_hooks._embedding_entered(None, None)
        worker_hooks._embedding_left(None, None, SimpleNamespace(shape=(7, 2)))
        self.work()

    def sample(self, asynchronous: bool = True) -> Any:
        """Worker.sample_tokens and what it calls; returns its result."""
        entered = worker_hooks.sample_call_entered(self)
        if self.runner == "V1":
            drawn = worker_hooks.sampler_entered(None)
        else:
            worker_hooks.v2_head_entered(None)
            self.work()
            drawn = worker_hooks.v2_sampler_entered(None)
        self.work()
        worker_hooks.sampler_left(drawn, None, None)
        copied = self.paper.event(blocking=True)
        copied.record()
        result: Any = Output(copied) if asynchronous else "tokens"
        if not asynchronous:
            copied.synchronize()
        worker_hooks.sample_call_left(entered, self, result)
        return result

    def wait(self, output: Output) -> None:
        """AsyncOutput.get_output."""
        state = worker_events.output_entered(output)
        worker_events.output_left(state, output, output.get_output())


Mark = tuple[int, int, int, int, int, int]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A device, its events where PyTorch has them, and what is written to the ring."""
    engine = Engine()
    monkeypatch.setattr(device_events, "now", engine.host.now)
    monkeypatch.setattr(worker_events, "now", engine.host.now)
    monkeypatch.setattr(worker_hooks, "now", engine.host.now)
    monkeypatch.setattr(worker_events, "_event", lambda: engine.event(enable_timing=True))
    monkeypatch.setattr(worker_events, "_capturing", engine.device.is_capturing)
    worker_events.step.release()
    yield engine
    worker_events.step.release()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Mark]:
    found: list[Mark] = []

    def mark(kind: int, key: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        found.append((kind, key, a, b, c, d))

    monkeypatch.setattr(worker_events.recorder, "mark", mark)
    monkeypatch.setattr(worker_events.recorder, "text", lambda *text: found.append(text))
    return found


def of(written: list[Mark], step: int) -> dict[int, Mark]:
    """The marks of a step by kind, each there once."""
    mine = [mark for mark in written if mark[1] == step and len(mark) == 6]
    assert len({mark[0] for mark in mine}) == len(mine), mine
    return {mark[0]: mark for mark in mine}


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_step_is_timed_by_the_device(runner: str, paper: Engine, written: list[Mark]) -> None:
    worker = Worker(paper, runner)
    step = worker.execute()
    output = worker.sample()
    assert {kind: mark[4] for kind, mark in of(written, step).items()} == {
        marks.EXECUTE: LAUNCHED, marks.SAMPLE_CALL: LAUNCHED
    }  # fmt: skip
    worker.wait(output)
    found = of(written, step)
    assert found.keys() == {marks.EXECUTE, marks.SAMPLE_CALL, marks.EMBEDDING, *TIMED}
    for kind in (*TIMED, marks.EMBEDDING):
        _, _, start, end, clock, number = found[kind]
        assert clock == ON_DEVICE and number == (7 if kind == marks.EMBEDDING else 0)
        inside = 3 if kind == marks.FORWARD else 1  # the embedding's two events, and its own last one
        assert end - start == pytest.approx(inside * WORK_NS, abs=300)
    assert found[marks.FORWARD][2] <= found[marks.EMBEDDING][2] < found[marks.EMBEDDING][3] <= found[marks.FORWARD][3]
    assert found[marks.FORWARD][3] <= found[marks.LM_HEAD][2] < found[marks.LM_HEAD][3] <= found[marks.SAMPLE][2]
    assert found[marks.SAMPLE][3] > found[marks.SAMPLE_CALL][3], "the device is done later than the call"


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_next_step_is_launched_before_this_one_is_read(runner: str, paper: Engine, written: list[Mark]) -> None:
    worker = Worker(paper, runner)
    outputs = []
    for _ in range(5):
        step = worker.execute()
        outputs.append(worker.sample())
        if len(outputs) == 2:
            worker.wait(outputs.pop(0))
            assert marks.SAMPLE in of(written, step - 1) and marks.SAMPLE not in of(written, step)
    worker.wait(outputs.pop())
    ends = [of(written, step)[marks.SAMPLE][3] for step in range(1, 6)]
    starts = [of(written, step)[marks.FORWARD][2] for step in range(1, 6)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert "elapsed_time too early" not in paper.device.counts


def test_a_result_that_is_there_at_once_is_read_at_once(paper: Engine, written: list[Mark]) -> None:
    worker = Worker(paper, "V1")
    step = worker.execute()
    worker.sample(asynchronous=False)
    assert {of(written, step)[kind][4] for kind in TIMED} == {ON_DEVICE}


def test_what_is_pooled_has_a_forward(paper: Engine, written: list[Mark]) -> None:
    worker = Worker(paper, "V1", device="cpu")
    copied = paper.event()
    step = worker.execute(pools=True)
    # The engine has not waited here: the device is behind, and so the host's times are all there is.
    assert of(written, step)[marks.FORWARD][4] == HOST and marks.SAMPLE not in of(written, step)
    copied.synchronize()


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_dummy_runs_warm_up_and_captures_record_nothing(runner: str, paper: Engine, written: list[Mark]) -> None:
    worker = Worker(paper, runner)
    worker.forward()  # a dummy run, before anything was served
    worker.execute(stamped=False)
    worker.sample(asynchronous=False)
    worker.execute(tokens=0)
    step = worker.execute()
    worker.wait(worker.sample())
    recorded = paper.device.counts["record stagetrace"]
    worker.forward()
    paper.device.capturing = True
    worker.forward()
    worker.execute()
    paper.device.capturing = False
    worker.sample(asynchronous=False)
    assert paper.device.counts["record stagetrace"] == recorded
    assert {mark[1] for mark in written if mark[0] in TIMED} == {step}


def test_a_step_that_never_ends_gives_its_events_back(paper: Engine, written: list[Mark]) -> None:
    """It failed, or recording was paused in the middle of it."""
    worker = Worker(paper, "V2")
    for _ in range(3 * device_events.SETS):
        worker.execute()
    step = worker.execute()
    worker.wait(worker.sample())
    assert of(written, step)[marks.SAMPLE][4] == ON_DEVICE


@pytest.mark.parametrize(("device", "clock"), [("cuda", None), ("cpu", HOST)])
def test_a_step_for_which_no_events_are_left(
    device: str, clock: int | None, paper: Engine, written: list[Mark]
) -> None:
    """Where the host's clock can tell, it does; where it would tell of launches, nobody does. It is counted."""
    worker = Worker(paper, "V1", device)
    for _ in range(device_events.SETS):
        worker.execute()
        worker.sample()
    for _ in range(9):
        step = worker.execute()
        worker.sample()
        found = of(written, step)
        assert [found[kind][4] if kind in found else None for kind in TIMED] == [clock] * 3
    assert [mark[2] for mark in written if mark[0] == marks.ENGINE] == [
        f"device_events_exhausted={n}" for n in (1, 2, 4, 8)
    ]


@pytest.mark.parametrize(("device", "clock"), [("cuda", None), ("cpu", HOST)])
@pytest.mark.parametrize("what", ["record", "query", "elapsed_time", "is_current_stream_capturing"])
def test_a_device_that_fails(
    what: str, device: str, clock: int | None, paper: Engine, written: list[Mark], caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(paper, "V2", device)
    paper.device.failing = {what}
    with caplog.at_level(logging.WARNING, "stagetrace"):
        for _ in range(20):
            step = worker.execute()
            worker.wait(worker.sample())
            found = of(written, step)
            assert [found[kind][4] if kind in found else None for kind in TIMED] == [clock] * 3
    assert len(caplog.records) == 1 and "torch.cuda.Event" in caplog.text


@pytest.mark.parametrize(("device", "lines"), [("cuda", 1), ("cpu", 0)])
def test_a_process_without_events(
    device: str, lines: int, paper: Engine, written: list[Mark], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """PyTorch without CUDA raises when one is made; a GPU without events is worth a line, a CPU is not."""
    made = 0

    def event() -> Any:
        nonlocal made
        made += 1
        raise RuntimeError("Tried to instantiate dummy base class Event")

    monkeypatch.setattr(worker_events, "_event", event)
    worker = Worker(paper, "V1", device)
    with caplog.at_level(logging.WARNING, "stagetrace"):
        for _ in range(3):
            step = worker.execute()
            worker.wait(worker.sample())
    assert made == 1 and len(caplog.records) == lines
    assert [of(written, step)[kind][4] for kind in TIMED if kind in of(written, step)] == ([] if lines else [HOST] * 3)


def test_events_that_tell_no_times_are_not_used(
    paper: Engine, written: list[Mark], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU worker puts these in PyTorch's place."""
    monkeypatch.setattr(worker_events, "_event", lambda: SimpleNamespace(record=None, wait=None, synchronize=None))
    worker = Worker(paper, "V1", device="cpu")
    step = worker.execute()
    worker.wait(worker.sample())
    assert [of(written, step)[kind][4] for kind in TIMED] == [HOST] * 3


def test_a_pause_in_the_middle(paper: Engine, written: list[Mark]) -> None:
    """The engine's result is not read then; its events are, with the next."""
    worker = Worker(paper, "V2")
    first = worker.execute()
    worker.sample().get_output()
    paper.host.work(100 * MS)
    second = worker.execute()
    worker.wait(worker.sample())
    for step in (first, second):
        assert of(written, step)[marks.FORWARD][4] == ON_DEVICE
    assert of(written, first)[marks.SAMPLE][3] <= of(written, second)[marks.FORWARD][2]
