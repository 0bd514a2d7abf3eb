"""Whatever is asked for, in whatever order and however incompletely the marks come: no exception, no made-up number."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from stagetrace.exporting import calls
from stagetrace.marks import Mark, TextMark
from stagetrace.model import RequestRecord
from stagetrace.numbers import numbers
from stagetrace.store import Trace
from stagetrace_otlp import spans
from tests.invariants import check_all, trace_violations
from tests.receivers import spans_of
from tests.unit.scripted import API, CORE, MS, US, WORKER, Ask, Script

times = st.integers(0, 40 * MS)
few = st.integers(0, 4)

asks = st.builds(
    Ask,
    at=st.integers(0, 20 * MS),
    prompt=st.integers(1, 90),
    output=st.integers(1, 14),
    kind=st.sampled_from(["chat", "chat", "completion", "embedding", "offline", "direct"]),
    stream=st.booleans(),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    cached=st.sampled_from([0, 0, 16, 64]),
    identifier=st.sampled_from(["", "", "again"]),
    blocked=st.sampled_from([0, 0, 0, 2]),
    compiling=st.sampled_from([0, 0, 0, 3]),
    evict=st.lists(few, max_size=2).map(tuple),
    out=st.integers(1, 4),
    skip=st.lists(few, max_size=2).map(tuple),
    stop_at=st.none() | st.integers(1, 8),
    stop_lag=st.integers(1, 6),
    silent=st.sampled_from([0, 0, 1, 3, 99]),
    slower=st.sampled_from([0, 0, 50 * US, 900 * US]),
    abort_at=st.none() | st.none() | times,
    refuse=st.sampled_from([None, None, None, None, "body", "tokenize", "parameters"]),
)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    script = Script(
        depth=draw(st.sampled_from([1, 2])),
        budget=draw(st.sampled_from([8, 16, 64, 512])),
        slots=draw(st.sampled_from([1, 3, 8])),
        embedding=draw(st.sampled_from(["watched", "watched", "fused"])),
        device=draw(st.sampled_from(["host", "host", "launches", "events"])),
        drafts=draw(st.sampled_from([0, 0, 2])),
        engine_dies=draw(st.none() | st.none() | times),
    )
    wanted = draw(st.lists(asks, min_size=1, max_size=5))
    # An engine refuses an id that it has: the same one only one after the other.
    for index, ask in enumerate(wanted):
        if ask.identifier:
            ask.at = index * 400 * MS
        if ask.abort_at is not None:
            ask.abort_at += ask.at
    note(f"{ {k: v for k, v in vars(script).items() if not k.startswith('_') and k not in ('written', 'roots')} }")
    note("\n".join(map(str, wanted)))
    return script.run(*wanted)


def check_traces(records: list[RequestRecord]) -> None:
    """What is sent of them keeps to the same rules."""
    for call in calls(records):
        assert trace_violations(list(spans_of([encode_spans(spans.trace(call, Resource({})))]))) == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts(), st.none() | st.integers(0, 99))
def test_complete_timelines(script: Script, shuffle: int | None) -> None:
    records = script.records(shuffle)
    check_all(records, complete=not script.dead)
    check_traces(records)
    whole = [(root, seq) for root in script.roots for seq in root.seqs]
    asked = len(whole) + sum(1 for root in script.roots if not root.seqs)
    assert len(records) == asked
    for record in records:
        root = script.roots[int(record.span_id, 16) - 0x1000]
        # Whose caller holds the engine himself has no end of its own, if the engine was gone before it got there, or
        # never had it.
        endless = record.operation == "generate_content" and (script.dead or root.ask.refuse)
        assert record.status != "in_flight" or endless
        if record.status != "ok":
            continue
        seq = root.seqs[record.sequence]
        for stage in record.stages:
            if stage.key not in seq.truth or (script.device == "launches" and 6 <= stage.number <= 9):
                continue
            start, duration = seq.truth[stage.key]
            assert stage.start_ms is not None and stage.duration_ms is not None, stage
            assert abs(stage.start_ms - (start - root.started) / 1e6) < 2e-6, (stage, start - root.started)
            assert abs(stage.duration_ms - duration / 1e6) < 2e-6, (stage, duration)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    scripts(),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.02, 0.3, 0.9]),
    st.lists(st.integers(1, 70), max_size=3),
    st.lists(st.tuples(times, st.sampled_from([API, CORE, WORKER])), max_size=2),
    times | st.none(),
)
def test_incomplete_timelines(
    script: Script, seed: int, share: float, missing: list[int], deaths: list[tuple[int, int]], until: int | None
) -> None:
    """Marks lost one by one, hooks that did not work, processes that die, and a look in between."""
    chance = random.Random(seed)
    for at, pid in deaths:
        script.kill(at, pid)
    if not script.written:
        return
    assembler = script.assembler()
    looked = until is None
    for mark, pid in script.read(seed):
        if isinstance(mark, Mark) and (mark.kind in missing or chance.random() < share):
            continue
        if isinstance(mark, TextMark) and chance.random() < share / 2:
            continue
        assembler.take(mark, pid)
        if not looked and until is not None and mark.t > until:
            looked = True
            assembler.steps()
            check_all(assembler.in_flight())
            check_all(assembler.finished(until))
    steps = assembler.steps()
    check_all(assembler.in_flight())
    late = max(w[0] for w in script.written) + 3_000 * MS
    records = assembler.finished(late) + assembler.finished(late + 200 * MS)
    check_all(records)
    records += assembler.finished(late + 400 * MS, closing=True)
    check_all(records)
    check_traces(records)
    numbers(Trace(requests=records, steps=steps))
    assembler.forget(late + 10**12)
    assert not assembler.book.roots and not assembler.book.steps
