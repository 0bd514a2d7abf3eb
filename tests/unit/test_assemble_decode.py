"""Stage 11: its split by what the engine did meanwhile, and the times of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from stagetrace import marks
from stagetrace.assemble.decode import PARTS
from stagetrace.assemble.tokens import lag_growth_ms, sent
from stagetrace.model import RequestRecord
from stagetrace.stats import inter_token, percentile, quantiles, spread
from tests.invariants import SPLIT, check_all
from tests.unit.scripted import MS, US, Ask, Script, kinds


def decode(record: RequestRecord) -> dict[str, Any]:
    assert record.stage("decode").state == "measured"
    return record.stage("decode").attributes


def split(record: RequestRecord) -> dict[str, float]:
    parts: dict[str, float] = decode(record)["split_ms"]
    return parts


def records_of(script: Script) -> list[RequestRecord]:
    records = script.records()
    check_all(records, complete=True)
    return records


def test_the_parts_are_the_documented_ones() -> None:
    assert set(PARTS) == set(SPLIT)


def test_a_lone_request_to_the_microsecond() -> None:
    """Five steps of one token; the paper engine's constants, added up by hand."""
    script = Script().run(Ask(output=6))
    parts = split(records_of(script)[0])
    # The first text is sent 220 us after the first update: 40 of update, 100 of schedule, 50 of dispatch and 30 of
    # prepare are over by then.
    expected = {
        "forward": 5 * 2.040, "lm_head": 5 * 0.200, "sample": 5 * 0.150, "prepare": 5 * (0.150 + 0.030) - 0.030,
        "schedule": 4 * 0.100,
        # Hand-over there (50), to the sampler's call (10 + 20), from the sampler (20) and back (40).
        "dispatch": 5 * 0.140 - 0.050,
        # Booking (120, the last one up to the request's end: 40) and taking in new ones before the next schedule().
        "update": (4 * (120 + 40) + 40) / 1000,
        "stalled": 0.0, "preempted": 0.0, "other": 0.0,
    }  # fmt: skip
    assert parts == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_little_is_left_unexplained(depth: int) -> None:
    script = Script(depth=depth).run(*(Ask(at=i * 3 * MS, output=30, prompt=10 + i) for i in range(6)))
    for record in records_of(script):
        duration = record.stage("decode").duration_ms or 0
        assert split(record)["other"] <= 0.05 * duration
        assert record.coverage is not None and record.coverage > 0.9


def test_somebody_elses_prefill_stalls_a_stream() -> None:
    alone = split(records_of(Script(budget=256).run(Ask(output=20)))[0])
    record, other = records_of(Script(budget=256).run(Ask(output=20), Ask(at=20 * MS, prompt=200, output=1)))
    mate = split(record)
    assert alone["stalled"] == 0
    (culprit,) = decode(record)["stalled_by"]
    assert culprit == {
        "request_id": other.request_id, "trace_id": other.trace_id, "span_id": other.span_id,
        "tokens": 200, "ms": pytest.approx(mate["stalled"]),
    }  # fmt: skip
    slow = max(decode(record)["worst_steps"], key=lambda step: step["gap_ms"])
    assert (slow["cause"], slow["stalled_by"], slow["prefill_tokens"], slow["batch"]) == (
        "stalled", other.request_id, 200, 2
    )  # fmt: skip
    # 200 tokens more in one forward, at 40 us each; the rest is as it was.
    assert mate["stalled"] == pytest.approx(200 * 0.04, abs=0.05)
    assert mate["forward"] == pytest.approx(alone["forward"], abs=0.1)


def test_whoever_stalled_it_is_named_by_share_and_after_he_has_left() -> None:
    """Two prompts in the same forwards, whose records are written out long before the victim's."""
    script = Script(budget=256).run(
        Ask(output=600), Ask(at=20 * MS, prompt=150, output=1), Ask(at=20 * MS, prompt=50, output=1)
    )
    assembler = script.assembler()
    early: list[RequestRecord] = []
    for index, (mark, pid) in enumerate(script.read()):
        assembler.take(mark, pid)
        if index % 50 == 0:
            assembler.steps()
            early += assembler.finished(mark.t)
            assembler.forget(mark.t)
    assert [r.span_id for r in early] == ["0000000000001001", "0000000000001002"]
    victim = script.settle(assembler)[0]
    check_all([victim], complete=True)
    blamed = decode(victim)["stalled_by"]
    assert [(one["request_id"], one["tokens"]) for one in blamed] == [("cmpl-4097", 150), ("cmpl-4098", 50)]
    assert blamed[0]["ms"] == pytest.approx(3 * blamed[1]["ms"], rel=1e-3)
    assert sum(one["ms"] for one in blamed) == pytest.approx(split(victim)["stalled"], abs=1e-3)


def test_the_steps_waited_for_longest() -> None:
    script = Script(budget=256).run(
        Ask(output=40, evict=(20,), skip=(12,), out=4), Ask(at=20 * MS, prompt=150, output=30)
    )
    worst = decode(records_of(script)[0])["worst_steps"]
    causes = {step["token"]: step["cause"] for step in worst}
    assert len(worst) == 5 and (causes[20], causes[12]) == ("preempted", "stalled")
    late = decode(records_of(Script().run(Ask(output=12, slower=9 * MS)))[0])["worst_steps"]
    assert {step["cause"] for step in late} == {"emit"}
    drafted = decode(records_of(Script(drafts=3).run(Ask(output=20)))[0])["worst_steps"]
    assert all(step["gap_ms"] > 2 for step in drafted), "tokens of one step are not waited for"


def test_a_step_that_passes_a_request_over_stalls_it() -> None:
    script = Script().run(Ask(skip=(1, 3), output=7), Ask(output=9))
    parts = split(records_of(script)[0])
    # Two whole periods: nothing of them was for this request.
    period = script.steps[4].update[1] - script.steps[3].update[1]
    assert parts["stalled"] == pytest.approx(2 * period / 1e6, rel=0.1)
    assert parts["preempted"] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_from_eviction_to_the_end_of_the_recomputation(depth: int) -> None:
    script = Script(depth=depth, budget=16).run(Ask(evict=(4,), output=9, prompt=30, out=3), Ask(output=40))
    record = records_of(script)[0]
    assert record.preemptions == 1
    number = script.roots[0].seqs[0].number
    mine = [(step, row[2]) for step in script.steps for row in step.rows if row[0].number == number]
    back = next(i for i in range(3, len(mine)) if mine[i][1] < mine[i - 1][1])
    redone = next(i for i in range(back, len(mine)) if mine[i][1] >= 33) - 1
    lost = mine[redone][0].update[1] - mine[back - 1][0].update[1]
    assert split(record)["preempted"] == pytest.approx(lost / 1e6, abs=1e-6)
    assert lost > 15 * MS and split(record)["stalled"] < 1


def test_an_eviction_in_the_prefill_is_none_of_decodes() -> None:
    script = Script(budget=16).run(Ask(evict=(0,), prompt=40, output=5, skip=(2,)), Ask(output=20))
    record = records_of(script)[0]
    assert record.preemptions == 1 and record.stage("admission").attributes["requeues"] == 1
    assert split(record)["preempted"] == 0 and split(record)["stalled"] > 2
    facts = record.stage("prefill").attributes
    # Two steps passed it over; the next but one computes it again. Beside that, two gaps between chunks of one prompt.
    assert facts["preempted_ms"] > 4
    assert record.gaps_ms["preempted"] == facts["preempted_ms"]
    assert record.gaps_ms["preempted"] + record.gaps_ms["between_chunks"] == pytest.approx(facts["gaps_ms"])


def test_what_the_engine_does_under_cover_of_a_forward_is_told_but_not_summed() -> None:
    plain = decode(records_of(Script().run(Ask(output=20)))[0])
    ahead = decode(records_of(Script(depth=2).run(Ask(output=20)))[0])
    assert plain["overlapped_ms"] == 0
    # Composing one step (100 us) and the end of booking another (50) in the shade of each of 18 forwards.
    assert ahead["overlapped_ms"] == pytest.approx(18 * 0.15, abs=0.1)
    assert ahead["split_ms"]["schedule"] < plain["split_ms"]["schedule"] / 5


def test_steps_whose_marks_are_lost_are_other() -> None:
    script = Script().run(Ask(output=20))
    gone = {step.number for step in script.steps[5:9]}
    record = script.records(drop=lambda mark: mark.key in gone)[0]
    check_all([record])
    assert record.output_tokens == 20 and len(record.token_times_ms) == 16
    # Of the step after them too: nobody knows when its period began.
    assert split(record)["other"] == pytest.approx(5 * 2.97, rel=0.02)


def test_batch_and_steps() -> None:
    facts = decode(records_of(Script(drafts=3).run(Ask(output=20)))[0])
    assert facts["tokens"] == 19 and facts["steps"] == 10 and facts["batch"] == 1.0
    # The step that asynchronous scheduling had made up before it knew of the end is not his.
    assert decode(records_of(Script(depth=2).run(Ask(output=6)))[0])["steps"] == 5


def test_latencies_between_tokens() -> None:
    record = records_of(Script().run(Ask(output=20)))[0]
    assert record.itl_ms == pytest.approx({"p50": 2.97, "p95": 2.97, "p99": 2.97, "max": 2.97})
    assert decode(record)["itl_ms"] == record.itl_ms
    one = records_of(Script().run(Ask(output=1)))[0]
    assert one.itl_ms == {"p50": None, "p95": None, "p99": None, "max": None}


def test_tokens_of_a_speculative_step_share_its_time() -> None:
    record = records_of(Script(drafts=3, accepted=(3,)).run(Ask(output=10)))[0]
    assert [record.itl_ms[q] for q in ("p50", "max")] == pytest.approx([3.09 / 3] * 2, rel=0.02)


def test_a_stream_that_falls_behind() -> None:
    steady = decode(records_of(Script().run(Ask(output=33)))[0])
    behind = decode(records_of(Script().run(Ask(output=33, slower=300 * US)))[0])
    whole = decode(records_of(Script().run(Ask(output=33, stream=False)))[0])
    assert steady["emit_lag_ms"] == pytest.approx(0, abs=0.02)
    # The mean of the last four lags against that of the first four.
    assert behind["emit_lag_ms"] == pytest.approx(29 * 0.3, rel=0.05)
    assert whole["emit_lag_ms"] is None


def test_lag_needs_a_few_tokens() -> None:
    assert lag_growth_ms([1, 1, 1]) is None
    assert lag_growth_ms([MS, MS, 3 * MS, 3 * MS]) == 2.0


@pytest.mark.parametrize(
    ("processed", "chunks", "expected"),
    [
        ([10, 20, 30], [11, 21, 31], [11, 21, 31]),
        # The usage has a chunk of its own.
        ([10, 20, 30], [11, 21, 31, 32], [11, 21, 31]),
        # Far behind, but each by itself.
        ([10, 11, 12], [15, 16, 17], [15, 16, 17]),
        # What waited went out together.
        ([10, 20, 21, 30], [11, 25, 31], [11, 25, 25, 31]),
        # Nothing is sent after the client has left.
        ([10, 20, 30], [11, 21], [11, 21, 30]),
        ([10], [], [10]),
        ([], [5], []),
        # As many chunks, but not these tokens'.
        ([10, 20, 30], [5, 21, 31], [21, 21, 31]),
    ],
)
def test_tokens_and_chunks(processed: list[int], chunks: list[int], expected: list[int]) -> None:
    assert sent(processed, chunks) == expected


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], []),
        ([5.0], []),
        ([5.0, 7.0, 8.0], [2.0, 1.0]),
        ([1.0, 4.0, 4.0, 4.0, 6.0], [1.0, 1.0, 1.0, 2.0]),
        ([1.0, 1.0, 3.0], [0.0, 2.0]),
        ([1.0, 3.0, 3.0], [1.0, 1.0]),
    ],
)
def test_gaps_between_tokens(times: list[float], expected: list[float]) -> None:
    assert inter_token(times) == expected


def test_percentiles_by_hand() -> None:
    assert percentile([], 50) is None
    assert percentile([4.0], 99) == 4.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([40.0, 10.0, 30.0, 20.0], 95) == pytest.approx(38.5)
    assert quantiles([None, 1.0, 3.0]) == {"p50": 2.0, "p95": pytest.approx(2.9), "p99": pytest.approx(2.98)}
    assert spread([]) == {"p50": None, "p95": None, "p99": None, "max": None}


def test_preempted_steps_are_counted_where_they_happened() -> None:
    script = Script().run(Ask(evict=(3,), output=8), Ask(output=14))
    assembler = script.assembler()
    for mark, pid in script.read():
        assembler.take(mark, pid)
    assert sum(step.preempted for step in assembler.steps()) == 1


def test_without_worker_marks_nothing_is_said_of_the_worker() -> None:
    worker = (marks.EXECUTE, marks.FORWARD, marks.LM_HEAD, marks.SAMPLE_CALL, marks.SAMPLE, marks.EMBEDDING)
    record = Script().run(Ask()).records(drop=kinds(*worker))[0]
    check_all([record])
    parts = split(record)
    assert {parts[k] for k in ("forward", "lm_head", "sample", "prepare", "dispatch")} == {0.0}
    assert parts["other"] > 0.8 * (record.stage("decode").duration_ms or 0)
