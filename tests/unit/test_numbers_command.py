"""``stagetrace numbers``: one session's, all keys always there, and in words what they mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stagetrace.model import RequestRecord, RunRecord, StepRecord
from stagetrace.numbers import aside, numbers
from stagetrace.stages import STAGES
from stagetrace.store import StoreWriter, Trace
from tests.unit.test_cli import Cli
from tests.unit.test_numbers_by_hand import request, step

CONFIG = {
    "prefix_caching": 1, "chunked_prefill": 1, "max_num_seqs": 8, "max_num_batched_tokens": 512,
    "kv_blocks": 100, "block_size": 16, "max_model_len": 800,
}  # fmt: skip
CONTEXT = (
    "request_rate", "concurrency", "prefix_caching", "chunked_prefill", "max_num_seqs", "engine", "engine_version",
    "model", "gpu", "requests", "prompt_tokens", "output_tokens", "output_tokens_per_s", "kv_blocks",
    "requests_that_fit",
)  # fmt: skip


@pytest.fixture
def stagetrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    return Cli(monkeypatch, capfd)


def store(*runs: tuple[str, list[RequestRecord], list[StepRecord]]) -> str:
    with StoreWriter(Path("s.db")) as writer:
        for name, requests, steps in runs:
            writer.write_run(RunRecord(name, "paper", "1.0", "tiny", dict(CONFIG)))
            writer.write_requests(requests)
            writer.write_steps(steps)
    return "s.db"


def document(stagetrace: Cli, *arguments: str) -> tuple[dict[str, Any], str]:
    code, out, err = stagetrace("numbers", *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert list(found) == ["schema", "context", "timers", "gauges", "saturated", "stages"]
    assert tuple(found["context"]) == CONTEXT
    assert list(found["timers"]) == ["queue_ms", "prefill_ms", "ttft_ms", "itl_ms"]
    assert all(list(timer) == ["p50", "p95", "p99"] for timer in found["timers"].values())
    assert list(found["gauges"]) == ["kv_cache_utilization", "queue_depth", "batch_size", "preemptions"]
    assert list(found["gauges"]["queue_depth"]) == ["p50", "p95", "p99", "max"]
    assert list(found["stages"]) == [stage.key for stage in STAGES]
    assert all(list(stage) == ["p50_ms", "p95_ms", "p99_ms", "share"] for stage in found["stages"].values())
    return found, err


def test_a_store_without_anything(stagetrace: Cli) -> None:
    found, err = document(stagetrace, store())
    assert (found["context"]["requests"], found["context"]["engine"], err) == (0, None, "")
    code, out, err = stagetrace("numbers", "s.db")
    assert (code, err) == (0, "") and "Saturation: unknown" in out and "KV room: unknown" in out


def test_the_last_run_unless_another_is_named(stagetrace: Cli) -> None:
    """Steps of several sessions lie on several clocks."""
    first = ("first", [request(1, 0, 100)], [step(1, 0.9, 5)])
    last = ("last", [request(2, 900, 100), request(3, 1000, 100)], [step(1, 0.1, 0), step(2, 0.2, 1)])
    file = store(first, last)
    found, _ = document(stagetrace, file)
    assert (found["context"]["requests"], found["gauges"]["queue_depth"]["max"]) == (2, 1.0)
    found, _ = document(stagetrace, file, "--session", "first")
    assert (found["context"]["requests"], found["gauges"]["queue_depth"]["max"]) == (1, 5.0)
    assert "session last; the last of 2 runs" in stagetrace("numbers", file)[1]
    assert "session third; it has: first, last" in stagetrace.refused("numbers", file, "--session", "third")
    assert "gone.db" in stagetrace.refused("numbers", "gone.db")


def test_others_are_counted_and_said(stagetrace: Cli) -> None:
    partly = [request(4, 300, 50, sequence=0), request(4, 300, 50, sequence=1, status="aborted", ttft_ms=500.0)]
    others = [request(2, 100, 50, status="error"), request(3, 100, None, status="in_flight")]
    file = store(("s", [request(1, 0, 100), *others, *partly], [step(1, 0.1, 0)]))
    found, err = document(stagetrace, file)
    line = "3 other requests are not in the timers: 1 aborted, 1 error, 1 in_flight"
    # They were work for the server all the same: from 0 to 350 ms, and 100, 50 and 50 ms of them in it.
    assert found["context"]["request_rate"] == pytest.approx(3 / 0.35)
    assert found["context"]["concurrency"] == pytest.approx(200 / 350)
    assert found["context"]["requests"] == 1 and found["timers"]["ttft_ms"]["p99"] == 10.0
    assert err == f"stagetrace: {line} (rate, concurrency and time span count them)\n"
    assert line in stagetrace("numbers", file)[1]


def test_kv_room(stagetrace: Cli) -> None:
    file = store(("s", [request(1, 0, 100, prompt_tokens=40, output_tokens=8)], [step(1, 0.1, 0)]))
    found, _ = document(stagetrace, file)
    assert found["context"]["requests_that_fit"] == 33, "100 blocks of 16, three a request"
    said = stagetrace("numbers", file)[1]
    assert "100 blocks hold 33 requests at the lengths really seen (48 tokens on average" in said
    assert "worst case (800 tokens, max_model_len): 2" in said


def busy(usage: float, waiting: int, running: int = 2, tokens: int = 2) -> StepRecord:
    return StepRecord(1, 0, (1, 2), running, tokens, 0, running, waiting, usage)


@pytest.mark.parametrize(
    ("steps", "saturated"),
    [
        ([busy(0.96, 1)], True),
        ([busy(0.96, 0)], False),
        # A prompt of 320 tokens needs 20 of the 100 blocks: with 85 taken, it waits for blocks, ...
        ([busy(0.85, 1)], True),
        ([busy(0.75, 1)], False),
        # ... unless it waits for a slot, or for the step's tokens.
        ([busy(0.85, 1, running=8)], False),
        ([busy(0.85, 1, tokens=512)], False),
        ([busy(0.99, 1, running=8)], True),
    ],
)
def test_the_saturation_signature(steps: list[StepRecord], saturated: bool) -> None:
    trace = Trace([request(1, 0, 100, prompt_tokens=320)], steps, [RunRecord("s", config=dict(CONFIG))])
    assert numbers(trace)["saturated"] is saturated
    assert (aside(trace).pinned > 0) is saturated


def test_saturation_in_words(stagetrace: Cli) -> None:
    full = [StepRecord(n, 0, (n, n + 1), 4, 4, 0, 4, n, 0.99) for n in range(1, 10)]
    said = stagetrace("numbers", store(("s", [request(1, 0, 100, preemptions=3)], full)))[1]
    assert "KV cache saturated: it was full while requests waited in 100% of the steps" in said
    assert "the queue 2.00 → 8.00 deep; 3 preemptions confirm it" in said


def test_a_queue_for_slots_is_no_saturation(stagetrace: Cli) -> None:
    slots = [StepRecord(n, 0, (n, n + 1), 8, 8, 0, 8, 3, 0.2) for n in range(1, 10)]
    said = stagetrace("numbers", store(("s", [request(1, 0, 100)], slots)))[1]
    assert "KV cache not saturated" in said and "0% of the steps" in said
    assert "Batch slots saturated: requests waited for one of all 8 (max_num_seqs) in 100% of the steps" in said


def test_figures_are_never_cut(stagetrace: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    file = store(("s", [request(1, 0, 9_876_543)], []))
    wide = stagetrace("numbers", file)[1]
    monkeypatch.setenv("COLUMNS", "30")
    assert re.findall(r"[0-9][0-9,.]*", stagetrace("numbers", file)[1]) == re.findall(r"[0-9][0-9,.]*", wide)


def test_a_store_without_engine_has_no_count_either(stagetrace: Cli) -> None:
    code, said, _ = stagetrace("numbers", store(), "--json")
    assert code == 0 and json.loads(said)["gauges"]["preemptions"] is None
