"""Records as a store may hold them, and a store that holds some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagetrace.model import GpuSample, RequestRecord, RunRecord, StepRecord, empty_stages
from stagetrace.store import StoreWriter

RUN = RunRecord("session-1", "vllm", "0.32", "tiny", {"max_num_seqs": 4, "prefix": True}, 5, ["a note"])


def request(number: int = 0, **changes: Any) -> RequestRecord:
    """Return a finished request with twelve measured stages; ``number`` makes it distinct and dates it."""
    record = RequestRecord(
        request_id=f"chatcmpl-{number}", external_id=f"x-{number}", trace_id=f"{number + 1:032x}",
        operation="chat", model="tiny", status="ok", finish_reason="stop", active_stage=None,
        prompt_tokens=17, cached_tokens=0, output_tokens=3, start_unix_ns=1_700_000_000_000_000_000 + number,
        e2e_ms=12.5, ttft_ms=4.25, ttft_kind="streamed", queue_ms=0.5, prefill_ms=3.0,
        itl_ms={"p50": 1.5, "p95": None, "p99": 2.0, "max": 2.0}, coverage=0.98, coverage_ttft=None,
        unattributed_ms=0.25, preemptions=0, sequence=0, stages=empty_stages("measured"),
        gaps_ms={"dispatch": 0.125}, span_id=f"{number + 1:016x}", parent_span_id=None,
        internal_id=f"chatcmpl-{number}-ab", token_times_ms=[4.25, 6.001, 8.5],
    )  # fmt: skip
    for stage in record.stages:
        stage.source, stage.start_ms, stage.duration_ms = "host_clock", float(stage.number), 0.75
        stage.attributes = {"bytes": 400 + stage.number, "route": "/v1/chat/completions"}
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def step(number: int, **changes: Any) -> StepRecord:
    record = StepRecord(number, 0, (number * 100, number * 100 + 9), 2, 2, 0, 2, 1, 0.25, forward_ns=(5, 8))
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def card_sample(**changes: Any) -> GpuSample:
    """What a card says that draws 300 W and is held to it."""
    sample = GpuSample(
        "GPU-0", 5, 4, "A card", 0.5, 0.25, 60_000_000_000, 80_000_000_000, 300.0, 12.25, 1980, 2619, 55, 0x4,
        0.7, 0.3, 0.2, 0.6,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def filled(path: Path, requests: int = 3) -> Path:
    with StoreWriter(path) as writer:
        writer.write_run(RUN)
        writer.write_requests([request(number) for number in range(requests)])
        writer.write_steps([step(number) for number in range(requests)])
    return path
