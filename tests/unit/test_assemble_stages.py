"""Stages of requests that end well: each is exactly where the script has put it, and says what it is otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from stagetrace import marks
from stagetrace.marks import Mark
from stagetrace.model import RequestRecord
from stagetrace.stages import FLOOR, STAGES
from tests.invariants import check_all
from tests.unit.scripted import DEVICE, MAIN, MS, US, Ask, Script, Seq, kinds

#: What a stage reads that the script has no truth for: a call that has none, a single token.
ABSENT = {"not_applicable", "fused"}

SCENARIOS: dict[str, tuple[dict[str, Any], list[Ask]]] = {
    "one": ({}, [Ask()]),
    "one token": ({}, [Ask(output=1)]),
    "completion": ({}, [Ask(kind="completion")]),
    "whole answer": ({}, [Ask(stream=False)]),
    "whole answer, one token": ({}, [Ask(stream=False, output=1)]),
    "offline": ({}, [Ask(kind="offline"), Ask(kind="offline", output=3)]),
    "n": ({}, [Ask(n=3), Ask(n=2, stream=False, output=2)]),
    "chunked": ({"budget": 16}, [Ask(prompt=50), Ask(at=3 * MS, prompt=33)]),
    "prefix hit": ({}, [Ask(prompt=50, cached=48), Ask(prompt=48, cached=48)]),
    "busy": ({"slots": 2, "budget": 24}, [Ask(at=i * 700 * US, prompt=30 + i, output=4 + i % 3) for i in range(9)]),
    "no blocks": ({}, [Ask(output=12), Ask(at=4 * MS, blocked=3)]),
    "asynchronous": ({"depth": 2}, [Ask(output=9), Ask(at=4 * MS), Ask(at=4 * MS, n=2, prompt=90)]),
    "asynchronous, chunked": ({"depth": 2, "budget": 16}, [Ask(prompt=50), Ask(at=1 * MS, prompt=20)]),
    "speculative": ({"drafts": 3}, [Ask(output=20), Ask(at=6 * MS, output=17, stream=False)]),
    "speculative, asynchronous": ({"drafts": 2, "depth": 2}, [Ask(output=20)]),
    "stop string": ({}, [Ask(output=30, stop_at=4), Ask(output=30, stop_at=3, stop_lag=9, stream=False)]),
    "stop string, first token": ({}, [Ask(output=30, stop_at=1)]),
    "stop string, asynchronous": ({"depth": 2}, [Ask(output=30, stop_at=4, stop_lag=5)]),
    "evicted": ({}, [Ask(evict=(3,), output=8), Ask(output=14)]),
    "evicted, asynchronous": ({"depth": 2}, [Ask(evict=(3,), output=8), Ask(output=14)]),
    "evicted twice": ({"budget": 12}, [Ask(evict=(2, 5), output=8, prompt=40), Ask(output=25)]),
    "passed over": ({}, [Ask(skip=(1, 3), output=7), Ask(output=9)]),
    "text comes late": ({}, [Ask(silent=3, output=8)]),
    "slow client": ({}, [Ask(slower=200 * US, output=12)]),
    "embeddings": ({"budget": 16}, [Ask(kind="embedding", prompt=50, n=2, stream=False), Ask(output=9)]),
    "grammar": ({}, [Ask(compiling=3, output=4), Ask(at=3 * MS, compiling=2), Ask(output=12)]),
    "embedding in a graph": ({"embedding": "fused"}, [Ask(), Ask(kind="completion")]),
}  # fmt: skip


def compare(record: RequestRecord, seq: Seq, started: int, device: str = "host") -> None:
    """Every stage the script knows of is there to the nanosecond, and no other is measured."""
    for stage in record.stages:
        if stage.key not in seq.truth:
            assert stage.state in ABSENT, stage
            continue
        start, duration = seq.truth[stage.key]
        by = "cuda_event" if device == "events" and 6 <= stage.number <= 9 else "host_clock"
        assert (stage.state, stage.source) == ("measured", by), stage
        assert stage.start_ms == pytest.approx((start - started) / 1e6, abs=2e-6), stage
        assert stage.duration_ms == pytest.approx(duration / 1e6, abs=2e-6), stage


@pytest.mark.parametrize("device", ["host", "events"])
@pytest.mark.parametrize("shuffle", [None, 1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_stage_is_where_it_was(name: str, shuffle: int | None, device: str) -> None:
    options, asks = SCENARIOS[name]
    script = Script(**options, device=device).run(*asks)
    records = script.records(shuffle)
    check_all(records, complete=True)
    known = [(root, seq) for root in script.roots for seq in root.seqs]
    assert len(records) == len(known)
    for record, (root, seq) in zip(records, known, strict=True):
        assert record.status == "ok", record
        assert record.output_tokens == seq.delivered
        assert record.prompt_tokens == seq.ask.prompt
        assert record.cached_tokens == min(seq.ask.cached, seq.ask.prompt - 1)
        assert record.finish_reason == ("stop" if seq.stopped or seq.ask.kind == "embedding" else "length")
        assert record.preemptions == len(seq.evictions)
        assert record.e2e_ms == pytest.approx(((root.sends or [root.ended])[-1] - root.started) / 1e6)  # type: ignore[operator]
        compare(record, seq, root.started, device)
        times = [(time - root.started) / 1e6 for time in seq.token_times]
        assert record.token_times_ms == pytest.approx(times, abs=2e-6)


def test_facts_of_a_plain_request() -> None:
    record = Script().run(Ask(prompt=20, output=6)).records()[0]
    facts = {s.key: {name: value for name, value in s.attributes.items() if name not in FLOOR} for s in record.stages}
    assert facts["http_receive"] == {"bytes": 200, "route": "/v1/chat", "stream": True, "n": 1, "max_tokens": 6}
    assert facts["chat_template"] == {"messages": 2, "characters": 80}
    assert facts["tokenize"] == {"prompt_tokens": 20, "pool_wait_ms": pytest.approx(0.03)}
    assert facts["admission"]["hand_off_ms"] + facts["admission"]["wait_ms"] == pytest.approx(
        record.stage("admission").duration_ms
    )
    assert facts["kv_allocate"] == {"blocks": 2, "block_size": 16, "cached_tokens": 0, "bytes": 8192}
    assert facts["embedding"] == {"rows": 20}
    assert {**facts["prefill"], "cost_share_ms": None} == {
        "tokens": 20, "chunks": 1, "batch": 1, "gaps_ms": 0.0, "cost_share_ms": None, "cache_bytes_written": 5120,
        "flop": None,
    }  # fmt: skip
    assert facts["sample"] == {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "grammar": False}
    first = record.stage("detokenize")
    parts = facts["detokenize"]["hand_back_ms"] + facts["detokenize"]["detokenize_ms"] + facts["detokenize"]["emit_ms"]
    assert parts == pytest.approx(first.duration_ms)
    assert (facts["decode"]["tokens"], facts["decode"]["steps"], facts["decode"]["batch"]) == (5, 5, 1.0)
    assert facts["teardown"] == {"finish_reason": "length", "blocks_held": 2, "blocks_freed": 1, "blocks_kept": 1}
    assert (record.request_id, record.operation, record.model) == ("cmpl-4096", "chat", "tiny")
    assert record.start_unix_ns == 1_700_000_000 * 10**9


def test_a_stage_carries_the_facts_the_table_names() -> None:
    record = Script().run(Ask()).records()[0]
    for stage in STAGES:
        assert set(stage.facts) <= record.stage(stage.key).attributes.keys()


def test_chunks_are_summed_and_the_gaps_between_them_are_nobodys() -> None:
    record = Script(budget=16).run(Ask(prompt=50)).records()[0]
    prefill = record.stage("prefill")
    assert prefill.attributes["chunks"] == 4 and prefill.attributes["tokens"] == 50
    assert prefill.attributes["gaps_ms"] > 1
    assert record.gaps_ms["between_chunks"] == prefill.attributes["gaps_ms"]
    assert record.prefill_ms == pytest.approx(
        prefill.duration_ms + record.stage("embedding").duration_ms + prefill.attributes["gaps_ms"]  # type: ignore[operator]
    )
    assert record.stage("kv_allocate").attributes["blocks"] == 1 + 1 + 1 + 1


def test_a_shared_forward_costs_its_share() -> None:
    record = Script().run(Ask(prompt=20), Ask(prompt=30)).records()[0]
    prefill = record.stage("prefill")
    assert prefill.attributes["batch"] == 2
    whole = prefill.duration_ms + record.stage("embedding").duration_ms  # type: ignore[operator]
    assert prefill.attributes["cost_share_ms"] == pytest.approx(whole * 20 / 50)


@pytest.mark.parametrize(
    ("options", "asks", "reason"),
    [
        ({}, [Ask()], "none"),
        ({}, [Ask(output=20), Ask(at=4 * MS)], "step_in_progress"),
        ({"slots": 1}, [Ask(output=9), Ask(at=MS)], "no_slot"),
        ({"budget": 16}, [Ask(prompt=64), Ask(at=MS)], "token_budget"),
        ({}, [Ask(output=20), Ask(at=4 * MS, blocked=3)], "no_blocks"),
        ({}, [Ask(compiling=20)], "grammar"),
        ({}, [Ask(output=20), Ask(at=4 * MS, compiling=3)], "grammar"),
        # Who stands behind somebody that has no room waits for the same.
        ({}, [Ask(output=20), Ask(at=4 * MS, blocked=4), Ask(at=4 * MS, compiling=2)], "no_blocks"),
        # For a slot until the first one is done, then for blocks: what it was for longest counts.
        ({"slots": 1}, [Ask(output=12), Ask(at=MS, blocked=1)], "no_slot"),
    ],
)
def test_why_a_request_waited(options: dict[str, Any], asks: list[Ask], reason: str) -> None:
    admission = Script(**options).run(*asks).records()[-1].stage("admission")
    assert admission.attributes["reason"] == reason


def test_what_has_no_such_stage_says_so() -> None:
    completion, offline, direct = (Script().run(Ask(kind=k)).records()[0] for k in ("completion", "offline", "direct"))
    assert completion.stage("chat_template").state == "not_applicable"
    assert [offline.stage(k).state for k in ("http_receive", "chat_template")] == ["not_applicable"] * 2
    assert offline.operation == "generate_content" and offline.ttft_kind == "internal"
    # Who calls the engine himself has tokenised before anybody looked.
    assert [s.state for s in direct.stages[:3]] == ["not_applicable", "not_applicable", "not_observable"]
    assert direct.status == "ok" and direct.stage("teardown").state == "measured"


def test_ids_instead_of_text_are_not_tokenised() -> None:
    script = Script().run(Ask(kind="completion"))
    script.change(marks.TOKENIZE, lambda mark: mark._replace(a=0))
    stage = script.records()[0].stage("tokenize")
    assert (stage.state, stage.attributes) == ("not_applicable", {"prompt_tokens": 20})


def test_ids_out_of_the_template_are_no_stage_of_their_own() -> None:
    script = Script().run(Ask())
    script.change(marks.TOKENIZE, lambda mark: mark._replace(a=0))
    record = script.records()[0]
    check_all([record], complete=True)
    assert (record.stage("tokenize").state, record.prompt_tokens) == ("fused", 20)
    assert record.stage("chat_template").attributes == {"messages": 2, "characters": None}


def test_embeddings_as_a_prompt_of_unknown_length_are_not_none() -> None:
    script = Script().run(Ask(kind="completion"))
    script.change(marks.ADD, lambda mark: mark._replace(b=-1))
    script.change(marks.TOKENIZED, lambda mark: mark._replace(a=-1))
    record = script.records()[0]
    check_all([record])
    assert record.prompt_tokens is None and record.stage("tokenize").attributes["prompt_tokens"] is None


def test_prompts_tokenised_one_by_one_are_one_stage() -> None:
    """And what is tokenised once the engine has something, for a later turn, is no part of it."""
    script = Script().run(Ask(n=2, stream=False))
    plain = script.records()[0]
    (first,) = [mark for _, _, mark in script.written if isinstance(mark, Mark) and mark.kind == marks.TOKENIZE]
    for delay, prompt in ((20 * US, 30), (50 * MS, 99)):
        for kind, after, value in ((marks.TOKENIZE, 0, 4 * prompt), (marks.TOKENIZED, 550 * US, prompt)):
            script._mark(MAIN, first.t + delay + after, kind, first.key, value)
    record = script.records()[0]
    check_all([record])
    before, stage = plain.stage("tokenize"), record.stage("tokenize")
    assert stage.attributes["prompt_tokens"] == 20 + 30
    assert stage.start_ms == before.start_ms
    assert stage.duration_ms == pytest.approx(0.57)


@pytest.mark.parametrize("shuffle", [None, 1, 2])
@pytest.mark.parametrize("output", [30, 2000])
def test_an_answer_in_the_background_lasts_until_the_engine_is_done(output: int, shuffle: int | None) -> None:
    script = Script().run(Ask(output=output, stream=False, background=MS))
    (record,) = script.records(shuffle)
    check_all([record], complete=True)
    assert (record.status, record.output_tokens, record.ttft_kind) == ("ok", output, "internal")
    last = max(mark.b for _, _, mark in script.written if isinstance(mark, Mark) and mark.kind == marks.OUTPUTS)
    assert record.e2e_ms == pytest.approx((last - script.roots[0].started) / 1e6)
    assert record.stage("http_receive").state == "measured"
    assert record.coverage is not None and record.coverage > 0.98


@pytest.mark.parametrize("drop", [(), (marks.EMBEDDING,)])
def test_a_gpu_without_events_claims_no_times(drop: tuple[int, ...]) -> None:
    script = Script(device="launches", depth=2).run(Ask(), Ask(at=2 * MS, kind="completion", prompt=90))
    records = script.records(drop=kinds(*drop))
    check_all(records, complete=True)
    for record in records:
        assert [record.stage(k).state for k in ("embedding", "prefill", "lm_head", "sample")] == ["not_observable"] * 4
        # The time of stages nobody saw is not called the result's way back.
        assert record.gaps_ms["prefill"] > 3 and "result" not in record.gaps_ms
        assert record.prefill_ms is None and record.status == "ok" and record.ttft_kind == "streamed"
        split = record.stage("decode").attributes["split_ms"]
        assert {split[k] for k in ("forward", "lm_head", "sample", "prepare", "stalled")} == {0.0}


@pytest.mark.parametrize("device", ["host", "events"])
def test_what_decode_is_made_of_is_by_the_same_clock(device: str) -> None:
    records = Script(device=device, depth=2).run(Ask(output=20), Ask(at=9 * MS, prompt=40)).records()
    check_all(records, complete=True)
    for record in records:
        facts = record.stage("decode").attributes
        assert facts["split_source"] == {"host": "host_clock", "events": "cuda_event"}[device]
        assert facts["split_ms"]["forward"] > facts["split_ms"]["lm_head"] > 0
        assert facts["split_ms"]["other"] < 0.05 * (record.stage("decode").duration_ms or 0)


def late(script: Script, ns: int, *wanted: int) -> list[RequestRecord]:
    """The records, when marks of these kinds say that it was ``ns`` later."""
    for kind in wanted:
        script.change(kind, lambda mark: mark._replace(a=mark.a + ns, b=mark.b + ns))
    records = script.records()
    check_all(records, complete=True)
    return records


@pytest.mark.parametrize("embedding", ["watched", "fused"])
def test_what_the_device_says_is_fitted_to_what_the_host_saw_and_says_so(embedding: str) -> None:
    """Its clock is known to some tens of microseconds: no stage is lost for that, and none is moved in silence."""
    wanted = (marks.FORWARD, marks.LM_HEAD, marks.SAMPLE, marks.EMBEDDING)
    for ns in (-400 * US, -160 * US, 90 * US, 4 * MS):
        script = Script(device="events", embedding=embedding).run(Ask(output=3))
        truth = {key: duration / 1e6 for key, (_, duration) in script.roots[0].seqs[0].truth.items()}
        (record,) = late(script, ns, *wanted)
        rows = [record.stage(key) for key in ("prefill", "lm_head", "sample")]
        assert {row.state for row in (*rows, record.stage("kv_allocate"), record.stage("detokenize"))} == {"measured"}
        moved = [row for row in rows if "clamped_ms" in row.attributes]
        assert moved and all(row.source == "cuda_event" and row.attributes["clamped_ms"] > 0 for row in moved)
        for row in rows:
            assert row in moved or row.duration_ms == pytest.approx(truth[row.key])


def test_chunks_that_the_device_had_at_once_are_one_after_the_other() -> None:
    """Where two steps are put in their place by two estimates, they can overlap by the difference."""
    script = Script(device="events", budget=16, embedding="fused").run(Ask(prompt=50))
    second = script.steps[1].number
    earlier = script.steps[1].forward[0] - script.steps[0].sample[1] + 2 * MS
    script.change(
        marks.FORWARD,
        lambda mark: mark._replace(a=mark.a - earlier, b=mark.b - earlier) if mark.key == second else mark,
    )
    record = script.records()[0]
    check_all([record], complete=True)
    prefill = record.stage("prefill")
    assert prefill.state == "measured" and prefill.attributes["clamped_ms"] > 0


@pytest.mark.parametrize("shuffle", [None, *range(8)])
def test_the_devices_clock_goes_before_the_hosts(shuffle: int | None) -> None:
    """Whichever is read first; and what is launched only is never taken for what was done."""
    script = Script(device="events").run(Ask())
    truth = script.roots[0].seqs[0].truth
    for step in script.steps:
        for clock in (0, marks.LAUNCHED):
            script._mark(DEVICE, step.schedule[1] + 50 * US, marks.FORWARD, step.number, 1, 2, clock)
    (record,) = script.records(shuffle)
    prefill = record.stage("prefill")
    assert (prefill.source, prefill.duration_ms) == ("cuda_event", pytest.approx(truth["prefill"][1] / 1e6))


def test_what_both_clocks_have_timed_is_by_the_hosts() -> None:
    """A chunk whose events could not be read, where the host computes itself."""
    script = Script(device="events", budget=16, embedding="fused").run(Ask(prompt=50, output=3))
    second = script.steps[1].number
    for kind in (marks.FORWARD, marks.LM_HEAD, marks.SAMPLE):
        script.change(kind, lambda mark: mark._replace(c=0) if mark.key == second else mark)
    (record,) = script.records()
    check_all([record], complete=True)
    assert [record.stage(key).source for key in ("prefill", "lm_head")] == ["host_clock", "cuda_event"]


def test_an_embedding_outside_the_forward_is_none() -> None:
    script = Script().run(Ask())
    script.change(marks.EMBEDDING, lambda mark: mark._replace(a=mark.a - MS, b=mark.b - MS))
    records = script.records()
    check_all(records)
    assert records[0].stage("embedding").state == "not_observable"
    assert records[0].stage("prefill").duration_ms == pytest.approx(2.8)


def test_an_embedding_that_is_known_of_some_chunks_only_is_none() -> None:
    script = Script(budget=16).run(Ask(prompt=50))
    second = script.steps[1].number
    record = script.records(drop=lambda mark: mark.kind == marks.EMBEDDING and mark.key == second)[0]
    check_all([record], complete=True)
    assert record.stage("embedding").state == "not_observable"
    # It is a part of the prefill then.
    assert record.stage("prefill").duration_ms == pytest.approx(4 * 2 + 50 * 0.04)


def test_the_first_token_arrives_when_ttft_ends() -> None:
    script = Script().run(Ask())
    script.change(marks.FIRST_TEXT, lambda mark: mark._replace(t=mark.t - 700))
    record = script.records()[0]
    check_all([record], complete=True)
    assert record.token_times_ms[0] == record.ttft_ms == pytest.approx(5.47 - 0.0007)


def test_a_stream_without_any_text_still_ends() -> None:
    records = Script().run(Ask(silent=99)).records()
    check_all(records, complete=True)
    assert (records[0].status, records[0].ttft_kind) == ("ok", "internal")


def test_several_prompts_in_one_call_are_sequences_of_one_request() -> None:
    script = Script().run(Ask(n=2, stream=True))
    # A batch of prompts: n is 1, and every prompt's sequence has index 0.
    script.change(marks.HANDLER, lambda mark: mark._replace(c=1))
    script.change(marks.ADD, lambda mark: mark._replace(d=0))
    records = script.records()
    check_all(records)
    assert [r.sequence for r in records] == [0, 1]
    # Nobody can tell whose the first text was.
    assert {r.ttft_kind for r in records} == {"internal"}


def test_the_callers_trace_is_joined_when_it_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    ask = Ask(traceparent=header, tracestate="vendor=1")
    own = f"{1:016x}{0x1000:016x}"
    record = Script().run(ask).records()[0]
    assert (record.trace_id, record.parent_span_id, record.caller_sampled) == (header[3:35], header[36:52], True)
    assert (record.tracestate, record.link_trace_id, record.link_span_id) == ("vendor=1", None, None)
    broken = Script().run(Ask(traceparent="00-zz-1-01", tracestate="vendor=1")).records()[0]
    assert (broken.trace_id, broken.parent_span_id, broken.tracestate) == (own, None, None)
    monkeypatch.setenv("STAGETRACE_TRUST_TRACEPARENT", "0")
    linked = Script().run(ask).records()[0]
    assert (linked.trace_id, linked.parent_span_id, linked.caller_sampled) == (own, None, None)
    assert (linked.link_trace_id, linked.link_span_id, linked.tracestate) == (header[3:35], header[36:52], "vendor=1")
