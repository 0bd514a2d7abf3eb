"""A server that drafts tokens, and one that pools: what their records must say, beside what the client saw."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import NAME, Live, Starter
from tests.engine.ends import crowd, ended, kill
from tests.engine.kinds import (
    CHAT,
    IDS_ONLY,
    NO_TEMPLATE,
    Kind,
    adds_up,
    ask_all,
    chat,
    check,
    stored,
    text,
    together,
    usage,
)
from tests.engine.serving import send
from tests.engine.ship import Ship
from tests.invariants import violations
from tests.randomised import mix
from tests.randomised.run import random_run
from tests.receivers import receiver

DRAFTING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
#: Stages of what is pooled.
POOLED = dict.fromkeys(("lm_head", "sample", "detokenize", "decode"), "not_applicable")


@pytest.fixture(scope="module")
def drafting(starter: Starter) -> Iterator[Live]:
    extra = ("--speculative-config", json.dumps(DRAFTING))
    with receiver() as received:
        yield from starter.start("plain", traced=True, extra=extra, received=received)


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
    records = together(drafting, {f"spec-{i}": {**chat(drafting, 50, 50, 310 + i), **again} for i in range(4)})
    assert [v for r in records.values() for v in violations(r, complete=True)] == []
    for record in records.values():
        adds_up(record)


def test_a_killed_engine(drafting: Live) -> None:
    """This comes after all else that is asked of it."""
    ship = Ship.joining(drafting)
    calls = crowd(ship)
    kill(ship, "EngineCore")
    records = ended(ship, calls, code=0)
    assert {r.status for r in records} == {"error"}
    assert [r.active_stage for r in records] == ["decode"] * 8 + ["admission"] * 2
    assert all(r.e2e_ms is not None and r.finish_reason is None for r in records)
    assert {r.error_type for r in records} <= {"500", "engine_died"}


@pytest.fixture(scope="module")
def pooling(starter: Starter) -> Iterator[Live]:
    with receiver() as received:
        extra = ("--runner", "pooling", "--convert", "embed")
        yield from starter.start("plain", traced=True, extra=extra, received=received)


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
    outcome = random_run(Ship.joining(pooling), mix.pooled(pooling.prompts), count=20, number=21)
    assert outcome.problems == []
