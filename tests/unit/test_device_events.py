"""Events of a device: its own times, in their place on the host's clock, and nobody waits for them.

The device is one on paper that forbids what a GPU forbids: see ``tests/engine/gpupath``.
"""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest

from stagetrace import device_events
from stagetrace.guard import MAX_FAILURES
from tests.engine.gpupath.plugin.gpu_default_path.device import COPY_NS, DRIFT, LATENCY_NS, WORK_NS
from tests.unit.paper_device import FORWARD, MS, START, US, Engine, S

#: Events tell times in single precision of milliseconds, from up to two seconds away.
GRAIN_NS = 300


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return made(monkeypatch)


def made(monkeypatch: pytest.MonkeyPatch, *failing: str, sets: int = device_events.SETS) -> Engine:
    engine = Engine(failing, sets)
    monkeypatch.setattr(device_events, "now", engine.host.now)
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_span_is_as_long_as_the_device_took(engine: Engine, depth: int) -> None:
    for timed in engine.run(50, depth=depth):
        assert timed.placed is not None
        # The host has launched each in 50 µs.
        assert [s.end_ns - s.begin_ns for s in timed.placed] == pytest.approx([WORK_NS] * 3, abs=GRAIN_NS)


def test_work_of_any_length_and_none(engine: Engine) -> None:
    """What the device waits for the host to launch is in the span, too: it is busy with nothing else."""
    for host_ns in (0, 3 * MS, 40 * US, 90 * MS):
        (timed,) = engine.run(1, host_ns)
        assert timed.placed is not None and timed.placed[0].kind == FORWARD
        forward = timed.placed[0].end_ns - timed.placed[0].begin_ns
        assert forward == pytest.approx(max(host_ns, WORK_NS), rel=2 * DRIFT, abs=GRAIN_NS)


def test_where_the_engine_waits_for_the_device(engine: Engine) -> None:
    """Steps back to back, the clocks 40 µs a second apart: what is two seconds old is forgotten."""
    worst = [max(map(abs, timed.late_by())) for timed in engine.run(5_000, depth=2)]
    assert engine.host.t - START > 12 * S
    assert max(worst) < COPY_NS + 2.5 * DRIFT * 1e9 + GRAIN_NS


def test_where_the_device_waits_for_the_host(engine: Engine) -> None:
    """Nobody waits for a result, so the time of asking is all there is: early by what a launch takes."""
    early = [-late for timed in engine.run(2_000, 700 * US, 2 * MS, depth=2) for late in timed.late_by()]
    assert min(early) >= -GRAIN_NS and max(early) < LATENCY_NS + WORK_NS + 2.5 * DRIFT * 1e9


def test_from_one_to_the_other_and_after_a_rest(engine: Engine) -> None:
    for host_ns, depth, rest in ((700 * US, 2, 0), (20 * US, 2, S), (20 * US, 1, 3600 * S), (700 * US, 2, 0)):
        engine.host.work(rest)
        for timed in engine.run(300, host_ns, MS, depth):
            assert max(map(abs, timed.late_by())) < LATENCY_NS + WORK_NS + 200 * US, (host_ns, depth, rest)


@pytest.mark.parametrize("seed", range(20))
def test_never_before_it_was_asked_for_nor_after_it_was_seen(engine: Engine, seed: int) -> None:
    chance = random.Random(seed)
    reached = 0
    for _ in range(60):
        host_ns, between = chance.choice((0, 10 * US, 300 * US, 3 * MS)), chance.choice((0, 50 * US, 20 * MS, 2 * S))
        for timed in engine.run(chance.randint(1, 5), host_ns, between, chance.randint(1, 3)):
            lease, placed = timed.step.lease, timed.placed
            assert lease is not None and placed is not None
            edges = [placed[0].begin_ns, placed[0].end_ns, placed[1].begin_ns, placed[2].begin_ns, placed[2].end_ns]
            assert edges == sorted(edges) and edges[0] >= reached - GRAIN_NS
            assert all(e >= point.host_ns for e, point in zip(edges, lease.points, strict=True))
            assert edges[-1] <= timed.seen
            reached = edges[-1]


def test_nothing_waits(engine: Engine) -> None:
    assert all(timed.placed for timed in engine.run(100, depth=2))
    ours = {what.split()[0]: n for what, n in engine.device.counts.items() if what.endswith("stagetrace")}
    assert ours.keys() == {"record", "query", "elapsed_time", "is_current_stream_capturing"}
    assert ours["record"] == 5 * 100 and ours["query"] == 2 * 100
    assert "elapsed_time too early" not in engine.device.counts
    # They are used again: so many are made as are ever on their way, and one a second to count from.
    assert engine.device.counts["make tests"] < 5 * device_events.SETS + 10 + 100


def test_while_a_graph_is_captured_nothing_is_recorded(engine: Engine) -> None:
    engine.device.capturing = True
    assert engine.events.lend(1) is None
    engine.device.capturing = False
    assert engine.device.recorded == 0 and engine.guard.failures == 0
    assert engine.launch().lease is not None


def test_a_step_too_many_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(monkeypatch, sets=3)
    steps = [engine.launch() for _ in range(5)]
    assert [step.lease is not None for step in steps] == [True, True, True, False, False]
    assert engine.events.exhausted == 2
    assert engine.wait(steps[0])[0][1] is not None
    assert engine.launch().lease is not None and engine.events.exhausted == 2


def test_what_was_not_read_is_read_with_the_next(engine: Engine) -> None:
    steps = [engine.launch() for _ in range(3)]
    found = engine.wait(steps[2])
    assert [lease.step for lease, placed in found if placed] == [1, 2, 3]
    for (_, before), (_, after) in pairwise(found):
        assert before and after and after[0].begin_ns >= before[2].end_ns


def test_what_is_behind_the_one_that_was_waited_for_is_left_alone(engine: Engine) -> None:
    """Even where it is past: the engine has not waited for it, and nobody may ask for its time."""
    first, second = engine.launch(), engine.launch()
    engine.host.work(S)
    assert [lease.step for lease, _ in engine.wait(first)] == [1]
    assert [lease.step for lease, _ in engine.wait(second)] == [2]


def test_one_that_is_not_past_has_no_times(engine: Engine) -> None:
    step = engine.launch()
    assert step.lease is not None
    assert engine.events.read(step.lease, waited=False) == [(step.lease, None)]
    assert engine.guard.failures == 0 and "elapsed_time tests" not in engine.device.counts
    ((_, placed),) = engine.wait(engine.launch())
    assert placed


@pytest.mark.parametrize("what", ["make", "record", "query", "elapsed_time", "is_current_stream_capturing"])
def test_a_device_that_fails(what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line, no times, and after a few steps it is left alone; nothing is raised."""
    engine = made(monkeypatch, what)
    with caplog.at_level(logging.WARNING, "stagetrace"):
        for _ in range(20):
            assert [placed for _, placed in engine.wait(engine.launch())] in ([], [None])
    assert engine.guard.off and engine.guard.failures >= MAX_FAILURES
    assert [record.getMessage() for record in caplog.records] == [
        "stagetrace: hook torch.cuda.Event failed (RuntimeError); its stage may be missing"
    ]
    assert engine.told == [
        ("torch.cuda.Event", "failing RuntimeError"), ("torch.cuda.Event", "removed RuntimeError")
    ]  # fmt: skip
    before = dict(engine.device.counts)
    assert engine.events.lend(99) is None and dict(engine.device.counts) == before


def test_a_device_that_fails_once_is_asked_again(engine: Engine) -> None:
    for failing in ({"elapsed_time"}, {"query"}, {"record"}):
        engine.device.failing = failing
        assert [placed for _, placed in engine.wait(engine.launch())] in ([], [None])
        engine.device.failing = set()
        (timed,) = engine.run(1)
        assert timed.placed and max(map(abs, timed.late_by())) < MS
