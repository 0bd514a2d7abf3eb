"""The numbers of a run against figures worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stagetrace.model import RequestRecord, RunRecord, StepRecord, empty_stages
from stagetrace.numbers import numbers, typical
from stagetrace.stages import STAGES
from stagetrace.store import Trace

CONFIG = {
    "prefix_caching": 1, "chunked_prefill": 0, "max_num_seqs": 8, "kv_blocks": 100, "block_size": 16, "gpu": None,
}  # fmt: skip


def request(number: int, start_ms: float, e2e_ms: float | None, **changes: Any) -> RequestRecord:
    record = RequestRecord(
        request_id=f"r{number}", external_id=None, trace_id=f"{number:032x}", operation="chat", model="tiny",
        status="ok", finish_reason="stop", active_stage=None, prompt_tokens=40, cached_tokens=0, output_tokens=3,
        start_unix_ns=10**18 + round(start_ms * 1e6), e2e_ms=e2e_ms, ttft_ms=10.0, ttft_kind="streamed", queue_ms=1.0,
        prefill_ms=5.0, itl_ms={}, coverage=1.0, coverage_ttft=1.0, unattributed_ms=0.0, preemptions=0, sequence=0,
        stages=empty_stages("not_observable"), span_id=f"{number:016x}", token_times_ms=[10.0, 12.0, 16.0],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def step(number: int, usage: float, waiting: int, batch: int = 1) -> StepRecord:
    return StepRecord(number, 0, (number, number + 1), batch, batch, 0, batch, waiting, usage)


def run() -> RunRecord:
    return RunRecord("s", "paper", "1.0", "tiny", dict(CONFIG))


def test_the_document_by_hand() -> None:
    requests = [
        request(1, 0, 100, queue_ms=1.0, ttft_ms=10.0, prefill_ms=4.0),
        request(
            2, 500, 300, queue_ms=3.0, ttft_ms=20.0, prefill_ms=8.0, preemptions=2, prompt_tokens=8, output_tokens=5
        ),
        request(3, 900, 100, queue_ms=2.0, ttft_ms=40.0, prefill_ms=6.0, token_times_ms=[40.0, 46.0, 46.0, 46.0]),
    ]
    requests[0].stage("prefill").duration_ms = 25.0
    requests[1].stage("prefill").duration_ms = 75.0
    document = numbers(Trace(requests, [step(1, 0.5, 0, 2), step(2, 1.0, 4, 4)], [run()]))
    # From the first start (0) to the last end (1,000 ms).
    assert document["context"] == {
        "request_rate": 3.0, "concurrency": 0.5, "prefix_caching": True, "chunked_prefill": False, "max_num_seqs": 8,
        "engine": "paper", "engine_version": "1.0", "model": "tiny", "gpu": None, "requests": 3,
        "prompt_tokens": {"p50": 40.0, "p95": 40.0, "p99": 40.0},
        "output_tokens": {"p50": 3.0, "p95": pytest.approx(4.8), "p99": pytest.approx(4.96)},
        "output_tokens_per_s": 11.0, "kv_blocks": 100,
        # 3, 1 and 3 blocks: 7/3 each.
        "requests_that_fit": 42,
    }  # fmt: skip
    assert document["timers"]["queue_ms"] == {"p50": 2.0, "p95": pytest.approx(2.9), "p99": pytest.approx(2.98)}
    assert document["timers"]["ttft_ms"] == {"p50": 20.0, "p95": pytest.approx(38.0), "p99": pytest.approx(39.6)}
    assert document["timers"]["prefill_ms"]["p50"] == 6.0
    # 2, 4, 2, 4, and a step of three tokens in 6 ms: 2, 2, 2.
    assert document["timers"]["itl_ms"] == {"p50": 2.0, "p95": 4.0, "p99": 4.0}
    assert document["gauges"] == {
        "kv_cache_utilization": {"p50": 0.75, "p95": pytest.approx(0.975), "p99": pytest.approx(0.995), "max": 1.0},
        "queue_depth": {"p50": 2.0, "p95": pytest.approx(3.8), "p99": pytest.approx(3.96), "max": 4.0},
        "batch_size": {"p50": 3.0, "p95": pytest.approx(3.9), "p99": pytest.approx(3.98), "max": 4.0},
        "preemptions": 2,
    }  # fmt: skip
    assert document["stages"]["prefill"] == {
        "p50_ms": 50.0, "p95_ms": pytest.approx(72.5), "p99_ms": pytest.approx(74.5), "share": 0.2,
    }  # fmt: skip
    assert document["stages"]["decode"] == {"p50_ms": None, "p95_ms": None, "p99_ms": None, "share": None}
    assert list(document["stages"]) == [stage.key for stage in STAGES]
    json.dumps(document, allow_nan=False)


def test_the_sequences_of_one_request_count_once() -> None:
    twice = [request(1, 0, 100, sequence=0), request(1, 0, 100, sequence=1)]
    context = numbers(Trace([*twice, request(2, 900, 100)], [], [run()]))["context"]
    assert (context["requests"], context["request_rate"], context["concurrency"]) == (2, 2.0, 0.2)
    assert context["output_tokens_per_s"] == 9.0, "tokens are the sequences'"


def test_one_trace_may_hold_several_requests() -> None:
    same = [request(n, n * 100, 100, trace_id="1" * 32) for n in (1, 2)]
    assert numbers(Trace(same, [], []))["context"]["requests"] == 2


def test_nothing_is_unknown_not_zero() -> None:
    document = numbers(Trace())
    assert document["context"]["request_rate"] is None and document["context"]["prefix_caching"] is None
    assert document["timers"]["ttft_ms"] == {"p50": None, "p95": None, "p99": None}
    assert document["gauges"]["batch_size"]["max"] is None
    assert (document["saturated"], document["context"]["requests"]) == (False, 0)
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(0.99, 3)] * 2 + [(0.2, 0)] * 8, True),
        ([(0.99, 3)] + [(0.2, 0)] * 9, False),
        ([(0.99, 0)] * 10, False),
        ([(0.5, 9)] * 10, False),
    ],
)
def test_saturated(steps: list[tuple[float, int]], expected: bool) -> None:
    trace = Trace([], [step(i, usage, waiting) for i, (usage, waiting) in enumerate(steps)], [])
    assert numbers(trace)["saturated"] is expected


def test_typical_is_the_median_by_its_whole_time() -> None:
    records = [request(i, 0, e2e) for i, e2e in enumerate((50.0, 10.0, 30.0))]
    assert typical(records) is records[2]
    assert typical([request(1, 0, None)]) is None


def test_who_was_not_answered_is_not_in_the_timers() -> None:
    cut = request(4, 100, 50, status="aborted", queue_ms=999.0, ttft_ms=999.0, preemptions=1)
    document = numbers(Trace([request(1, 0, 100), cut, request(5, 100, None, status="in_flight")], [], [run()]))
    assert document["timers"]["queue_ms"]["p99"] == 1.0 and document["timers"]["ttft_ms"]["p99"] == 10.0
    assert document["gauges"]["preemptions"] == 1
