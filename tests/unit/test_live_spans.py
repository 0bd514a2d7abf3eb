"""Live spans of the host's own provider: what it sees while a request runs, and what is added when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import NoOpTracerProvider, ProxyTracerProvider, SpanKind

from stagetrace import parents
from stagetrace.exporting import Health
from stagetrace.model import RequestRecord, RunRecord
from stagetrace.stages import STAGES
from stagetrace_otlp import live, spans
from stagetrace_otlp.live import LiveRoot, LiveSpans
from tests.unit.hosts import START, Counted, Host, Noting
from tests.unit.scripted import MS, Ask, Script

CALLER = parents.of_headers({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1"})


def as_of(root: LiveRoot, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records under the ids that the root was given."""
    return [replace(r, trace_id=f"{root.trace_id:032x}", span_id=f"{root.span_id:016x}") for r in records]


def played(*asks: Ask, **more: Any) -> list[RequestRecord]:
    return Script(**more).run(*asks).records()


def shape(made: Sequence[ReadableSpan]) -> dict[str, Any]:
    """All that a span says but its ids; its parent by name."""
    names = {span.context.span_id: span.name for span in made}
    found = {}
    for span in made:
        above = names.get(span.parent.span_id) if span.parent else None
        events = [(e.name, dict(e.attributes or {}), e.timestamp) for e in span.events]
        links = [(link.context.span_id, dict(link.attributes or {})) for link in span.links]
        attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in (span.attributes or {}).items()}
        key = span.name if above is None or above.startswith("chat") else f"{above}/{span.name}"
        found[key] = (
            above,
            span.kind,
            attributes,
            span.start_time,
            span.end_time,
            events,
            links,
            span.status.status_code,
        )
    return found


@pytest.mark.parametrize(
    "ask",
    [Ask(output=20, slower=2 * MS), Ask(n=3), Ask(refuse="parameters"), Ask(abort_at=15 * MS, output=50)],
    ids=["answered", "three sequences", "refused", "aborted"],
)
def test_the_provider_gets_what_an_exporter_gets(ask: Ask) -> None:
    host = Host()
    records = played(ask)
    root = host.live.begin("chat", None, records[0].start_unix_ns)
    assert root is not None and host.spans == ()
    records = as_of(root, records)
    host.live.run(RunRecord("session", "paper", model="tiny"))
    host.live.requests(records)
    expected = spans.trace(records, Resource({}), "paper")
    assert shape(host.spans) == shape(expected)
    assert len(host.spans) == len(expected)
    assert {span.resource.attributes["service.name"] for span in host.spans} == {"host"}
    assert {span.context.trace_id for span in host.spans} == {0xABC}
    assert host.spans[-1].context.span_id == root.span_id == 0x1000, "the root ends after its children"
    host.live.requests(records)
    host.live.close()
    assert len(host.spans) == len(expected), "once"


def test_the_host_sees_the_root_from_its_first_moment_on() -> None:
    noting = Noting()
    host = Host(noting)
    host.begin()
    assert noting.started == ["chat"]
    host.live.run(RunRecord("session", "paper", model="tiny"))
    host.begin()
    assert noting.started == ["chat", "chat tiny"], "the model's name, once it is known"


def test_its_own_spans_nest_below_the_root() -> None:
    host = Host()
    root = host.begin()
    token = root.attach()
    with host.provider.get_tracer("host").start_as_current_span("theirs"):
        pass
    root.detach(token)
    assert trace.get_current_span() is trace.INVALID_SPAN
    (theirs,) = host.spans
    assert theirs.parent is not None and theirs.parent.span_id == root.span_id


def test_whose_child_the_root_is() -> None:
    host = Host()
    kept = context.attach(context.set_value("the host's", 1))
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(5, 6, False, trace.TraceFlags(1)))):
        found = parents.of_current_span()
        roots = [host.begin(caller) for caller in (CALLER, found, None)]
    context.detach(kept)
    given, current, none = (root.span for root in roots)
    assert isinstance(given, Span) and isinstance(current, Span) and isinstance(none, Span)
    assert given.parent is not None and given.parent.is_remote
    assert (given.context.trace_id, given.parent.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    assert given.parent.trace_state.to_header() == "v=1"
    assert current.parent is not None and (current.context.trace_id, current.parent.span_id) == (5, 6)
    assert none.parent is None and none.context.trace_id == 0xABC, "who is not trusted is no parent"
    assert {root.context.get("the host's") for root in roots} == {1}
    assert {root.span.kind for root in roots if isinstance(root.span, Span)} == {SpanKind.SERVER}


def test_its_sampler_decides() -> None:
    noting = Noting()
    host = Host(noting, sampler=ParentBased(ALWAYS_OFF))
    root = host.begin()
    assert not root.sampled and root.span_id == 0x1000 and root.trace_id == 0xABC
    host.live.requests(as_of(root, played(Ask())))
    host.live.close()
    assert noting.started == [] and host.spans == ()
    kept = host.begin(CALLER)
    assert kept.sampled
    host.live.requests(as_of(kept, played(Ask())))
    assert len(host.spans) == 13


@pytest.mark.parametrize("provider", [NoOpTracerProvider(), ProxyTracerProvider()], ids=["no-op", "proxy"])
def test_a_provider_that_makes_no_spans(provider: Any) -> None:
    made = LiveSpans(provider, Health())
    assert made.begin("chat", None, START) is None
    assert made.begin("chat", CALLER, START) is None, "the caller's ids are not ours to use"


def test_ids_that_are_given_out_twice() -> None:
    host = Host(ids=Counted(step=0))
    first = host.begin()
    assert host.live.begin("chat", None, START) is None
    host.live.requests(as_of(first, played(Ask())))
    assert len(host.spans) == 14, "the second span has ended without stages"
    assert host.live.begin("chat", None, START) is not None


@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize("name", ["prefill", "chat tiny"])
def test_a_processor_that_raises_costs_a_call_its_spans_and_no_other(name: str, at: str) -> None:
    host = Host(Noting(name, at=at))
    one, two = host.begin(), host.begin()
    records = [*as_of(one, played(Ask())), *as_of(two, played(Ask()))]
    host.live.requests(records)
    assert host.health.spans_dropped.keys() <= {"ZeroDivisionError"}
    assert not (one.span.is_recording() or two.span.is_recording()), "both roots have ended"
    if at == "start" and name == "chat tiny":
        assert len(host.spans) == 26
        with pytest.raises(ZeroDivisionError):
            host.live.run(RunRecord("session", "paper", model="tiny"))
            host.begin()
    else:
        assert host.health.spans_dropped["ZeroDivisionError"] >= 2


def running(record: RequestRecord) -> RequestRecord:
    return replace(record, status="in_flight", e2e_ms=None, active_stage="decode")


def test_what_still_runs_at_the_end_is_ended_as_it_is() -> None:
    host = Host()
    known, unknown = host.begin(), host.begin()
    (record,) = as_of(known, played(Ask()))
    host.live.requests([running(record)])
    assert host.spans == ()
    host.live.close()
    assert len(host.spans) == 14
    ended = {span.context.span_id: span for span in host.spans if span.kind is SpanKind.SERVER}
    attributes = ended[known.span_id].attributes
    assert attributes is not None and attributes["stagetrace.status"] == "in_flight"
    assert unknown.span_id in ended


def test_sequences_are_waited_for() -> None:
    host = Host()
    root = host.begin()
    one, two = as_of(root, played(Ask(n=2)))
    host.live.requests([one, running(two)])
    assert host.spans == ()
    host.live.requests([running(one), running(two), one, two])
    assert sum(span.kind is SpanKind.SERVER for span in host.spans) == 1


def test_a_root_whose_marks_were_lost_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    host.begin()
    host.live.flush()
    assert host.spans == ()
    monkeypatch.setattr(live, "LOST_S", -1.0)
    host.live.flush()
    assert [span.name for span in host.spans] == ["chat"]
    assert host.live.begin("chat", None, START) is not None


def test_all_twelve_are_there() -> None:
    host = Host()
    root = host.begin()
    host.live.requests(as_of(root, played(Ask())))
    assert {span.name for span in host.spans} >= {stage.key for stage in STAGES}
