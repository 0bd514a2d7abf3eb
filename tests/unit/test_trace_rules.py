"""The rules for exported traces find what is wrong: a checker that never objects would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from stagetrace.model import RequestRecord
from stagetrace_otlp import spans
from tests.invariants import trace_violations, unaccounted
from tests.receivers import spans_of
from tests.unit.scripted import MS, Ask, Script


def traced(ask: Ask) -> tuple[list[RequestRecord], list[Any]]:
    records = Script().run(ask).records()
    return records, list(spans_of([encode_spans(spans.trace(records, Resource({"service.name": "paper"})))]))


ASKS = {
    "chat": Ask(), "several": Ask(n=3), "evicted": Ask(output=20, evict=(4,)), "pooled": Ask(kind="embedding"),
    "offline": Ask(kind="offline"), "given up": Ask(output=90, abort_at=40 * MS),
    "several given up": Ask(n=2, output=90, abort_at=40 * MS),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKS)
def test_what_we_send_is_sound(name: str) -> None:
    records, sent = traced(ASKS[name])
    assert trace_violations(sent) == []
    assert unaccounted([records[0].trace_id], records, sent) == []


def _drop(name: str) -> Callable[[list[Any]], Any]:
    return lambda sent: sent.remove(next(span for span in sent if span.name == name))


def _change(of: str, /, **to: Any) -> Callable[[list[Any]], None]:
    """``to`` is added to times and put in the place of anything else."""

    def change(sent: list[Any]) -> None:
        span = next(span for span in sent if span.name == of)
        for field, value in to.items():
            setattr(span, field, getattr(span, field) + value if isinstance(value, int) else value)

    return change


def _again(name: str) -> Callable[[list[Any]], Any]:
    return lambda sent: sent.append(next(span for span in sent if span.name == name))


WRONG: dict[str, tuple[str, Callable[[list[Any]], Any], str]] = {
    "no root": ("chat", _drop("chat tiny"), "0 roots"),
    "two roots": ("chat", _again("chat tiny"), "2 roots"),
    "a stage twice": ("chat", _again("decode"), "two spans with one id"),
    "a stage that is missing": ("chat", _drop("sample"), "twelve stages"),
    "a stage of nobody's": ("chat", _change("sample", parent_span_id=b"x" * 8), "has no parent"),
    "an end before the start": ("chat", _change("decode", end_time_unix_nano=-10**9), "negative duration"),
    "a start before the root's": ("chat", _change("http_receive", start_time_unix_nano=-1000), "is before"),
    "an end after the root's": ("chat", _change("teardown", end_time_unix_nano=10**9), "is after"),
    "an overlap": ("chat", _change("tokenize", end_time_unix_nano=10**6), "before tokenize ends"),
    "an overlap of a sequence": ("several", _change("kv_allocate", end_time_unix_nano=10**6), "before kv_all"),
    "an embedding outside": ("chat", _change("embedding", start_time_unix_nano=-(10**6)), ""),
    "a stage after the last one": ("given up", _change("decode", name="teardown"), "it ended in decode"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    ask, spoil, said = WRONG[name]
    _, sent = traced(ASKS[ask])
    spoil(sent)
    found = trace_violations(sent)
    assert len(found) == 1 and said in found[0], found


def test_what_is_missing_or_too_much_is_found() -> None:
    records, sent = traced(ASKS["several"])
    trace, root = records[0].trace_id, records[0].span_id
    assert unaccounted([trace, "other"], records, sent) == ["other: sent 1 times, stored 0"]
    assert unaccounted([], records, sent) == [f"{trace}: sent 0 times, stored 1"]
    assert unaccounted([trace], records, []) == [f"{trace}: root {root} was exported 0 times"]
    assert unaccounted([trace], records, [*sent, sent[0]]) == [f"{trace}: root {root} was exported 2 times"]
    assert unaccounted([trace], records, sent, unsampled=[trace]) == [f"{trace}: root {root} was exported 1 times"]
    assert unaccounted([trace], records, [], unsampled=[trace]) == []
    running = [*records[:2], RequestRecord(**{**vars(records[2]), "status": "in_flight"})]
    assert unaccounted([trace], running, sent) == [f"{records[2].request_id}: in flight"]
