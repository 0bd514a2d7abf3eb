"""Requests that end badly, or whose end nobody saw: a status, the stage they were in, and nothing made up after it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from stagetrace import marks
from stagetrace.marks import Mark
from stagetrace.model import RequestRecord
from stagetrace.stages import BY_KEY, STAGES
from tests.invariants import check_all
from tests.unit.scripted import API, CORE, MAIN, MS, US, WORKER, Ask, Script, kinds


class Reason(Enum):
    STOP, OTHER = range(2)


KEYS = [stage.key for stage in STAGES]


def aborted_in(key: str, options: dict[str, Any], ask: dict[str, Any]) -> tuple[RequestRecord, int]:
    """A request whose client leaves in the middle of stage ``key``, and when that was."""
    rest = Ask(at=10 * US, output=10, prompt=9)
    start, duration = Script(**options).run(Ask(**ask), rest).roots[0].seqs[0].truth[key]
    at = start + duration // 2
    script = Script(**options).run(Ask(**ask, abort_at=at), rest)
    records = script.records()
    check_all(records)
    assert records[1].status == "ok", "the other one goes on"
    return records[0], at


LEAVING = [
    (key, options)
    for key in KEYS
    for options in ({}, {"depth": 2}, {"budget": 16}, {"embedding": "fused"})
    if (key, options) != ("embedding", {"embedding": "fused"})
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("key", "options"), LEAVING)
def test_a_client_that_leaves(key: str, stream: bool, options: dict[str, Any]) -> None:
    record, at = aborted_in(key, options, {"stream": stream, "prompt": 40, "output": 8})
    # What the worker does in one step cannot be told apart until the step's output is back.
    where = {"embedding": "prefill", "lm_head": "prefill", "sample": "prefill"}.get(key, key)
    assert (record.status, record.finish_reason) == ("aborted", "abort" if key != "teardown" else "length")
    assert record.error_type == "aborted"
    assert record.active_stage == where, record
    active = record.stage(record.active_stage)
    assert record.e2e_ms is not None and record.e2e_ms >= at / 1e6
    assert active.attributes["interrupted"] is True
    assert active.duration_ms is not None and active.start_ms is not None
    assert at / 1e6 <= active.start_ms + active.duration_ms <= record.e2e_ms + 1e-6
    for stage in record.stages[BY_KEY[record.active_stage].number :]:
        assert stage.state == "not_reached"


def test_who_leaves_the_queue_has_waited_until_then() -> None:
    script = Script(slots=1).run(Ask(output=90), Ask(at=MS, abort_at=100 * MS))
    record = script.records()[1]
    check_all([record])
    assert (record.status, record.active_stage, record.output_tokens) == ("aborted", "admission", 0)
    assert record.queue_ms == pytest.approx(97, abs=3)
    assert record.coverage is not None and record.coverage > 0.98


def test_cancelled_by_the_program_that_holds_the_engine() -> None:
    record = Script().run(Ask(kind="direct", output=90, abort_at=20 * MS)).records()[0]
    check_all([record])
    assert (record.status, record.finish_reason, record.active_stage) == ("aborted", "abort", "decode")


def test_given_up_by_the_program_with_an_engine_that_is_gone() -> None:
    script = Script(engine_dies=US).run(Ask(kind="direct", abort_at=2 * MS), Ask(at=3 * MS, kind="direct"))
    script.written = [w for w in script.written if w[1][1] == API]
    script.written.append((2 * MS, MAIN, Mark(2 * MS, marks.ABORTED, script.roots[0].seqs[0].number, 0, 0, 0, 0)))
    records = script.records()
    check_all(records)
    assert [r.status for r in records] == ["aborted", "in_flight"]
    assert records[0].active_stage == "admission" and records[0].queue_ms == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("where", "key"), [("body", "http_receive"), ("tokenize", "tokenize"), ("parameters", "tokenize")]
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_refused_before_it_became_a_sequence(kind: str, where: str, key: str) -> None:
    records = Script().run(Ask(kind=kind, refuse=where), Ask(at=MS)).records()
    check_all(records)
    assert [r.status for r in records] == ["error", "ok"]
    record = records[0]
    assert (record.active_stage, record.finish_reason) == (key, None)
    assert record.stage(key).state == "measured"
    assert (record.ttft_ms, record.output_tokens, record.cached_tokens) == (None, None, None)
    assert record.prompt_tokens == (20 if where == "parameters" else None)
    assert (record.http_status, record.error_type) == (400, "400")


@pytest.mark.parametrize(("answer", "raises"), [(503, None), (404, None), (500, "builtins.OSError"), (200, "a.B")])
def test_an_error_is_called_by_its_exception_or_else_by_its_status(answer: int, raises: str | None) -> None:
    """A framework answers an exception with 500 and lets it pass: the class says more than the number."""
    record = Script().run(Ask(refuse="parameters", answer=answer, raises=raises)).records()[0]
    check_all([record])
    assert (record.status, record.http_status, record.error_type) == ("error", answer, raises or str(answer))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_that_dies(depth: int, stream: bool) -> None:
    asks = [Ask(output=4, stream=stream), Ask(output=50, stream=stream), Ask(at=49 * MS, stream=stream, prompt=1000)]
    script = Script(depth=depth, engine_dies=52 * MS, slots=2).run(*asks)
    records = script.records()
    check_all(records)
    assert [r.status for r in records] == ["ok", "error", "error"]
    assert records[1].active_stage == "decode"
    assert records[1].stage("decode").attributes["interrupted"] is True
    assert records[2].active_stage in ("prefill", "admission")
    assert all(r.e2e_ms is not None and r.finish_reason is None for r in records[1:])
    # A stream has said 200 by then; who had nothing yet is answered with 500.
    assert [r.error_type for r in records] == [None, "engine_died" if stream else "500", "500"]
    assert [r.http_status for r in records] == [200, 200 if stream else 500, 500]


def test_an_engine_that_dies_under_the_program_that_holds_it() -> None:
    script = Script(engine_dies=20 * MS).run(Ask(kind="direct", output=90))
    record = script.records()[0]
    check_all([record])
    assert (record.status, record.active_stage, record.e2e_ms) == ("error", "decode", None)
    assert (record.http_status, record.error_type) == (None, "engine_died")


def test_a_request_that_the_engine_gives_up_on() -> None:
    script = Script().run(Ask())
    script.change(marks.FREE, lambda mark: mark._replace(a=4))
    record = script.records()[0]
    check_all([record])
    assert (record.status, record.finish_reason, record.error_type) == ("error", "error", "engine_error")


def test_tokens_that_the_engine_has_not_counted_are_counted_from_its_steps() -> None:
    """Of a request that comes in pieces, the engine knows those since the last piece."""
    script = Script().run(Ask(kind="direct", output=12))
    (freed,) = [mark.t for _, _, mark in script.written if isinstance(mark, Mark) and mark.kind == marks.FREE]
    freed += 50 * MS  # its caller closes it while it waits for more: no output says so
    script.change(marks.FREE, lambda mark: mark._replace(t=freed, a=0, b=-1))
    (record,) = script.records()
    assert record.e2e_ms == pytest.approx((freed - script.roots[0].started) / MS)
    check_all([record], complete=True)
    assert (record.status, record.finish_reason, record.output_tokens) == ("ok", None, 12)


def test_an_engine_that_has_left_after_a_whole_answer_takes_nothing_back() -> None:
    """At the end of a session every process is gone, and the engine's last mark may be lost."""
    script = Script().run(Ask(stream=False))
    script.dead |= {102, 103}
    assert script.records(drop=kinds(marks.FREE))[0].status == "ok"


def test_an_api_server_that_dies() -> None:
    script = Script().run(Ask(output=4), Ask(output=50), Ask(at=58 * MS, prompt=1000))
    script.kill(60 * MS, API)
    script.kill(61 * MS, CORE, WORKER)
    records = script.records()
    check_all(records)
    assert [r.status for r in records] == ["ok", "error", "error"]
    assert records[1].active_stage == "decode"
    # Nobody saw the end: no number for it.
    assert [r.e2e_ms for r in records[1:]] == [None, None]
    assert [r.coverage for r in records[1:]] == [None, None]
    assert records[1].ttft_ms is not None
    assert [r.error_type for r in records] == [None, "process_ended", "process_ended"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_outlives_its_api_server(stream: bool) -> None:
    """What it goes on to make reaches nobody, and its end is not the request's."""
    whole = Script().run(Ask(output=50, stream=stream))
    script = Script().run(Ask(output=50, stream=stream))
    script.kill(60 * MS, API)
    record = script.records()[0]
    check_all([record])
    assert (record.status, record.finish_reason, record.active_stage) == ("error", None, "decode")
    processed = sum(1 for t, _, mark in script.written if getattr(mark, "kind", 0) == marks.OUTPUTS)
    assert 0 < processed < 50
    assert record.output_tokens == len(record.token_times_ms) == processed
    assert (record.e2e_ms, record.stage("decode").state) == (None, "not_reached")
    # Had it died after the last token, the request would have ended in its teardown.
    whole.kill(max(t for t, _, mark in whole.written if getattr(mark, "kind", 0) == marks.OUTPUTS), API)
    record = whole.records()[0]
    check_all([record])
    assert (record.status, record.active_stage, record.output_tokens) == ("error", "teardown", 50)


def test_an_http_call_that_is_known_from_the_engines_door_on_only() -> None:
    """Neither its beginning nor its end was seen, nor whether its text was streamed: no number counts from there."""
    script = Script().run(Ask(kind="direct"), Ask(kind="direct", output=90, abort_at=40 * MS))
    script.change(marks.ROOT, lambda mark: mark._replace(c=0, d=marks.UNWATCHED))
    records = script.records()
    check_all(records)
    assert [(r.status, r.active_stage) for r in records] == [("ok", None), ("aborted", "decode")]
    unseen = ["http_receive", "chat_template", "tokenize", "detokenize", "decode", "teardown"]
    assert [s.key for s in records[0].stages if s.state == "not_observable"] == unseen
    assert [s.key for s in records[1].stages if s.state == "not_observable"] == unseen[:4]
    for record in records:
        assert (record.operation, record.e2e_ms, record.ttft_ms) == ("unknown", None, None)
    assert records[0].output_tokens == len(records[0].token_times_ms) == 6


@pytest.mark.parametrize("dies", [True, False])
def test_what_the_engine_has_given_up_runs_until_the_call_ends(dies: bool) -> None:
    """A server that goes down aborts what it has; an ending that is told twice would be two traces."""
    script = Script(engine_dies=40 * MS if dies else None).run(Ask(output=90, abort_at=None if dies else 40 * MS))
    script.written = [w for w in script.written if getattr(w[2], "kind", None) not in (marks.END, marks.DISCONNECT)]
    (record,) = script.records()
    check_all([record])
    assert (record.status, record.active_stage, record.error_type) == ("in_flight", "decode", None)
    script.dead.add(API)
    (record,) = script.records()
    check_all([record])
    assert record.status == "error" and record.e2e_ms is None


def test_an_offline_call_whose_end_went_unseen() -> None:
    """Every token is there, so it was well; when its output was returned, nobody knows."""
    script = Script().run(Ask(kind="offline"), Ask(kind="offline", output=90, abort_at=40 * MS))
    script.change(marks.END, lambda mark: mark._replace(a=0, b=marks.END_UNSEEN))
    records = script.records(drop=lambda mark: mark.kind == marks.FREE and mark.a == 3)
    check_all(records)
    assert [(r.status, r.e2e_ms, r.error_type) for r in records] == [("ok", None, None), ("error", None, "_OTHER")]
    assert [s.key for s in records[0].stages if s.state == "not_observable"] == ["teardown"]
    assert records[1].active_stage == "decode"


def test_a_call_whose_hand_over_went_unseen() -> None:
    """Where it was when it was given up, nobody knows."""
    script = Script().run(Ask(), Ask(output=90, abort_at=40 * MS), Ask(kind="direct"))
    for at, root in ((MS, script.roots[2]),):
        script.written.append((at, MAIN, Mark(at, marks.END, root.number, 0, 0, 0, 0)))
    script.change(marks.END, lambda mark: mark._replace(b=1))
    records = script.records(drop=kinds(marks.ADD))
    check_all(records)
    assert [(r.status, r.active_stage) for r in records] == [("ok", None), ("aborted", None), ("ok", None)]
    for record in records[:2]:
        assert [s.state for s in record.stages] == ["measured"] * 3 + ["not_observable"] * 9
    # That the engine has taken it is all that was seen of the last one's end.
    assert records[2].e2e_ms is None


def test_given_up_while_it_decodes_though_no_output_was_seen_coming_back() -> None:
    script = Script().run(Ask(output=90, stream=False, abort_at=40 * MS))
    record = script.records(drop=kinds(marks.OUTPUTS))[0]
    check_all([record])
    assert (record.status, record.active_stage) == ("aborted", "decode")
    assert record.stage("detokenize").state == "not_observable"


def test_a_stream_that_says_it_has_failed() -> None:
    """Its status was 200 by then; the engine may be well, and may never have had the request."""
    script = Script().run(Ask(output=90, abort_at=30 * MS), Ask(refuse="parameters"))
    script.written = [w for w in script.written if getattr(w[2], "kind", None) not in (marks.DISCONNECT, marks.STATUS)]
    for root in script.roots:
        for t, kind, status in ((root.started + MS, marks.STATUS, 200), (root.ended, marks.FAILED, 400)):
            script.written.append((t, MAIN, Mark(t, kind, root.number, status, 0, 0, 0)))
    records = script.records()
    check_all(records)
    assert [(r.status, r.active_stage) for r in records] == [("error", "decode"), ("error", "tokenize")]
    assert [(r.http_status, r.error_type) for r in records] == [(200, "400"), (200, "400")]


def test_a_stop_string_in_the_last_token_of_all() -> None:
    """The engine says length, the client is told stop."""
    script = Script().run(Ask(output=6), Ask(output=6))
    sequence = script.roots[0].seqs[0]
    assert sequence.freed is not None
    t = sequence.freed + MS
    script.written.append((t, MAIN, Mark(t, marks.FINISHED, sequence.number, marks.finish_code(Reason.STOP), 0, 0, 0)))
    records = script.records()
    check_all(records)
    assert [(r.finish_reason, r.output_tokens) for r in records] == [("stop", 6), ("length", 6)]
    assert [marks.finish_code(reason) for reason in (Reason.OTHER, None)] == [0, 0]


def test_a_freeing_that_went_unseen_keeps_no_answered_call_open() -> None:
    """The engine is idle from then on, so no step says that the request has left it."""
    record = Script().run(Ask()).records(drop=kinds(marks.FREE, marks.LEAVE))[0]
    check_all([record])
    assert (record.status, record.stage("detokenize").state) == ("ok", "measured")
    assert {record.stage("decode").state, record.stage("teardown").state} == {"not_observable"}


def test_an_exception_that_leaves_the_application() -> None:
    script = Script().run(Ask(output=90, abort_at=30 * MS))
    script.written = [w for w in script.written if getattr(w[2], "kind", None) != marks.DISCONNECT]
    script.change(marks.END, lambda mark: mark._replace(a=1))
    record = script.records()[0]
    check_all([record])
    assert (record.status, record.active_stage, record.error_type) == ("error", "decode", "_OTHER")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("until", [m * MS // 4 for m in range(1, 130, 3)])
def test_a_running_request_is_in_flight_in_the_stage_it_is_in(until: int, depth: int) -> None:
    script = Script(depth=depth).run(Ask(prompt=70), Ask(at=2 * MS, stream=False))
    whole = script.records()
    assembler = script.assembler()
    for mark, pid in script.read():
        if mark.t <= until:
            assembler.take(mark, pid)
    assembler.steps()
    for record in assembler.in_flight():
        check_all([record])
        index = int(record.span_id, 16) - 0x1000
        final = whole[index]
        if record.status == "ok":
            continue
        assert record.status == "in_flight" and record.active_stage is not None
        for stage, later in zip(record.stages, final.stages, strict=True):
            if stage.state == "measured":
                assert (stage.start_ms, stage.duration_ms) == (later.start_ms, later.duration_ms)
        active = final.stage(record.active_stage)
        if active.start_ms is not None and active.duration_ms is not None:
            # What is known of a step comes with its output; until then it looks as if it were still in it.
            now = (until - script.roots[index].started) / 1e6
            assert record.active_stage == "prefill" or active.start_ms + active.duration_ms >= now - 0.5


GROUPS = {
    "http": (marks.HANDLER,),
    "render": (marks.RENDER, marks.TOKENIZE, marks.TOKENIZE_RUN, marks.TOKENIZED),
    "template": (marks.RENDER,),
    "pool": (marks.TOKENIZE_RUN,),
    "outputs": (marks.OUTPUTS, marks.STOPPED),
    "sampling": (marks.SAMPLING,),
    "arrive": (marks.ARRIVE,),
    "kv": (marks.LOOKUP, marks.BLOCKS),
    "schedule": (marks.ENQUEUE, marks.STEP, marks.JOIN, marks.LEAVE, marks.UPDATE, marks.FREE, marks.PREEMPT),
    "worker": (marks.EXECUTE, marks.FORWARD, marks.LM_HEAD, marks.SAMPLE_CALL, marks.SAMPLE, marks.EMBEDDING),
    "runner": (marks.FORWARD, marks.LM_HEAD, marks.SAMPLE),
    "head": (marks.LM_HEAD,),
    "embedding": (marks.EMBEDDING,),
}
UNSEEN = {
    "http": ["http_receive"],
    "render": ["chat_template", "tokenize"],
    "template": ["chat_template"],
    "pool": [],
    "outputs": [],
    "sampling": [],
    "arrive": [],
    "kv": ["admission", "kv_allocate"],
    "schedule": ["embedding", "prefill", "lm_head", "sample", "detokenize", "decode", "teardown"],
    "worker": ["embedding", "prefill", "lm_head", "sample"],
    "runner": ["embedding", "prefill", "lm_head", "sample"],
    "head": ["lm_head"],
    "embedding": ["embedding"],
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_a_hook_that_did_not_work_costs_its_own_stages_only(group: str) -> None:
    script = Script().run(Ask(), Ask(at=3 * MS, output=3))
    whole = script.records()
    records = script.records(drop=kinds(*GROUPS[group]))
    check_all(records)
    for record, full in zip(records, whole, strict=True):
        assert (record.status, record.active_stage) == ("ok", None)
        assert record.e2e_ms == full.e2e_ms
        lost = [s.key for s in record.stages if s.state == "not_observable"]
        assert lost == UNSEEN[group]
        if group != "http":
            assert (record.ttft_ms, record.ttft_kind) == (full.ttft_ms, "streamed")


def test_without_the_join_there_is_still_the_call() -> None:
    script = Script().run(Ask())
    records = script.records(drop=kinds(marks.ADD))
    check_all(records)
    assert len(records) == 1 and records[0].status == "ok"
    assert [s.state for s in records[0].stages[:3]] == ["measured"] * 3
    assert {s.state for s in records[0].stages[3:]} == {"not_observable"}
    assert (records[0].output_tokens, records[0].ttft_ms) == (None, None)


def test_the_marks_of_the_first_chunk_are_lost() -> None:
    """The rest must not pass for a short prefill of a prompt that was in the cache."""
    script = Script(budget=16).run(Ask(prompt=50))
    first = script.steps[0].number
    record = script.records(drop=lambda mark: first in (mark.key, mark.a))[0]
    check_all([record])
    assert (record.cached_tokens, record.prefill_ms) == (None, None)
    assert record.stage("prefill").state == "not_observable"


def test_the_marks_of_the_first_token_are_lost() -> None:
    """The second token's step must not pass for the first one's."""
    script = Script().run(Ask())
    first = script.steps[0].number
    record = script.records(drop=lambda mark: first in (mark.key, mark.a))[0]
    check_all([record])
    assert record.ttft_kind == "streamed" and record.output_tokens == 6
    lost = [s.key for s in record.stages if s.state == "not_observable"]
    assert lost == ["embedding", "prefill", "lm_head", "sample", "detokenize"]


def test_the_engines_bookkeeping_of_the_first_token_is_lost() -> None:
    script = Script().run(Ask())
    first = script.steps[0].number
    record = script.records(drop=lambda mark: mark.kind == marks.UPDATE and mark.key == first)[0]
    check_all([record])
    assert record.stage("detokenize").state == record.stage("sample").state == "not_observable"
    assert record.ttft_kind == "streamed" and len(record.token_times_ms) == 5
    # Nobody saw it come back: the second token's return is not to pass for it.
    script = Script().run(Ask(stream=False))
    record = script.records(drop=lambda mark: mark.kind == marks.UPDATE and mark.key == first)[0]
    check_all([record])
    assert (record.ttft_ms, record.ttft_kind, record.stage("lm_head").state) == (None, None, "not_observable")


def test_a_lost_change_of_the_batch_is_not_guessed() -> None:
    """That twenty tokens were computed in one step does not say that there were as many in the next."""
    record = Script().run(Ask()).records(drop=lambda mark: mark.kind == marks.JOIN and mark.b == 1)[0]
    check_all([record])
    assert record.stage("prefill").attributes["tokens"] == 20
    assert (record.output_tokens, len(record.token_times_ms)) == (6, 1)


def test_a_step_that_came_too_late_gives_no_token() -> None:
    """Asynchronous scheduling composes one too many; that another one was lost does not make room for it."""
    script = Script(depth=2).run(Ask(output=6))
    lost = script.steps[2].number
    record = script.records(drop=lambda mark: mark.kind == marks.UPDATE and mark.key == lost)[0]
    check_all([record])
    assert len(record.token_times_ms) == 5


def test_readmission_after_an_eviction_is_no_admission() -> None:
    script = Script().run(Ask(evict=(2,)), Ask(output=12))
    first = min(t for t, _, mark in script.written if getattr(mark, "kind", 0) == marks.BLOCKS)
    record = script.records(drop=lambda mark: mark.kind == marks.BLOCKS and mark.t == first)[0]
    check_all([record])
    assert [record.stage(key).state for key in ("admission", "kv_allocate")] == ["not_observable"] * 2
    assert record.queue_ms is None and record.stage("prefill").state == "measured"


def test_a_lost_last_send_is_no_earlier_end() -> None:
    script = Script().run(Ask())
    sends = script.roots[0].sends
    record = script.records(drop=lambda mark: mark.kind == marks.SENT and mark.t >= sends[2])[0]
    check_all([record])
    assert {record.stage("decode").state, record.stage("teardown").state} == {"not_observable"}


def test_dead_processes_are_told_by_their_id() -> None:
    script = Script().run(Ask())
    script.dead.add(API)
    assert script.records()[0].status == "ok", "it had returned before"


def test_what_was_done_until_it_was_given_up() -> None:
    script = Script().run(Ask(output=90, abort_at=80 * MS))
    record = script.records()[0]
    check_all([record])
    decode = record.stage("decode")
    assert decode.attributes["interrupted"] and decode.attributes["steps"] > 10
    assert decode.attributes["split_ms"]["forward"] > 0.5 * (decode.duration_ms or 0)
