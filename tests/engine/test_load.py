"""`stagetrace load`, `numbers` and `doctor` on a real server: three clocks on the same requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from stagetrace import load
from stagetrace.model import RequestRecord
from tests.engine.conftest import NAME, Live, Starter
from tests.engine.serving import get, send

REQUESTS = 40
CONCURRENCY = 8


@pytest.fixture(scope="module")
def live(starter: Starter) -> Iterator[Live]:
    yield from starter.start("plain", traced=True)


def stagetrace(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stagetrace", *arguments],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip


def url(live: Live) -> str:
    return f"http://127.0.0.1:{live.port}"


def sums(live: Live) -> dict[str, tuple[float, int]]:
    """The engine's own histograms: (sum in ms, count) by name."""
    found: dict[str, float] = {}
    for line in get(live.port, "/metrics")[1].splitlines():
        for name in ("queue", "prefill"):
            for part in ("sum", "count"):
                if line.startswith(f"vllm:request_{name}_time_seconds_{part}"):
                    found[f"{name} {part}"] = float(line.split()[-1])
    return {
        name: (found.get(f"{name} sum", 0.0) * 1e3, int(found.get(f"{name} count", 0))) for name in ("queue", "prefill")
    }


def stored(live: Live, count: int) -> list[RequestRecord]:
    """All finished records, once there are ``count`` of them."""
    assert live.store is not None
    until = time.monotonic() + 15
    while len(records := [r for r in load(live.store).requests if r.status != "in_flight"]) < count:
        assert time.monotonic() < until, f"{len(records)} of {count} requests are in the store"
        time.sleep(0.2)
    return records


@pytest.fixture(scope="module")
def client(live: Live) -> dict[str, Any]:
    """The client file of the load."""
    path = live.folder / "client.json"
    done = stagetrace(
        "load", "--url", url(live), "--concurrency", str(CONCURRENCY), "--requests", str(REQUESTS), "--warmup", "3",
        "--prompt-tokens", "50-200:0.6,1500:0.4", "--output-tokens", "10-60", "--seed", "11", "-o", str(path),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for fact in ("request rate", "concurrency", "percentiles", "prefix caching on"):
        assert fact in " ".join(done.stdout.split())
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.fixture(scope="module")
def records(live: Live, client: dict[str, Any]) -> dict[str, RequestRecord]:
    """What the server recorded, by the client's x-request-id."""
    sent = len(client["warmup"]) + len(client["requests"])
    return {record.external_id or "": record for record in stored(live, sent)}


def test_every_request_of_the_client_is_in_the_store(client: dict[str, Any], records: dict[str, RequestRecord]) -> None:
    sent = [*client["warmup"], *client["requests"]]
    assert len(client["requests"]) == REQUESTS and client["summary"]["failed"] == 0
    assert {r["request_id"] for r in sent} == set(records), "and no other"
    for r in sent:
        record = records[r["request_id"]]
        _, trace_id, span_id, _ = r["traceparent"].split("-")
        assert (record.trace_id, record.parent_span_id, record.status) == (trace_id, span_id, "ok")
        assert (record.prompt_tokens, record.output_tokens) == (r["prompt_tokens"], r["output_tokens"])


def test_prompts_are_about_as_long_as_asked_for(client: dict[str, Any]) -> None:
    assert client["calibration"]["source"] == "usage"
    assert [r["output_tokens"] for r in client["requests"]] == [r["asked_output_tokens"] for r in client["requests"]]
    ratios = [r["prompt_tokens"] / r["asked_prompt_tokens"] for r in client["requests"]]
    assert median(ratios) == pytest.approx(1, abs=0.1)
    assert min(ratios) > 0.7 and max(ratios) < 1.4


def test_client_and_server_agree(client: dict[str, Any], records: dict[str, RequestRecord]) -> None:
    pairs = [(r, records[r["request_id"]]) for r in client["requests"]]
    whole = [((r["end_ns"] - r["sent_ns"]) / 1e6, s.e2e_ms or 0.0) for r, s in pairs]
    first = [((r["first_text_ns"] - r["sent_ns"]) / 1e6, s.ttft_ms or 0.0) for r, s in pairs]
    for name, times in (("e2e", whole), ("ttft", first)):
        beyond = median(abs(ours - theirs) - 0.05 * ours for ours, theirs in times)
        assert beyond <= 5, f"{name}: half of the requests differ by more than 5 % + {beyond:.1f} ms"


def test_the_numbers_are_the_engines_own(live: Live, client: dict[str, Any], records: dict[str, RequestRecord]) -> None:
    """Queue and prefill summed over all requests; the engine's own stand on the same machine's clock."""
    engine = sums(live)
    assert engine["queue"][1] == engine["prefill"][1] == len(records)
    wait = sum(r.stage("admission").attributes["wait_ms"] for r in records.values())
    assert wait == pytest.approx(engine["queue"][0], rel=0.05, abs=0.5 * len(records))
    # The engine's prefill ends when the front end sees the first token.
    prefill = sum(r.stage("detokenize").start_ms - r.stage("kv_allocate").start_ms for r in records.values())
    assert prefill == pytest.approx(engine["prefill"][0], rel=0.05, abs=0.5 * len(records))
    done = stagetrace("numbers", str(live.store), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    context = found["context"]
    assert (context["requests"], context["engine"], context["model"]) == (len(records), "vllm", NAME)
    assert context["prefix_caching"] is True and context["requests_that_fit"] > 0
    assert CONCURRENCY * 0.5 < found["gauges"]["batch_size"]["max"] <= CONCURRENCY
    assert not found["saturated"]
    queue = sorted(r.queue_ms or 0.0 for r in records.values())
    assert queue[0] <= found["timers"]["queue_ms"]["p50"] <= found["timers"]["queue_ms"]["p99"] <= queue[-1]
    assert 0.9 < sum(stage["share"] or 0.0 for stage in found["stages"].values()) <= 1.0
    said = stagetrace("numbers", str(live.store)).stdout
    assert "KV cache not saturated" in said and "KV room" in said and "max_model_len" in said


def test_the_doctor_beside_a_live_server(live: Live, client: dict[str, Any]) -> None:
    done = stagetrace("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["engine"], found["tested"]) == ("vllm", True)
    assert {stage["state"] for stage in found["stages"]} == {"observable"}
    states = {hook["target"]: hook["state"] for hook in found["hooks"]}
    assert set(states.values()) == {"installed", "resolved"}
    assert states["vllm.v1.core.sched.scheduler:Scheduler.schedule"] == "installed"
    assert "3 processes record" in stagetrace("doctor").stdout


def test_the_doctor_knows_the_plug_in_filter(live: Live) -> None:
    done = stagetrace("doctor", "--json", VLLM_PLUGINS="other")
    assert done.returncode == 2 and "VLLM_PLUGINS=other" in done.stderr
    assert {stage["state"] for stage in json.loads(done.stdout)["stages"]} == {"not_observable"}


def test_numbers_leave_out_what_was_not_answered(live: Live, client: dict[str, Any], tmp_path: Path) -> None:
    count = len(stored(live, 0))
    assert send(live.port, {"model": NAME, "messages": "nonsense"}).status == 400
    stored(live, count + 1)
    done = stagetrace("numbers", str(live.store), "--json")
    assert "1 other requests are not in the timers: 1 error" in done.stderr
    assert json.loads(done.stdout)["context"]["requests"] == count
