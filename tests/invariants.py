"""What must hold for every request record and every exported trace, whatever happened, and whoever recorded it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

from stagetrace.model import RequestRecord, StageRecord
from stagetrace.stages import BY_KEY, STAGES, STATES
from tests.receivers import attributes

#: The documented keys of one request, and of one stage, in `stages --json`.
REQUEST_KEYS = (
    "request_id", "external_id", "trace_id", "operation", "model", "status", "finish_reason", "active_stage",
    "prompt_tokens", "cached_tokens", "output_tokens", "start_unix_ns", "e2e_ms", "ttft_ms", "ttft_kind", "queue_ms",
    "prefill_ms", "itl_ms", "coverage", "coverage_ttft", "unattributed_ms", "preemptions", "sequence", "stages",
)  # fmt: skip
STAGE_KEYS = ("number", "key", "state", "source", "start_ms", "duration_ms", "attributes")
SOURCES = ("host_clock", "cuda_event", "estimated")
SPLIT = (
    "schedule", "dispatch", "prepare", "forward", "lm_head", "sample", "update", "stalled", "preempted", "other",
)  # fmt: skip
#: Operations that generate nothing.
POOLED = ("embeddings", "pooling", "classify", "score", "rerank")
#: Rounding of floats that count milliseconds.
EPS = 1e-3
#: A nanosecond, in ms: times are differences of whole nanoseconds.
NS = 2e-6


def violations(record: RequestRecord, complete: bool = False) -> list[str]:
    """Every broken rule, in words; empty when the record is sound.

    ``complete`` says that no mark was lost: then the tokens are all there, too.
    """
    found = []
    for rule in (_form, _states, _order, _ending, _sums, _decode, _worst, _tokens, _timers):
        try:
            rule(record)
        except AssertionError as broken:
            found.append(f"{record.request_id}: {rule.__name__[1:]}: {broken}")
    if complete and record.status == "ok" and len(record.token_times_ms) != record.output_tokens:
        found.append(f"{record.request_id}: {len(record.token_times_ms)} of {record.output_tokens} tokens have times")
    if complete and record.operation in POOLED and record.active_stage in ("lm_head", "sample", "detokenize", "decode"):
        found.append(f"{record.request_id}: it ended in {record.active_stage}, which what is pooled has not")
    if complete and record.ttft_kind == "internal" and record.ttft_ms is not None:
        first = record.token_times_ms[0]
        if abs(first - record.ttft_ms) > EPS:
            found.append(f"{record.request_id}: TTFT ends at {record.ttft_ms}, the first token is there at {first}")
    return found


def check(record: RequestRecord, complete: bool = False) -> None:
    """AssertionError with every rule that ``record`` breaks."""
    found = violations(record, complete)
    assert not found, "\n".join([*found, *map(str, record.stages), str(record)])


def check_all(records: Iterable[RequestRecord], complete: bool = False) -> None:
    """Every rule for every record, and that no two of them are the same sequence."""
    seen = set()
    for record in records:
        check(record, complete)
        identity = (record.trace_id, record.span_id, record.sequence)
        assert identity not in seen, f"two records of sequence {identity}"
        seen.add(identity)


def timed(record: RequestRecord) -> list[StageRecord]:
    """The stages that have times, the embedding apart: it lies inside the prefill."""
    return [s for s in record.stages if s.duration_ms is not None and s.key != "embedding"]


def end_of(stage: StageRecord, record: RequestRecord) -> float:
    """Where a stage ends. A prefill's duration leaves out the embedding and the gaps between its chunks."""
    assert stage.start_ms is not None and stage.duration_ms is not None
    end = stage.start_ms + stage.duration_ms
    if stage.key == "prefill":
        end += (stage.attributes["gaps_ms"] or 0.0) + (record.stage("embedding").duration_ms or 0.0)
    return end


def _form(record: RequestRecord) -> None:
    """What a reader of the JSON relies on."""
    out = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert not set(REQUEST_KEYS) - out.keys(), f"missing {set(REQUEST_KEYS) - out.keys()}"
    assert isinstance(out["start_unix_ns"], str) and out["start_unix_ns"].isdigit()
    assert [(s["number"], s["key"]) for s in out["stages"]] == [(s.number, s.key) for s in STAGES]
    for stage in out["stages"]:
        assert set(STAGE_KEYS) <= stage.keys() and isinstance(stage["attributes"], dict)
    assert out["itl_ms"].keys() == {"p50", "p95", "p99", "max"}
    assert out["status"] in ("ok", "aborted", "error", "in_flight")
    assert out["finish_reason"] != "unknown", "unknown is null"
    assert len(out["trace_id"]) == 32 and int(out["trace_id"], 16)


def _states(record: RequestRecord) -> None:
    for stage in record.stages:
        assert stage.state in STATES, stage
        has = stage.state in ("measured", "estimated")
        assert (stage.start_ms is not None) == (stage.duration_ms is not None) == has, stage
        assert (stage.source in SOURCES) if has else stage.source is None, stage
        assert stage.source != "estimated" or stage.state == "estimated", stage
        if has:
            assert stage.start_ms is not None and stage.duration_ms is not None
            assert stage.start_ms >= 0 and stage.duration_ms >= 0, stage
            missing = set(BY_KEY[stage.key].facts) - stage.attributes.keys()
            assert not missing, f"{stage.key} lacks {missing}"
    assert record.status != "ok" or record.active_stage is None
    # Nobody knows it of a call that the engine may have had without anybody's noticing.
    assert record.active_stage in BY_KEY or (record.active_stage is None and record.status != "in_flight")
    reached = [s.number for s in record.stages if s.duration_ms is not None]
    holes = [s for s in record.stages[: max(reached, default=0)] if s.state == "not_reached"]
    assert not holes, f"{holes} are before stage {max(reached)}, which was reached"


def _order(record: RequestRecord) -> None:
    """No overlap but the embedding's, and nothing outside the request."""
    reached = 0.0
    for stage in timed(record):
        assert stage.start_ms is not None and stage.start_ms >= reached - NS, f"{stage.key} starts before {reached}"
        reached = end_of(stage, record)
    if record.e2e_ms is not None:
        assert reached <= record.e2e_ms + NS, f"ends at {reached}, the request at {record.e2e_ms}"
    embedding, prefill = record.stage("embedding"), record.stage("prefill")
    if embedding.start_ms is not None and embedding.duration_ms is not None:
        assert prefill.start_ms is not None, "an embedding without the prefill around it"
        assert embedding.start_ms >= prefill.start_ms - NS
        assert embedding.start_ms + embedding.duration_ms <= end_of(prefill, record) + NS


def _ending(record: RequestRecord) -> None:
    """An aborted or failed request has a reason, and nothing after the stage it ended in."""
    assert (record.error_type is not None) == (record.status in ("error", "aborted")), record.error_type
    if record.active_stage is None:
        assert not [s.key for s in record.stages if s.state == "not_reached"]
        return
    for stage in record.stages[BY_KEY[record.active_stage].number :]:
        assert stage.state == "not_reached", f"{stage.key} is {stage.state}, it ended in {record.active_stage}"


def _sums(record: RequestRecord) -> None:
    """The parts and the whole."""
    if not record.e2e_ms:
        assert record.coverage is None and record.coverage_ttft is None and record.unattributed_ms is None
        return
    assert record.unattributed_ms is not None and record.coverage is not None
    whole = sum(s.duration_ms or 0.0 for s in record.stages)
    assert abs(whole + record.unattributed_ms - record.e2e_ms) <= EPS, (whole, record.unattributed_ms, record.e2e_ms)
    assert abs(sum(record.gaps_ms.values()) - record.unattributed_ms) <= EPS
    assert all(gap > 0 for gap in record.gaps_ms.values()), record.gaps_ms
    decode = record.stage("decode")
    other = (decode.attributes.get("split_ms") or {}).get("other", 0.0) if decode.duration_ms is not None else 0.0
    assert abs(record.coverage - (1 - (record.unattributed_ms + other) / record.e2e_ms)) <= 1e-9, record.coverage
    assert -1e-9 <= record.coverage <= 1 + 1e-9, record.coverage
    assert (record.coverage_ttft is None) == (record.ttft_ms is None), record.ttft_ms
    if record.coverage_ttft is not None and record.ttft_ms is not None:
        early = sum(s.duration_ms or 0.0 for s in record.stages[:10])
        assert abs(record.coverage_ttft - early / record.ttft_ms) <= 1e-9, (record.coverage_ttft, early)
        assert -1e-9 <= record.coverage_ttft <= 1 + 1e-9, record.coverage_ttft


def _decode(record: RequestRecord) -> None:
    stage = record.stage("decode")
    if stage.duration_ms is None:
        return
    assert stage.attributes["itl_ms"] == record.itl_ms
    split: dict[str, Any] | None = stage.attributes["split_ms"]
    assert split is not None or stage.attributes.get("interrupted")
    if split is None:
        return
    assert set(split) == set(SPLIT), set(split) ^ set(SPLIT)
    assert all(part >= 0 for part in split.values()), split
    assert abs(sum(split.values()) - stage.duration_ms) <= EPS, (split, stage.duration_ms)
    blamed = stage.attributes["stalled_by"]
    assert sum(one["ms"] for one in blamed) <= split["stalled"] + EPS, (blamed, split["stalled"])
    assert [one["ms"] for one in blamed] == sorted((one["ms"] for one in blamed), reverse=True)
    assert all(one["tokens"] > 0 and one["trace_id"] for one in blamed), blamed


def _worst(record: RequestRecord) -> None:
    """Each is a wait between two tokens there are, and none is longer than the longest."""
    times = record.token_times_ms
    worst = record.stage("decode").attributes.get("worst_steps") or []
    assert len(worst) <= 5 and [w["token"] for w in worst] == sorted({w["token"] for w in worst}), worst
    for one in worst:
        assert one["gap_ms"] > 0 and one["cause"] in (*SPLIT, "emit"), one
        assert one["batch"] >= 0 and one["prefill_tokens"] >= 0 and one["step"].isdigit(), one
        if times:  # which a record out of a JSON document has not, and one out of a store to a microsecond
            assert abs(times[one["token"]] - one["at_ms"]) <= EPS, one
            assert abs(times[one["token"]] - times[one["token"] - 1] - one["gap_ms"]) <= 2 * EPS, one
    if len(times) > 1 and record.stage("decode").duration_ms is not None:
        longest = max(after - before for before, after in pairwise(times))
        assert abs(longest - max((w["gap_ms"] for w in worst), default=0.0)) <= 2 * EPS, (longest, worst)


def _tokens(record: RequestRecord) -> None:
    times = record.token_times_ms
    assert times == sorted(times) and all(time >= 0 for time in times), times
    if record.output_tokens is not None:
        assert len(times) <= record.output_tokens, (len(times), record.output_tokens)


def _timers(record: RequestRecord) -> None:
    assert (record.ttft_ms is None) == (record.ttft_kind is None)
    assert record.ttft_kind in (None, "streamed", "internal")
    if record.ttft_ms is not None:
        assert record.ttft_ms >= 0
        assert record.e2e_ms is None or record.ttft_ms <= record.e2e_ms + NS
        first = record.stage("detokenize")
        assert first.duration_ms is None or abs(end_of(first, record) - record.ttft_ms) <= NS
    assert record.queue_ms == record.stage("admission").duration_ms
    prefill = record.stage("prefill")
    if prefill.duration_ms is not None and not prefill.attributes.get("interrupted"):
        assert prefill.start_ms is not None and record.prefill_ms is not None
        assert abs(end_of(prefill, record) - prefill.start_ms - record.prefill_ms) <= NS
    else:
        assert record.prefill_ms is None
    gaps = [v for v in record.itl_ms.values() if v is not None]
    assert all(v >= 0 for v in gaps)


# ---------------------------------------------------------------- what was exported, and how much of it

#: The kind of a root span.
SERVER = 2
_SHARED = ("http_receive", "chat_template", "tokenize")
#: Times are rounded to whole nanoseconds, and a span has at least one.
_ROUNDED = 2


def trace_violations(spans: Sequence[Any]) -> list[str]:
    """Every rule that the spans of one trace (as they are on the wire) break, in words; empty when it is sound."""
    roots = [span for span in spans if span.kind == SERVER]
    if len(roots) != 1:
        return [f"{spans[0].trace_id.hex()}: {len(roots)} roots"]
    (root,) = roots
    try:
        _tree(root, spans)
        for above in [s for s in spans if s.name.startswith("sequence ")] or [root]:
            below = [s for s in spans if s.name in BY_KEY and (s.parent_span_id == above.span_id or s.name in _SHARED)]
            _stages(sorted(below, key=lambda span: BY_KEY[span.name].number), attributes(above))
        if not any(s.name.startswith("sequence ") for s in spans):
            told = {key.split(".")[2] for key in attributes(root) if key.startswith("stagetrace.stage.")}
            assert told | {s.name for s in spans if s is not root} == BY_KEY.keys(), f"twelve stages, not {told}"
    except AssertionError as broken:
        return [f"{root.trace_id.hex()}: {broken}"]
    return []


def _tree(root: Any, spans: Sequence[Any]) -> None:
    """No child outside its parent, and nobody's child twice."""
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans), "two spans with one id"
    assert root.parent_span_id not in known, "the root's parent is one of its own"
    names = [(span.parent_span_id, span.name) for span in spans]
    assert len(set(names)) == len(names), f"twice below one parent: {names}"
    for span in spans:
        assert span.start_time_unix_nano < span.end_time_unix_nano, f"{span.name} has a negative duration"
        if span is root:
            continue
        above = known.get(span.parent_span_id)
        assert above is not None, f"{span.name} has no parent"
        assert above.start_time_unix_nano <= span.start_time_unix_nano + _ROUNDED, f"{span.name} is before {above.name}"
        assert span.end_time_unix_nano <= above.end_time_unix_nano + _ROUNDED, f"{span.name} is after {above.name}"


def _stages(stages: Sequence[Any], said: dict[str, Any]) -> None:
    """Those of one sequence, in order: no overlap but the embedding's, nothing after the stage it ended in."""
    one_by_one = [span for span in stages if span.name != "embedding"]
    for before, after in pairwise(one_by_one):
        late = before.end_time_unix_nano - after.start_time_unix_nano
        assert late <= _ROUNDED, f"{after.name} starts {late} ns before {before.name} ends"
    for inner in stages:
        if inner.name == "embedding":
            (outer,) = (span for span in stages if span.name == "prefill")
            assert outer.start_time_unix_nano <= inner.start_time_unix_nano + _ROUNDED
            assert inner.end_time_unix_nano <= outer.end_time_unix_nano + _ROUNDED
    ended = said.get("stagetrace.active_stage")
    beyond = [span.name for span in stages if ended and BY_KEY[span.name].number > BY_KEY[ended].number]
    assert not beyond, f"{beyond} are there, it ended in {ended}"


def unaccounted(
    sent: Iterable[str], records: Collection[RequestRecord], spans: Iterable[Any], unsampled: Iterable[str] = ()
) -> list[str]:
    """How what was sent, what is stored and what was exported differ: each trace in ``sent`` is one root in each.

    ``unsampled`` are those of them that are not to be exported. Nothing else is in the store, nor in flight.
    """
    asked, hidden = Counter(sent), set(unsampled)
    stored = {(record.trace_id, record.span_id) for record in records}
    exported = Counter((s.trace_id.hex(), s.span_id.hex()) for s in spans if s.kind == SERVER)
    running = [record.request_id for record in records if record.status == "in_flight"]
    found = [f"{name}: in flight" for name in running]
    roots = Counter(trace for trace, _ in stored)
    found += [
        f"{trace}: sent {asked[trace]} times, stored {roots[trace]}"
        for trace in asked | roots
        if asked[trace] != roots[trace]
    ]
    expected = {pair for pair in stored if pair[0] not in hidden}
    found += [
        f"{trace}: root {span} was exported {exported[trace, span]} times"
        for trace, span in expected | exported.keys()
        if exported[trace, span] != ((trace, span) in expected)
    ]
    return found
