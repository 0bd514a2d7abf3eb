"""Marks that come late, in another order, or never: what assembly makes of them, and that it keeps nothing for ever."""

from __future__ import annotations

import pytest

from stagetrace import marks
from stagetrace.assemble import Assembler
from stagetrace.assemble.assembler import GRACE_NS, KEEP_NS, LOST_NS, SETTLE_NS
from stagetrace.marks import Mark, TextMark
from stagetrace.model import RequestRecord
from tests.invariants import check_all
from tests.unit.scripted import API, CORE, ENGINE, MAIN, MS, POOL, WORKER, Ask, Script, kinds


def feed(script: Script, assembler: Assembler, *pids: int) -> None:
    """Read the rings of each process in turn, whole."""
    for pid in pids:
        for mark, writer in script.read():
            if writer == pid:
                assembler.take(mark, writer)


def comparable(records: list[RequestRecord]) -> list[dict[str, object]]:
    return [record.to_json() for record in records]


ORDERS = [(API, CORE, WORKER), (WORKER, CORE, API), (CORE, API, WORKER), (WORKER, API, CORE)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("depth", [1, 2])
def test_processes_may_be_read_in_any_order(order: tuple[int, ...], depth: int) -> None:
    script = Script(depth=depth, slots=3).run(*(Ask(at=i * MS, n=1 + i % 2, stop_at=(i % 3) or None) for i in range(6)))
    assembler = script.assembler()
    feed(script, assembler, *order)
    records = script.settle(assembler)
    check_all(records, complete=True)
    assert comparable(records) == comparable(script.records())


@pytest.mark.parametrize("shuffle", range(20))
def test_an_id_that_is_used_again_is_another_request(shuffle: int) -> None:
    asks = [Ask(at=i * 60 * MS, identifier="mine", output=3 + i, prompt=10 + i) for i in range(4)]
    records = Script().run(*asks).records(shuffle)
    check_all(records, complete=True)
    assert [r.output_tokens for r in records] == [3, 4, 5, 6]
    assert [r.prompt_tokens for r in records] == [10, 11, 12, 13]
    assert {s.state for r in records for s in r.stages} == {"measured"}
    assert {r.internal_id for r in records} == {"0_mine"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lost", [marks.ADD, marks.ENQUEUE])
def test_a_namesakes_marks_are_not_taken_for_ones_own(lost: int, order: tuple[int, ...]) -> None:
    """The earlier request of that id has lost the mark that says it is another one."""
    script = Script().run(*(Ask(at=i * 60 * MS, identifier="mine", output=3 + i) for i in range(2)))
    assembler = script.assembler()
    for pid in order:
        for mark, writer in script.read(drop=lambda mark: mark.kind == lost and mark.t < 60 * MS):
            if writer == pid:
                assembler.take(mark, pid)
    records = script.settle(assembler)
    check_all(records)
    assert records[1].output_tokens in ((4,) if lost == marks.ADD else (4, None))
    admission = records[1].stage("admission")
    assert admission.duration_ms == pytest.approx(0.22) or (lost, admission.duration_ms) == (marks.ENQUEUE, None)


@pytest.mark.parametrize("shuffle", range(20))
def test_an_id_used_again_before_the_engine_has_heard_of_the_stop_string(shuffle: int) -> None:
    first = Ask(identifier="mine", output=90, stop_at=3, stop_lag=2)
    end = Script().run(first).roots[0].ended
    assert end is not None
    # The next one is handed over while the engine still works on the first.
    script = Script().run(first, Ask(at=end - 1360_000 + 100_000, identifier="mine", output=4))
    freed = script.roots[0].seqs[0].freed
    assert freed is not None and freed > script.roots[1].seqs[0].added
    records = script.records(shuffle)
    check_all(records, complete=True)
    assert [(r.output_tokens, r.finish_reason) for r in records] == [(3, "stop"), (4, "length")]


def test_threads_of_one_process_may_be_read_in_any_order() -> None:
    script = Script().run(Ask())
    assembler = script.assembler()
    for wanted in (POOL, MAIN, ENGINE):
        for _, ring, mark in script.written:
            if ring == wanted:
                assembler.take(mark, ring[1])
    assert script.settle(assembler)[0].stage("tokenize").attributes["pool_wait_ms"] == pytest.approx(0.03)


def test_a_snapshot_between_two_rings_spoils_nothing() -> None:
    """The engine's ring is read to the end before the worker's: what was made of the steps then is made again."""
    script = Script(depth=2).run(Ask(output=12), Ask(at=9 * MS, prompt=60))
    assembler = script.assembler()
    feed(script, assembler, API, CORE)
    early = assembler.steps()
    assert early and all(step.forward_ns is None for step in early)
    assembler.in_flight()
    feed(script, assembler, WORKER)
    late = assembler.steps()
    assert [s.step for s in late] == [s.step for s in early if s.batch_size]
    assert all(step.forward_ns for step in late)
    assert comparable(script.settle(assembler)) == comparable(script.records())


def test_steps_are_handed_on_once() -> None:
    script = Script().run(Ask())
    assembler = script.assembler()
    for mark, pid in script.read():
        assembler.take(mark, pid)
    assert len(assembler.steps()) == len(script.steps)
    assert assembler.steps() == []


def loaded(script: Script) -> tuple[Assembler, int]:
    assembler = script.assembler()
    for mark, pid in script.read():
        assembler.take(mark, pid)
    assembler.steps()
    return assembler, max(w[0] for w in script.written)


def test_a_call_is_settled_when_every_ring_has_been_read_once_more() -> None:
    assembler, now = loaded(Script().run(Ask()))
    assert assembler.finished(now) == []
    assert assembler.finished(now + SETTLE_NS - 1) == []
    assert len(assembler.finished(now + SETTLE_NS + 1)) == 1
    assert assembler.finished(now + 2 * SETTLE_NS) == []


def test_a_stop_string_waits_for_the_engine_but_not_for_long() -> None:
    script = Script().run(Ask(output=60, stop_at=3, stop_lag=50))
    freed = script.roots[0].seqs[0].freed
    assert freed is not None
    script.kill(freed - MS)
    assembler = script.assembler()
    for mark, pid in script.read(drop=kinds(marks.FREE)):
        assembler.take(mark, pid)
    end = script.roots[0].ended or 0
    assert assembler.finished(end + GRACE_NS - 1) == []
    assert assembler.finished(end + GRACE_NS + 1) == []  # settles
    records = assembler.finished(end + GRACE_NS + SETTLE_NS + 2)
    check_all(records, complete=True)
    assert (records[0].status, records[0].finish_reason, records[0].output_tokens) == ("ok", "stop", 3)


def test_who_holds_the_engine_is_not_done_before_the_front_end_is() -> None:
    """The engine's last mark is read before the front end's, which says when the last output was processed."""
    script = Script().run(Ask(kind="direct", output=1))
    assembler = script.assembler()
    late = []
    for mark, pid in script.read():
        if isinstance(mark, Mark) and mark.kind == marks.OUTPUTS:
            late.append((mark, pid))
        else:
            assembler.take(mark, pid)
    now = max(w[0] for w in script.written)
    assert assembler.finished(now + 1) == [] and assembler.finished(now + MS + SETTLE_NS) == []
    for mark, pid in late:
        assembler.take(mark, pid)
    assembler.finished(now + 2 * SETTLE_NS)
    record = assembler.finished(now + 4 * SETTLE_NS)[0]
    check_all([record], complete=True)
    assert record.ttft_ms is not None and record.e2e_ms == record.ttft_ms


@pytest.mark.parametrize(("dead", "status"), [((), "in_flight"), ((API,), "error")])
def test_closing_hands_everything_on(dead: tuple[int, ...], status: str) -> None:
    """The recording may end before the server does."""
    script = Script().run(Ask(), Ask(output=90))
    script.dead.update(dead)
    assembler = script.assembler()
    for mark, pid in script.read():
        if mark.t < 25 * MS:
            assembler.take(mark, pid)
    records = assembler.finished(25 * MS, closing=True)
    check_all(records)
    assert [(r.status, r.active_stage) for r in records] == [("ok", None), (status, "decode")]
    assert not assembler.book.roots and not assembler.book.sequences


def test_nothing_is_kept_for_ever() -> None:
    script = Script(slots=4).run(*(Ask(at=i * 2 * MS, n=1 + i % 2, stop_at=2, stop_lag=4) for i in range(8)))
    assembler, now = loaded(script)
    book = assembler.book
    assembler.take(Mark(now, marks.FORWARD, 99 << 32, 1, 2, 0, 0), WORKER)  # of a step nobody has composed
    assembler.take(Mark(now, marks.SENT, 12345, 1, 0, 0, 0), API)  # of a call nobody has begun
    assembler.take(Mark(now, marks.FREE, 777, 1, 1, 0, 0), CORE)  # of a sequence nobody has handed over
    assembler.take(Mark(now, marks.ADD, 12345, 888, 5, 5, 0), API)  # of a call whose first mark was lost
    assert len([r for ns in (0, GRACE_NS + 1, 2 * GRACE_NS) for r in assembler.finished(now + ns)]) == 12
    assembler.forget(now + KEEP_NS + 3 * GRACE_NS)
    left = {
        name: value
        for name, value in vars(book).items()
        if name not in ("settings", "hooks", "last_step", "workers", "outputs", "_take")
    }
    assert not any(left.values()), left
    assert all(batches.after(0) is None for batches in book.outputs.values())


@pytest.mark.parametrize("lost", [(marks.END,), (marks.END, marks.FREE)])
def test_a_call_whose_end_was_lost_is_given_up(lost: tuple[int, ...]) -> None:
    script = Script().run(Ask(), Ask(at=20 * MS, output=3))
    assembler = script.assembler()
    ended = script.roots[0].ended or 0
    for mark, pid in script.read(drop=lambda mark: mark.kind in lost and mark.t <= ended + MS):
        assembler.take(mark, pid)
    now = max(w[0] for w in script.written)
    done = [r for ns in (0, GRACE_NS, 2 * GRACE_NS, LOST_NS - MS) for r in assembler.finished(now + ns)]
    assert [r.status for r in done] == ["ok"]
    assembler.finished(now + LOST_NS + MS)
    given_up = assembler.finished(now + LOST_NS + 2 * SETTLE_NS)
    check_all(given_up)
    assert [(r.status, r.e2e_ms) for r in given_up] == [("error", None)]
    assert not assembler.book.roots


def test_a_call_that_the_engine_works_for_is_never_given_up() -> None:
    script = Script().run(Ask(output=50))
    assembler = script.assembler()
    for mark, pid in script.read():
        if mark.t < 20 * MS:
            assembler.take(mark, pid)
    for hours in range(1, 4):
        assert assembler.finished(20 * MS + hours * 3600 * 10**9) == []


def test_marks_and_texts_of_unknown_kinds_are_nobodys_business() -> None:
    script = Script().run(Ask())
    assembler, _ = loaded(script)
    assembler.take(Mark(5, 200, 1, 2, 3, 4, 5), API)
    assembler.take(TextMark(5, 99, 4096, "from a newer writer"), API)
    assembler.take(TextMark(5, marks.HOOK, 0, "some.target failed"), API)
    assembler.take(TextMark(5, marks.ENGINE, 0, "without an equals sign"), API)
    records = script.settle(assembler)
    check_all(records, complete=True)
    assert [record.status for record in records] == ["ok"]
