"""Requests and scheduling of every kind: what each record must say, beside what its client saw.

Three servers: one that generates, with four slots, few blocks and a small budget of tokens a step, one that drafts
tokens, and one that pools. Each answers its kinds one at a time, then what takes several requests at once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from math import ceil
from statistics import median
from typing import Any

import pytest

from stagetrace import load
from tests.engine.conftest import NAME, Live, Starter
from tests.engine.kinds import (
    CHAT,
    IDS_ONLY,
    NO_TEMPLATE,
    Answered,
    Kind,
    adds_up,
    ask_all,
    at_once,
    chat,
    check,
    reasons,
    stored,
    text,
    together,
    usage,
)  # fmt: skip
from tests.engine.serving import get, send
from tests.invariants import end_of, violations

SLOTS, BUDGET, BLOCKS, BLOCK = 4, 256, 24, 128
GENERATING = (
    "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET), "--num-gpu-blocks-override", str(BLOCKS),
    "--scheduling-policy", "priority", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
DRAFTING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
COMPLETION, RESPONSES = "/v1/completions", "/v1/responses"
#: Stages of what is pooled.
POOLED = dict.fromkeys(("lm_head", "sample", "detokenize", "decode"), "not_applicable")


SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]},
    },
}


def generated(live: Live) -> dict[str, Kind]:
    """Kinds of a server that generates."""
    body, ids = live.body(60, 8, seed=100, chat=False), list(range(10, 60))
    whole = live.body(60, 8, seed=100, chat=False, stream=False)
    json_format = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {**SCHEMA, "additionalProperties": False}},
    }
    stop = send(live.port, chat(live, 40, 40, 101)).text[15:18]
    answer = {"model": NAME, "max_output_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    plain = {"temperature": 0.0, "ignore_eos": False}
    named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}, **plain}
    of_completions: dict[str, Any] = {"path": COMPLETION, "operation": "text_completion", "states": NO_TEMPLATE}
    several = {**whole, "prompt": [text(live, n, 110 + n) for n in (30, 200, 60)]}
    turns = [text(live, 200, 102), "an answer", "and then?"]
    messages = [{"role": r, "content": c} for r, c in zip(("user", "assistant", "user"), turns, strict=True)]
    return {
        "chat": Kind(CHAT, chat(live, 60, 20, 103)),
        "chat-whole": Kind(CHAT, chat(live, 60, 20, 104, stream=False), ttft="internal"),
        "chat-usage-in-each-chunk": Kind(
            CHAT, chat(live, 60, 9, 105, stream_options={"include_usage": True, "continuous_usage_stats": True})
        ),
        "one-token": Kind(CHAT, chat(live, 60, 1, 106), states={"decode": "not_applicable"}),
        "first-turn": Kind(CHAT, {**chat(live, 60, 6, 107), "messages": messages[:1]}),
        "third-turn": Kind(CHAT, {**chat(live, 60, 6, 107), "messages": messages}),
        "n": Kind(CHAT, chat(live, 60, 8, 108, n=3, temperature=0.8), sequences=3, ttft="internal"),
        "logprobs": Kind(CHAT, chat(live, 60, 8, 109, logprobs=True, top_logprobs=2)),
        "prompt-logprobs": Kind(CHAT, chat(live, 300, 4, 110, stream=False, prompt_logprobs=1), ttft="internal"),
        "completion": Kind(body=body, **of_completions),
        "echo": Kind(body={**whole, "echo": True, "logprobs": 1}, ttft="internal", **of_completions),
        "echo-streamed": Kind(body={**body, "echo": True}, **of_completions),
        "token-ids": Kind(COMPLETION, {**body, "prompt": ids}, "text_completion", IDS_ONLY),
        "several-prompts": Kind(body=several, sequences=3, ttft="internal", **of_completions),
        "several-prompts-n": Kind(
            COMPLETION, {**body, "prompt": [ids, ids[:20]], "n": 2, "temperature": 0.5}, "text_completion", IDS_ONLY,
            sequences=4, ttft="internal",
        ),
        "stop-string": Kind(CHAT, chat(live, 40, 40, 101, stop=[stop]), finish="stop"),
        "stop-string-whole": Kind(
            CHAT, chat(live, 40, 40, 101, stop=[stop], stream=False), finish="stop", ttft="internal"
        ),
        "json": Kind(CHAT, chat(live, 60, 60, 111, response_format=json_format, **plain), finish="stop"),
        "tool": Kind(CHAT, chat(live, 60, 60, 112, **named), finish="stop"),
        "responses": Kind(RESPONSES, {**answer, "input": text(live, 60, 113)}, ttft="internal"),
        "responses-streamed": Kind(RESPONSES, {**answer, "input": text(live, 60, 114), "stream": True}),
        "responses-background": Kind(
            RESPONSES, {**answer, "input": text(live, 60, 115), "background": True, "store": True}, ttft="internal"
        ),
        "messages": Kind(
            "/v1/messages",
            {"model": NAME, "messages": messages[:1], "max_tokens": 8, "temperature": 0.0, "stream": True},
        ),
    }  # fmt: skip


NAMES = (
    "chat", "chat-whole", "chat-usage-in-each-chunk", "one-token", "first-turn", "third-turn", "n", "logprobs",
    "prompt-logprobs", "completion", "echo", "echo-streamed", "token-ids", "several-prompts", "several-prompts-n",
    "stop-string", "stop-string-whole", "json", "tool", "responses", "responses-streamed", "messages",
)  # fmt: skip


@pytest.fixture(scope="module")
def live(starter: Starter) -> Iterator[Live]:
    yield from starter.start("plain", traced=True, extra=GENERATING, VLLM_ENABLE_RESPONSES_API_STORE="1")


@pytest.fixture(scope="module")
def kinds(live: Live) -> dict[str, Answered]:
    warm = [live.body(50, 4, seed=90), live.body(50, 4, seed=91, chat=False)]
    for body in warm:
        send(live.port, body)
    return ask_all(live, generated(live))


class TestGenerated:
    """Each by itself."""

    @pytest.mark.parametrize("name", NAMES)
    def test_its_record(self, name: str, kinds: dict[str, Answered]) -> None:
        check(kinds[name])

    def test_prompts_are_counted_as_the_api_does(self, kinds: dict[str, Answered]) -> None:
        for name, answered in kinds.items():
            if name == "responses-background":
                continue  # answered before it is counted
            prompts = [r.prompt_tokens or 0 for r in answered.records]
            n = answered.kind.body.get("n", 1)
            assert sum(prompts) == usage(answered.client)[0] * (n if n > 1 else 1), name
        assert [r.prompt_tokens for r in kinds["several-prompts-n"].records] == [50, 50, 20, 20]

    def test_an_earlier_turn_is_cached(self, kinds: dict[str, Answered]) -> None:
        assert kinds["first-turn"].record.cached_tokens == 0
        assert kinds["third-turn"].record.cached_tokens == BLOCK
        assert kinds["third-turn"].record.stage("chat_template").attributes["messages"] == 3

    def test_where_the_first_text_left_the_server_is_where_the_client_got_it(self, kinds: dict[str, Answered]) -> None:
        pairs = [(a.client.ttft_ms, a.records[0].ttft_ms) for a in kinds.values() if a.kind.ttft == "streamed"]
        assert all(client is not None for client, _ in pairs)
        late = [client - ours for client, ours in pairs if client is not None and ours is not None]
        assert -1 <= median(late) <= 3, late
        # A tool's call is sent when the parser has read enough of it, long after the first token.
        tool = kinds["tool"].record
        assert tool.token_times_ms[0] == pytest.approx(tool.ttft_ms, abs=1e-3)
        assert tool.stage("detokenize").attributes["emit_ms"] > 10

    def test_sampling_parameters_and_grammar(self, kinds: dict[str, Answered]) -> None:
        grammar = {name: a.records[0].stage("sample").attributes["grammar"] for name, a in kinds.items()}
        assert {name for name, constrained in grammar.items() if constrained} == {"json", "tool"}
        assert kinds["n"].records[0].stage("sample").attributes["temperature"] == pytest.approx(0.8)

    def test_a_stop_string_is_an_abort_to_the_engine_only(self, kinds: dict[str, Answered]) -> None:
        for name in ("stop-string", "stop-string-whole"):
            record = kinds[name].record
            assert record.output_tokens is not None and record.output_tokens < 40
            assert record.stage("teardown").attributes["finish_reason"] == "stop"

    def test_a_response_in_the_background_lasts_until_it_is_done(self, kinds: dict[str, Answered]) -> None:
        background = kinds["responses-background"]
        record = background.record
        assert violations(record, complete=True) == []
        assert (record.status, record.output_tokens, record.request_id) == ("ok", 12, background.client.response_id)
        assert record.ttft_ms is not None and record.e2e_ms is not None and record.e2e_ms > record.ttft_ms
        assert {s.state for s in record.stages} == {"measured"}

    def test_roots_are_what_was_sent(self, live: Live, kinds: dict[str, Answered]) -> None:
        names = [r.external_id for r in load(live.store).requests if r.external_id in kinds]  # type: ignore[arg-type]
        assert len(names) == sum(a.kind.sequences for a in kinds.values())


class TestScheduled:
    """Several at once."""

    def test_a_prompt_in_chunks_and_again_out_of_the_cache(self, live: Live, kinds: dict[str, Answered]) -> None:
        body = chat(live, 1500, 5, 200)
        cold = together(live, {"chunked": body})["chunked"]
        warm = together(live, {"cached": body})["cached"]
        facts = cold.stage("prefill").attributes
        assert (facts["chunks"], facts["tokens"], cold.cached_tokens) == (ceil(1500 / BUDGET), 1500, 0)
        assert facts["gaps_ms"] > 0 and cold.gaps_ms["between_chunks"] == pytest.approx(facts["gaps_ms"])
        facts = warm.stage("prefill").attributes
        assert (facts["chunks"], facts["tokens"], warm.cached_tokens) == (1, 1500 - 1408, 1408)
        assert cold.stage("kv_allocate").attributes["blocks"] == ceil(1500 / BLOCK)
        for record in (cold, warm):
            assert violations(record, complete=True) == []
            adds_up(record)

    def test_no_slot(self, live: Live, kinds: dict[str, Answered]) -> None:
        records = at_once(live, "slots", 60, *[30] * (SLOTS + 2))
        assert reasons(records)[SLOTS:] == ["no_slot"] * 2 and "no_slot" not in reasons(records)[:SLOTS]
        ends = sorted(end_of(r.stage("decode"), r) for r in records)
        for record in records[SLOTS:]:
            admission = record.stage("admission")
            assert end_of(admission, record) >= ends[0], "nobody had left"
            assert admission.attributes["queue_depth"] >= 1
            whole = admission.attributes["hand_off_ms"] + admission.attributes["wait_ms"]
            assert whole == pytest.approx(admission.duration_ms)

    def test_the_budget_of_tokens(self, live: Live, kinds: dict[str, Answered]) -> None:
        """Each of these takes up a step."""
        records = at_once(live, "budget", 3, *[BUDGET + 3] * SLOTS)
        assert reasons(records).count("token_budget") >= 2

    def test_no_blocks(self, live: Live, kinds: dict[str, Answered]) -> None:
        """Two that hold most of the blocks, and two that have to wait: one for blocks, one behind him."""
        records = at_once(live, "blocks", 200, 1250, 1250, 1000, 1000)
        assert reasons(records)[2:] == ["no_blocks"] * 2

    def test_priority(self, live: Live, kinds: dict[str, Answered]) -> None:
        """Who matters more comes first, though he came last."""
        usual = threading.Thread(target=at_once, args=(live, "usual", 400, *[30] * SLOTS), kwargs={"priority": 5})
        usual.start()
        time.sleep(0.3)
        records = together(
            live, {"later": chat(live, 30, 5, 240, priority=9), "sooner": chat(live, 30, 5, 241, priority=1)}, 0.1
        )
        usual.join(120)
        later, sooner = records["later"].stage("admission"), records["sooner"].stage("admission")
        assert later.attributes["reason"] == sooner.attributes["reason"] == "no_slot"
        assert records["later"].start_unix_ns < records["sooner"].start_unix_ns
        assert later.duration_ms > sooner.duration_ms

    def test_a_grammar_that_takes_long(self, live: Live, kinds: dict[str, Answered]) -> None:
        fields = {f"k{i}": {"type": "string", "pattern": f"^[a-z]{{{i + 1},{i + 40}}}$"} for i in range(30)}
        hard = {"json": {"type": "object", "properties": fields}}
        bodies = {
            "stream": chat(live, 30, 100, 250),
            "hard": chat(live, 30, 5, 251, structured_outputs=hard, ignore_eos=False),
        }
        records = together(live, bodies, 0.1)
        admission = records["hard"].stage("admission").attributes
        assert admission["reason"] == "grammar" and admission["wait_ms"] > 5
        assert [v for r in records.values() for v in violations(r, complete=True)] == []

    def test_somebody_elses_prompt_stalls_a_stream(self, live: Live, kinds: dict[str, Answered]) -> None:
        bodies = {"victim": chat(live, 30, 400, 260), "culprit": chat(live, 2300, 2, 261)}
        records = together(live, bodies, 0.3)
        victim, culprit = records["victim"], records["culprit"]
        decode = victim.stage("decode").attributes
        assert decode["split_ms"]["stalled"] > 0
        blamed = decode["stalled_by"][0]
        assert (blamed["request_id"], blamed["trace_id"], blamed["span_id"]) == (
            culprit.request_id, culprit.trace_id, culprit.span_id
        )  # fmt: skip
        assert 0.5 * 2300 < blamed["tokens"] <= 2300
        assert len(decode["worst_steps"]) == 5
        assert violations(victim, complete=True) == []
        adds_up(victim)

    def test_preemption_and_recomputation(self, live: Live, kinds: dict[str, Answered]) -> None:
        before = preemptions(live)
        records = at_once(live, "evicted", 300, *[600] * SLOTS)
        assert sum(r.preemptions for r in records) == preemptions(live) - before > 0
        for record in records:
            assert record.output_tokens == 300
            assert record.stage("admission").attributes["requeues"] == record.preemptions
            split = record.stage("decode").attributes["split_ms"]
            lost = split["preempted"] + record.gaps_ms.get("preempted", 0.0)
            assert (lost > 0) == (record.preemptions > 0), split
            adds_up(record)
        steps = load(live.store).steps  # type: ignore[arg-type]
        assert sum(step.preempted for step in steps) >= sum(r.preemptions for r in records)


def preemptions(live: Live) -> int:
    """The engine's own count."""
    lines = get(live.port, "/metrics")[1].splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total")))


@pytest.fixture(scope="module")
def drafting(starter: Starter) -> Iterator[Live]:
    extra = ("--speculative-config", json.dumps(DRAFTING))
    yield from starter.start("plain", traced=True, extra=extra)


def test_speculative_decoding(drafting: Live) -> None:
    """Some steps have several tokens, which share their time; nothing else is special about them."""
    again = {"messages": [{"role": "user", "content": "one two three four five six seven " * 8}]}
    regex = {"structured_outputs": {"regex": "(abc ){10}"}, "ignore_eos": False}
    kinds = {
        "spec-warm": Kind(CHAT, chat(drafting, 50, 5, 300)),
        "spec-plain": Kind(CHAT, chat(drafting, 100, 40, 301)),
        "spec-again": Kind(CHAT, {**chat(drafting, 50, 60, 302), **again}),
        "spec-again-whole": Kind(CHAT, {**chat(drafting, 50, 60, 302, stream=False), **again}, ttft="internal"),
        "spec-regex": Kind(CHAT, chat(drafting, 50, 60, 303, **regex), finish="stop"),
    }
    found = ask_all(drafting, kinds)
    for answered in found.values():
        check(answered)
        decode = answered.record.stage("decode").attributes
        assert decode["tokens"] == (answered.record.output_tokens or 0) - 1
        assert 0 < decode["steps"] <= decode["tokens"]
    facts = found["spec-regex"].record.stage("decode").attributes
    assert facts["steps"] < 0.7 * facts["tokens"], "drafts of so regular a text are accepted"
    assert found["spec-regex"].record.token_times_ms == sorted(found["spec-regex"].record.token_times_ms)
    records = together(drafting, {f"spec-{i}": {**chat(drafting, 50, 50, 310 + i), **again} for i in range(4)}, 0.01)
    assert [v for r in records.values() for v in violations(r, complete=True)] == []
    for record in records.values():
        adds_up(record)


@pytest.fixture(scope="module")
def pooling(starter: Starter) -> Iterator[Live]:
    yield from starter.start("plain", traced=True, extra=("--runner", "pooling", "--convert", "embed"))


def pooled(live: Live) -> dict[str, Kind]:
    """Kinds of a server that embeds."""
    short, longer, longest = (text(live, tokens, 400 + tokens) for tokens in (60, 300, 2500))
    embeds: dict[str, Any] = {"path": "/v1/embeddings", "operation": "embeddings", "finish": "stop", "ttft": None}
    scores: dict[str, Any] = {"states": NO_TEMPLATE | POOLED, "finish": "stop", "ttft": None}
    return {
        "embed": Kind(body={"model": NAME, "input": short}, states=NO_TEMPLATE | POOLED, **embeds),
        "embed-several": Kind(
            body={"model": NAME, "input": [short, longer, longest]}, states=NO_TEMPLATE | POOLED, sequences=3, **embeds
        ),
        "embed-ids": Kind(body={"model": NAME, "input": list(range(10, 60))}, states=IDS_ONLY | POOLED, **embeds),
        "embed-messages": Kind(
            body={"model": NAME, "messages": [{"role": "user", "content": short}]}, states=POOLED, **embeds
        ),
        "pooling": Kind("/pooling", {"model": NAME, "input": short}, "pooling", **scores),
        "score": Kind("/v1/score", {"model": NAME, "text_1": short, "text_2": longer}, "score", sequences=2, **scores),
        "rerank": Kind(
            "/rerank", {"model": NAME, "query": short, "documents": [longer, short]}, "rerank", sequences=3, **scores
        ),
    }  # fmt: skip


def test_what_is_pooled(pooling: Live) -> None:
    """Nothing is sampled, sent in pieces or decoded; the prompt is all there is."""
    found = ask_all(pooling, pooled(pooling))
    for name, answered in found.items():
        check(answered)
        assert sum(r.prompt_tokens or 0 for r in answered.records) == usage(answered.client)[0], name
        for record in answered.records:
            assert (record.output_tokens, record.ttft_ms, record.coverage_ttft) == (0, None, None)
            assert record.prefill_ms is not None and record.queue_ms is not None
            prefill = record.stage("prefill").attributes
            assert prefill["tokens"] == record.prompt_tokens - record.cached_tokens
    refused = send(pooling.port, pooling.body(20, 3), {"x-request-id": "no-chat"})
    (record,) = stored(pooling, ["no-chat"])["no-chat"]
    assert (refused.status, record.status, record.http_status) == (404, "error", 404)
    assert violations(record) == []
