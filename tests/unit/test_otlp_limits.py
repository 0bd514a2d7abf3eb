"""How much of a trace goes out: limits of the environment, of receivers and viewers; and what is said of the rest."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from typer.testing import CliRunner

from stagetrace.assemble.worst import WORST
from stagetrace.cli import app
from stagetrace.collect import sinks
from stagetrace.exporting import Health, Options
from stagetrace.model import RequestRecord, RunRecord
from stagetrace.store import StoreWriter
from stagetrace_otlp import spans
from tests.receivers import TRACE_BYTES, attributes, check_rules, receiver, spans_of
from tests.unit.scripted import MS, Ask, Script

RESOURCE = Resource({"service.name": "paper"})
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def one(*asks: Ask) -> list[RequestRecord]:
    return Script().run(*asks).records()


def sent(records: list[RequestRecord], dropped: Counter[str] | None = None) -> dict[str, Any]:
    """The spans of one call by name, as a receiver decodes them; every rule holds."""
    message = encode_spans(spans.trace(records, RESOURCE, "paper", dropped=dropped))
    check_rules([message])
    found = {span.name: span for span in spans_of([message])}
    return {**found, "root": next(iter(found.values()))}


# ---------------------------------------------------------------- of the environment


@pytest.mark.parametrize("name", ["OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT"])
def test_the_first_attributes_are_kept_and_the_others_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = one(Ask())
    whole = sent([record])
    monkeypatch.setenv(name, "4")
    cut = sent([record])
    for key, span in cut.items():
        assert attributes(span) == dict(list(attributes(whole[key]).items())[:4]), key
        assert span.dropped_attributes_count == len(whole[key].attributes) - len(span.attributes), key
    assert cut["root"].dropped_attributes_count > 20
    assert {"gen_ai.operation.name", "gen_ai.request.model"} < attributes(cut["root"]).keys()


def test_the_number_of_events_and_of_their_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = one(Ask(output=20, slower=2 * MS))
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "1")
    decode = sent([record])["decode"]
    assert (len(decode.events), decode.dropped_events_count) == (2, WORST - 2)
    assert {(len(event.attributes), event.dropped_attributes_count) for event in decode.events} == {(1, 5)}
    assert decode.dropped_attributes_count == 0


def test_the_number_of_links_and_of_their_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGETRACE_TRUST_TRACEPARENT", "0")
    (record,) = one(Ask(traceparent=CALLER))
    monkeypatch.setenv("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "0")
    root = sent([record])["root"]
    ((link,), missing) = root.links, root.dropped_links_count
    assert (len(link.attributes), link.dropped_attributes_count, missing) == (0, 1, 0)
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "0")
    root = sent([record])["root"]
    assert (len(root.links), root.dropped_links_count) == (0, 1)


@pytest.mark.parametrize("name", ["OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"])
def test_the_length_of_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = one(Ask())
    whole = attributes(sent([record])["root"])
    monkeypatch.setenv(name, "3")
    cut = attributes(sent([record])["root"])
    assert cut.keys() == whole.keys()
    assert cut == {**whole, **{k: v[:3] for k, v in whole.items() if isinstance(v, str)}, **lists(cut)}
    assert [v.string_value for v in cut["gen_ai.response.finish_reasons"].values] == ["len"]


def lists(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if hasattr(value, "values")}


BAD = "OTEL_SPAN_EVENT_COUNT_LIMIT"


def test_a_limit_that_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(BAD, "many")
    said = f"{BAD} must be a non-negative integer but got many"
    with pytest.raises(sinks.ExportError, match=f"^{said}$"):
        sinks.build(Options(otlp="http://127.0.0.1:9"), os.environ, lambda line: None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    heard: list[str] = []
    assert sinks.build(Options(), os.environ, heard.append) == []
    assert heard == [f"{said}; nothing is exported by otlp"]
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    (metrics,) = sinks.build(Options(), os.environ, heard.append)
    metrics.close()
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RunRecord("s"))
        writer.write_requests(one(Ask()))
    done = CliRunner().invoke(app, ["export", str(tmp_path / "s.db"), "-o", str(tmp_path / "out")])
    assert isinstance(done.exception, sinks.ExportError) and str(done.exception) == f"--format otlp-json: {said}"
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- of receivers and viewers


def test_a_call_of_very_many_sequences_stays_small_and_says_so() -> None:
    records = one(Ask(n=128, output=3))
    assert len(records) == 128
    health = Health()
    with receiver() as endpoint:
        (sink,) = sinks.build(Options(otlp=endpoint.url, health=health), os.environ, lambda line: None)
        sink.run(RunRecord("s", "paper", "1", "tiny"))
        sink.requests(records)
        sink.close()
        check_rules(endpoint.traces())
        found = endpoint.spans()
    root = attributes(next(span for span in found if not span.parent_span_id))
    shown = sum(span.name.startswith("sequence ") for span in found)
    assert shown + root["stagetrace.sequences_left_out"] == 128 and 290 <= len(found) <= 300
    # The root, three shared stages; each sequence a span of its own and nine stages.
    assert len(found) + root["stagetrace.spans_left_out"] == 1 + 3 + 128 * 10
    assert health.spans_dropped == {"trace_spans": root["stagetrace.spans_left_out"]}


def test_a_trace_of_very_long_texts_stays_small_and_says_so() -> None:
    records = one(Ask(n=12))
    for record in records:
        for row in record.stages[3:]:
            row.attributes |= {f"key{n}": "\u4e2d" * 2000 for n in range(100)}
    dropped = Counter[str]()
    found = sent(records, dropped)
    root = attributes(found["root"])
    assert 0 < root["stagetrace.sequences_left_out"] < 12
    assert (
        dropped
        == {"trace_bytes": root["stagetrace.spans_left_out"]}
        == {"trace_bytes": 10 * root["stagetrace.sequences_left_out"]}
    )
    whole = [spans.trace([record], RESOURCE) for record in records]
    assert sum(encode_spans(trace).ByteSize() for trace in whole) > TRACE_BYTES, "it would have been too large"


def test_a_usual_call_says_nothing_of_limits() -> None:
    dropped = Counter[str]()
    found = sent(one(Ask(n=3)), dropped)
    assert not dropped and not [name for name in attributes(found["root"]) if name.endswith("left_out")]
    assert {span.dropped_attributes_count for span in found.values()} == {0}
