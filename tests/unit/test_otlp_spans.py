"""From records to spans on the wire: what is there, where it hangs, when it was, and how large it may get."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from stagetrace.assemble.worst import WORST
from stagetrace.model import RequestRecord, RunRecord
from stagetrace.stages import BY_KEY, STAGES
from stagetrace.store import StoreWriter, load
from stagetrace_otlp import lines, spans
from stagetrace_otlp.pipeline import BATCH_BYTES, messages, weight
from tests.receivers import attributes, check_rules, spans_of
from tests.unit.scripted import MS, Ask, Script

RESOURCE = Resource({"service.name": "paper"})
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


def sent(records: list[RequestRecord]) -> list[Any]:
    """The spans of one call, as a receiver decodes them; every rule holds."""
    message = encode_spans(spans.trace(records, RESOURCE, "paper"))
    check_rules([message])
    return list(spans_of([message]))


def one(*asks: Ask, **more: Any) -> list[RequestRecord]:
    return Script(**more).run(*asks).records()


def test_a_call_is_a_root_and_twelve_stages_with_the_times_of_the_record() -> None:
    (record,) = one(Ask(output=6))
    root, *stages = sent([record])
    assert root.name == "chat tiny" and root.kind == 2 and not root.parent_span_id
    assert root.trace_id.hex() == record.trace_id and root.span_id.hex() == record.span_id
    assert root.start_time_unix_nano == record.start_unix_ns
    assert record.e2e_ms is not None
    assert root.end_time_unix_nano - root.start_time_unix_nano == round(record.e2e_ms * 1e6)
    assert [span.name for span in stages] == [stage.key for stage in STAGES]
    for span in stages:
        row = record.stage(span.name)
        assert row.start_ms is not None and row.duration_ms is not None
        assert span.parent_span_id == root.span_id
        assert span.start_time_unix_nano == record.start_unix_ns + round(row.start_ms * 1e6)
        assert attributes(span)["stagetrace.duration_ms"] == row.duration_ms
        assert attributes(span)["stagetrace.stage.number"] == BY_KEY[span.name].number
        took = span.end_time_unix_nano - span.start_time_unix_nano
        assert span.name == "prefill" or abs(took - row.duration_ms * 1e6) <= 1


def test_the_root_says_what_the_conventions_have_a_name_for() -> None:
    (record,) = one(Ask(prompt=20, output=6, cached=16))
    found = attributes(sent([record])[0])
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.provider.name"] == "paper"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.usage.input_tokens"] == 20 and found["gen_ai.usage.output_tokens"] == 6
    assert found["gen_ai.usage.cache_read.input_tokens"] == 16
    assert found["gen_ai.response.id"] == record.request_id
    assert found["gen_ai.request.temperature"] == pytest.approx(0.7)
    assert [v.string_value for v in found["gen_ai.response.finish_reasons"].values] == ["length"]
    assert record.coverage is not None and found["stagetrace.coverage"] == round(record.coverage, 9)
    assert found["stagetrace.ttft_ms"] == record.ttft_ms
    known = {
        "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model",
        "gen_ai.response.id", "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens", "gen_ai.request.temperature",
        "gen_ai.request.top_p", "gen_ai.request.top_k", "gen_ai.request.max_tokens", "http.route", "error.type",
        "http.response.status_code",
    }  # fmt: skip
    assert {name for name in found if not name.startswith("stagetrace.")} <= known


def test_the_prefill_span_reaches_from_its_first_chunk_to_its_last() -> None:
    (record,) = [r for r in one(Ask(prompt=200), Ask(prompt=40, at=1), budget=64) if r.prompt_tokens == 200]
    span = next(span for span in sent([record]) if span.name == "prefill")
    assert record.prefill_ms is not None and attributes(span)["stagetrace.chunks"] > 1
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(record.prefill_ms * 1e6, abs=2)


def test_the_caller_s_span_is_the_root_s_parent() -> None:
    (record,) = one(Ask(traceparent=CALLER))
    root, *rest = sent([record])
    assert root.trace_id.hex() == "a" * 32 and root.parent_span_id.hex() == "b" * 16
    assert {span.trace_id.hex() for span in rest} == {"a" * 32}
    assert record.caller_sampled is True and not root.links


def test_the_caller_s_state_is_that_of_its_trace() -> None:
    """As the SDK hands it on: samplers write into it what each span stands for."""
    (record,) = one(Ask(traceparent=CALLER, tracestate="ot=th:8,vendor=a b"))
    assert {span.trace_state for span in sent([record])} == {"ot=th:8,vendor=a b"}
    (record,) = one(Ask(traceparent=CALLER, tracestate="no state, at all"))
    assert {span.trace_state for span in sent([record])} == {""}


def test_a_caller_that_is_not_trusted_is_linked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGETRACE_TRUST_TRACEPARENT", "0")
    (record,) = one(Ask(traceparent=CALLER, tracestate="vendor=1"))
    root, *rest = sent([record])
    assert root.trace_id.hex() == record.trace_id != "a" * 32 and not root.parent_span_id
    (link,) = root.links
    assert (link.trace_id.hex(), link.span_id.hex()) == ("a" * 32, "b" * 16)
    assert attributes(link) == {"stagetrace.link": "caller"}
    assert not any(span.links for span in rest)
    assert {span.trace_state for span in (root, *rest)} == {""}, "the caller's state is of the caller's trace"


def test_the_slowest_steps_are_events_of_the_decode_span() -> None:
    (record,) = one(Ask(output=20, slower=2 * MS))
    decode = next(span for span in sent([record]) if span.name == "decode")
    gaps = [b - a for a, b in zip(record.token_times_ms, record.token_times_ms[1:], strict=False)]
    worst = sorted(range(len(gaps)), key=lambda at: -gaps[at])[:WORST]
    found = {attributes(e)["stagetrace.token.index"]: attributes(e)["stagetrace.token.gap_ms"] for e in decode.events}
    assert {event.name for event in decode.events} == {"stagetrace.slow_step"}
    assert len(found) == WORST
    assert sorted(found.values()) == pytest.approx(sorted(gaps[at] for at in worst))
    for event in decode.events:
        index = attributes(event)["stagetrace.token.index"]
        assert abs(event.time_unix_nano - record.start_unix_ns - record.token_times_ms[index] * 1e6) <= 500
        assert (attributes(event)["stagetrace.step.cause"], attributes(event)["stagetrace.step.batch"]) == (
            "forward",
            1,
        )
    assert [e.time_unix_nano for e in decode.events] == sorted(e.time_unix_nano for e in decode.events)


def test_a_decode_links_to_whose_prefill_stalled_it() -> None:
    script = Script(budget=256).run(Ask(output=20), Ask(at=20 * MS, prompt=200, output=1))
    victim, culprit = script.records()
    decode = next(span for span in sent([victim]) if span.name == "decode")
    (link,) = decode.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (culprit.trace_id, culprit.span_id)
    said = attributes(link)
    stalled = victim.stage("decode").attributes["split_ms"]["stalled"]
    assert said.pop("stagetrace.stalled_by.ms") == pytest.approx(stalled)
    assert said == {
        "stagetrace.link": "stalled_by", "stagetrace.stalled_by.tokens": 200,
        "stagetrace.stalled_by.request_id": culprit.request_id,
    }  # fmt: skip
    (event,) = [e for e in decode.events if attributes(e)["stagetrace.step.cause"] == "stalled"]
    assert attributes(event)["stagetrace.step.stalled_by"] == culprit.request_id


def test_a_trace_out_of_a_store_is_the_one_that_was_sent(tmp_path: Path) -> None:
    """A store keeps tokens' times to a microsecond; so are those of the events, when they are sent at once too."""
    records = one(Ask(output=40, slower=1_234_567))
    assert any(time * 1e3 % 1 for time in records[0].token_times_ms)
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RunRecord("s", "paper", "1", "tiny"))
        writer.write_requests(records)
    assert sent(load(tmp_path / "s.db").requests) == sent(records)


def test_sequences_of_one_call_are_subtrees_of_one_root() -> None:
    records = one(Ask(n=3))
    found = sent(records)
    roots = [span for span in found if not span.parent_span_id]
    sequences = [span for span in found if span.name.startswith("sequence ")]
    assert len(roots) == 1 and len(sequences) == 3
    assert attributes(roots[0])["gen_ai.usage.output_tokens"] == sum(r.output_tokens or 0 for r in records)
    for span in sequences:
        inside = [each.name for each in found if each.parent_span_id == span.span_id]
        assert inside == [stage.key for stage in STAGES[3:]]
    assert [s.name for s in found if s.parent_span_id == roots[0].span_id][:3] == list(spans.SHARED)


@pytest.mark.parametrize(
    ("ask", "status", "error", "code"),
    [
        (Ask(refuse="parameters"), "error", "400", 0),
        (Ask(refuse="parameters", answer=503), "error", "503", 2),
        (Ask(refuse="parameters", answer=500, raises="a.Broken"), "error", "a.Broken", 2),
        (Ask(abort_at=15 * MS, output=50), "aborted", "aborted", 2),
    ],
    ids=["refused", "overloaded", "raised", "aborted"],
)
def test_a_call_that_was_not_answered_says_why_and_how_far_it_came(
    ask: Ask, status: str, error: str, code: int
) -> None:
    """That the request was bad is no error of a server's span; that its answer did not get out is one."""
    (record,) = one(ask)
    assert record.status == status
    root, *stages = sent([record])
    found = attributes(root)
    assert found["stagetrace.status"] == status and found["stagetrace.active_stage"] == record.active_stage
    assert (root.status.code, root.status.message) == (code, "")
    assert found["error.type"] == error and found["http.response.status_code"] == record.http_status
    missing = {row.key for row in record.stages if row.duration_ms is None}
    assert {span.name for span in stages} == {row.key for row in record.stages} - missing
    assert {key for key in BY_KEY if f"stagetrace.stage.{key}.state" in found} == missing


def test_one_sequence_that_failed_is_told_from_the_others() -> None:
    first, second = one(Ask(n=2))
    found = sent([first, replace(second, status="error", error_type="engine_error")])
    told = {span.name: (attributes(span).get("error.type"), span.status.code) for span in found}
    assert told["sequence 0"] == (None, 0)
    assert told["sequence 1"] == told[found[0].name] == ("engine_error", 2)
    assert attributes(sent(one(Ask()))[0]).get("error.type") is None


def test_what_the_wire_cannot_hold_does_not_get_there() -> None:
    (record,) = one(Ask())
    bad = replace(record, external_id="\udcff" * 3, model="m" * 10_000, cached_tokens=1 << 70, parent_span_id=None)
    bad.stages[3].attributes |= {"reason": "x" * 10_000, "none": None, "list": [1], "deep": {"a": {"b": 2}}}
    found = {span.name[:20]: span for span in sent([bad])}
    admission = attributes(found["admission"])
    assert len(admission["stagetrace.reason"]) == spans.MAX_TEXT and admission["stagetrace.deep.a.b"] == 2
    assert not {"stagetrace.none", "stagetrace.list"} & admission.keys()


def test_a_message_is_cut_before_it_gets_too_large() -> None:
    (record,) = one(Ask())
    record.stages[3].attributes |= {f"key{n}": "\u4e2d" * 2000 for n in range(100)}
    made = [span for _ in range(60) for span in spans.trace([record], RESOURCE)]
    assert sum(map(weight, made)) > 2 * BATCH_BYTES
    portions = list(messages(made, 512))
    assert [span for portion in portions for span in portion] == made and len(portions) > 2
    for portion in portions:
        size = encode_spans(portion).ByteSize()
        assert size <= sum(map(weight, portion)) + 1000, "the estimate is too low"
        assert size < 4 << 20
    assert [len(p) for p in messages(made[:7], 3)] == [3, 3, 1]


# ---------------------------------------------------------------- files


def test_the_json_file_has_one_object_a_line_in_the_official_shape() -> None:
    records = one(Ask(), Ask(n=2, at=MS), Ask(traceparent=CALLER, at=2 * MS))
    running = replace(records[0], status="in_flight", span_id="1" * 16)
    written = list(lines([*records, running], RunRecord("s", "paper", "1", "tiny")))
    assert len(written) == 3
    for line in written:
        assert "\n" not in line
        (resource,) = json.loads(line)["resourceSpans"]
        names = {a["key"]: a["value"] for a in resource["resource"]["attributes"]}
        assert names["service.name"] == {"stringValue": "paper"}
        for span in resource["scopeSpans"][0]["spans"]:
            assert len(span["traceId"]) == 32 and int(span["traceId"], 16)
            assert len(span["spanId"]) == 16 and int(span["spanId"], 16)
            assert isinstance(span["kind"], int) and isinstance(span["flags"], int)
            assert span["startTimeUnixNano"].isdigit() and span["endTimeUnixNano"].isdigit()
            for attribute in span["attributes"]:
                ((kind, value),) = attribute["value"].items()
                assert kind != "intValue" or isinstance(value, str)
    (resource,) = json.loads(written[2])["resourceSpans"]
    assert resource["scopeSpans"][0]["spans"][0]["parentSpanId"] == "b" * 16
