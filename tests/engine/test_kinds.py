"""Requests and scheduling of every kind: what each record must say, beside what its client saw.

One server, with four slots, few blocks and a small budget of tokens a step, answers its kinds one at a time, then what
takes several requests at once, then a mix of everything, and ends. What drafts and what pools: test_other_servers.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import ceil
from statistics import median
from typing import Any

import pytest

from stagetrace import load
from tests.engine.conftest import NAME, Live, Starter
from tests.engine.ends import told_to_end
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
    text,
    together,
    usage,
)  # fmt: skip
from tests.engine.serving import get, send
from tests.engine.ship import Ship
from tests.invariants import end_of, violations
from tests.randomised import mix
from tests.randomised.run import random_run
from tests.receivers import receiver

SLOTS, BUDGET, BLOCKS, BLOCK = 4, 256, 24, 128
GENERATING = (
    "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET), "--num-gpu-blocks-override", str(BLOCKS),
    "--scheduling-policy", "priority", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--enable-scale-out",
)  # fmt: skip
COMPLETION, RESPONSES = "/v1/completions", "/v1/responses"


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
    with receiver() as received:
        yield from starter.start(
            "plain", traced=True, extra=GENERATING, received=received, VLLM_ENABLE_RESPONSES_API_STORE="1"
        )


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

    def test_where_the_first_text_left_the_server_is_where_the_client_got_it(
        self, live: Live, kinds: dict[str, Answered]
    ) -> None:
        pairs = [(a.client.ttft_ms, a.records[0].ttft_ms) for a in kinds.values() if a.kind.ttft == "streamed"]
        assert all(client is not None for client, _ in pairs)
        late = [client - ours for client, ours in pairs if client is not None and ours is not None]
        for again in range(3):  # on a busy machine it is the client that waits for a CPU
            if -1 <= median(late) <= 3:
                break
            asked = [send(live.port, chat(live, 60, 9, 120 + 8 * again + i)) for i in range(8)]
            late = [c.ttft_ms - r.ttft_ms for c, r in zip(asked, live.records(asked), strict=True)]
        else:
            pytest.fail(f"ms from a text's way out to its client: {late}")
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
        for ahead, record in enumerate(records[SLOTS:]):
            admission = record.stage("admission")
            assert end_of(admission, record) >= ends[0], "nobody had left"
            # Those who got slots may have had them already when these two came.
            assert admission.attributes["queue_depth"] >= ahead
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
        bodies = {"later": chat(live, 30, 5, 240, priority=9), "sooner": chat(live, 30, 5, 241, priority=1)}
        records = together(live, bodies, after=SLOTS)
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
        records = together(live, bodies, after=0)
        admission = records["hard"].stage("admission").attributes
        assert admission["reason"] == "grammar" and admission["wait_ms"] > 5
        assert [v for r in records.values() for v in violations(r, complete=True)] == []

    def test_somebody_elses_prompt_stalls_a_stream(self, live: Live, kinds: dict[str, Answered]) -> None:
        bodies = {"victim": chat(live, 30, 400, 260), "culprit": chat(live, 2300, 2, 261)}
        records = together(live, bodies, after=0)
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

    def test_a_random_mix(self, live: Live, kinds: dict[str, Answered]) -> None:
        """The short form of `make random`."""
        outcome = random_run(Ship.joining(live), mix.generated(live.prompts), count=60, number=20)
        assert outcome.problems == []
        assert {status for status, _ in outcome.endings} == {"ok", "aborted", "error"}

    def test_a_server_that_is_told_to_end(self, live: Live, kinds: dict[str, Answered]) -> None:
        """This comes last: SIGTERM, with all slots taken and two requests waiting."""
        told_to_end(Ship.joining(live), SLOTS)


def preemptions(live: Live) -> int:
    """The engine's own count."""
    lines = get(live.port, "/metrics")[1].splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total")))
