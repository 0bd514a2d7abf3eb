"""What arrives where others read it: a third party's collector and a real Prometheus, behind a real server under load.

Calls are compared one by one with what their client knows of them, gauges and counts with the engine's own.
"""

from __future__ import annotations

import json
import math
import secrets
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from tests.backends.prometheus import Prometheus, Samples, check_percentiles, eventually, scraping
from tests.backends.rotel import Rotel, rotel_agent
from tests.engine.conftest import NAME, Live, Starter
from tests.engine.serving import ClientResult, free_port, run_many, send
from tests.receivers import attributes, check_rules

CALLS = 100
#: Few KV blocks, so that requests can fill them, and large ones, so that what they hold stays the same for a second.
#: (One more is the engine's null block.)
BLOCKS, BLOCK_TOKENS = 20, 512
SERVER = 2
SHARED = ("http_receive", "chat_template", "tokenize")
NOT_APPLICABLE = {"chat": set(), "completion": {"chat_template"}, "ids": {"chat_template", "tokenize"}}
#: Our gauges and the engine's.
GAUGES = {
    "stagetrace_batch_size": "vllm:num_requests_running",
    "stagetrace_queue_depth": "vllm:num_requests_waiting",
    "stagetrace_kv_cache_utilization": "vllm:kv_cache_usage_perc",
}
SCRAPED_EVERY_S = 0.5


@dataclass
class Far:
    """A server, the collector that its traces go to, and the address of its metrics."""

    live: Live
    rotel: Rotel
    page: str


@dataclass
class Call:
    """What the client knows of a call: times on its own clock (wall, ns)."""

    traceparent: str
    sent_ns: int
    end_ns: int
    kind: str = "chat"
    status: str = "ok"
    n: int = 1


@pytest.fixture(scope="module", params=["grpc", "http/protobuf"])
def far(request: pytest.FixtureRequest, starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    page = f"127.0.0.1:{free_port()}"
    with rotel_agent(tmp_path_factory.mktemp("rotel")) as rotel:
        url = rotel.grpc if request.param == "grpc" else rotel.http
        serving = starter.start(
            "plain", traced=True, options=("--otlp", url, "--prometheus", page),
            OTEL_EXPORTER_OTLP_PROTOCOL=request.param,
            extra=("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS + 1)),
        )  # fmt: skip
        with closing(serving):
            yield Far(next(serving), rotel, page)


def stagetrace(*arguments: str) -> str:
    command = [sys.executable, "-m", "stagetrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- a hundred calls


def loaded(live: Live, kind: str, *options: str) -> list[Call]:
    """What `stagetrace load` sent, calibration included, out of its client file."""
    path = live.folder / "client.json"
    stagetrace(
        "load", "--url", f"http://127.0.0.1:{live.port}", "--concurrency", "8", "--prompt-tokens", "20-300",
        "--output-tokens", "4-24", "-o", str(path), *options,
    )  # fmt: skip
    client = json.loads(path.read_text())
    wall = client["clock"]["unix_ns"] - client["clock"]["monotonic_ns"]
    return [
        Call(r["traceparent"], r["sent_ns"] + wall, r["end_ns"] + wall, kind)
        for r in (*client["warmup"], *client["requests"])
    ]


def by_hand(live: Live) -> list[Call]:
    """What `stagetrace load` never sends: several answers, token ids, refusals, and clients that leave."""
    several = {"n": 2, "temperature": 1.0}
    ids = {**live.body(20, 6, chat=False, stream=False), "prompt": [[5, 6, 7, 8]]}
    asks: list[tuple[Call, dict[str, Any], int | None]] = []

    def ask(count: int, body: dict[str, Any], leave: int | None = None, **about: Any) -> None:
        for _ in range(count):
            parent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
            asks.append((Call(parent, 0, 0, **about), body, leave))

    ask(3, {**live.body(40, 6), **several}, n=2)
    ask(3, {**live.body(40, 6, chat=False, stream=False), **several}, kind="completion", n=2)
    ask(10, ids, kind="ids")
    ask(6, live.body(30, 2000), leave=3, status="aborted")
    ask(3, {"model": NAME, "messages": "nonsense"}, status="error")
    ask(3, live.body(20, 9000), status="error")

    def one(each: tuple[Call, dict[str, Any], int | None]) -> ClientResult:
        call, body, leave = each
        return send(live.port, body, {"traceparent": call.traceparent}, hang_up_after_chunks=leave)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(one, asks))
    wall = time.time_ns() - time.monotonic_ns()
    for (call, _, leave), result in zip(asks, results, strict=True):
        assert result.status == (400 if call.status == "error" else 200) and result.hung_up == (leave is not None)
        call.sent_ns, call.end_ns = result.sent_ns + wall, result.end_ns + wall
    return [call for call, _, _ in asks]


@pytest.fixture(scope="module")
def calls(far: Far) -> list[Call]:
    """A hundred calls of every kind."""
    live = far.live
    sent = loaded(live, "chat", "--requests", "40")
    sent += loaded(live, "completion", "--requests", "28", "--completions", "--no-stream", "--seed", "1")
    sent += by_hand(live)
    assert len({call.traceparent for call in sent}) == CALLS
    return sent


def stored(live: Live, count: int) -> dict[str, list[dict[str, Any]]]:
    """`stages --json` by trace, once it has so many finished calls."""

    def found() -> dict[str, list[dict[str, Any]]] | None:
        by_trace = defaultdict(list)
        for record in json.loads(stagetrace("stages", str(live.store), "--json"))["requests"]:
            if record["status"] != "in_flight":
                by_trace[record["trace_id"]].append(record)
        return by_trace if len(by_trace) >= count else None

    return eventually(found, f"{count} calls in the store")


def timed(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["key"]: stage for stage in record["stages"] if stage["duration_ms"] is not None}


def spans_for(records: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """(what it hangs on, its name) of every span below the root of a call with these records."""
    found: Counter[tuple[str, str]] = Counter()
    for record in records:
        above = f"sequence {record['sequence']}" if len(records) > 1 else ""
        found.update({("", above): 1} if above else {})
        found.update(("", key) for key in timed(record) if key in SHARED and not record["sequence"])
        found.update((above, key) for key in timed(record) if key not in SHARED)
    return found


def test_each_call_is_one_trace_below_its_caller_s_span(far: Far, calls: list[Call]) -> None:
    records = stored(far.live, CALLS)
    expected = sum(1 + spans_for(each).total() for each in records.values())
    far.rotel.sink.wait(expected)
    by_trace = defaultdict(list)
    for span in far.rotel.sink.spans():
        by_trace[span.trace_id.hex()].append(span)
    check_rules(far.rotel.sink.traces())
    assert sum(map(len, by_trace.values())) == expected
    for call in calls:
        _, trace, parent, _ = call.traceparent.split("-")
        spans, each = by_trace.pop(trace), records[trace]
        (root,) = (span for span in spans if span.kind == SERVER)
        assert root.parent_span_id.hex() == parent
        assert {record["status"] for record in each} == {call.status} and len(each) == call.n, call
        check_states(call, each)
        check_spans(root, spans, each)
        # The machine may be busy: a send's mark comes when the server has the CPU again.
        assert call.sent_ns - 5e6 <= root.start_time_unix_nano < call.end_ns
        assert call.status == "aborted" or root.end_time_unix_nano <= call.end_ns + 1e9
    assert not by_trace, "traces that nobody asked for"


def check_states(call: Call, records: list[dict[str, Any]]) -> None:
    """Nothing is missing from an answered call; one that was not ended where its client let it."""
    for record in records:
        states = defaultdict(set)
        for stage in record["stages"]:
            states[stage["state"]].add(stage["key"])
        assert "not_observable" not in states and "fused" not in states, states
        if call.status == "ok":
            decoded = record["output_tokens"] > 1  # `load` finds out how long a token is with answers of one
            absent = NOT_APPLICABLE[call.kind] | (set() if decoded else {"decode"})
            assert states["not_applicable"] == absent and not states["not_reached"], states
        elif call.status == "aborted":
            assert record["active_stage"] == "decode" and states["not_reached"] == {"teardown"}, states
        else:
            assert record["active_stage"] in SHARED and len(states["not_reached"]) >= 9, states


def check_spans(root: Any, spans: list[Any], records: list[dict[str, Any]]) -> None:
    """A span for each stage that has times, and no other, at those times; the root says of the others what they are."""
    above = {span.span_id: span.name for span in spans if span.name.startswith("sequence ")} | {root.span_id: ""}
    below = [span for span in spans if span is not root]
    assert Counter((above[span.parent_span_id], span.name) for span in below) == spans_for(records)
    for span in below:
        if span.name in above.values():
            continue
        number = above[span.parent_span_id].removeprefix("sequence ") or 0
        stage = timed(records[int(number)])[span.name]
        assert abs(span.start_time_unix_nano - root.start_time_unix_nano - stage["start_ms"] * 1e6) < 2
        assert attributes(span)["stagetrace.duration_ms"] == pytest.approx(stage["duration_ms"])
    said = {
        key.split(".")[2]: value
        for key, value in attributes(root).items()
        if key.startswith("stagetrace.stage.") and key.endswith(".state")
    }
    assert said == {s["key"]: s["state"] for s in records[0]["stages"] if s["duration_ms"] is None}


# ---------------------------------------------------------------- metrics, once

once = pytest.mark.parametrize("far", ["http/protobuf"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def server(far: Far, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes us and the engine."""
    targets = far.page, f"127.0.0.1:{far.live.port}"
    every_ms = round(SCRAPED_EVERY_S * 1e3)
    with scraping(tmp_path_factory.mktemp("prometheus"), *targets, every_ms=every_ms) as url:
        yield Prometheus(url)


def total(server: Prometheus, what: str) -> float:
    return server.value(f"sum({what})") or 0.0


def around(samples: Samples, when: float) -> list[float]:
    """What was seen from a scrape before ``when`` to one after it: two targets are never scraped at one moment."""
    before = max((t for t, _ in samples if t <= when - SCRAPED_EVERY_S), default=0.0)
    after = min((t for t, _ in samples if t >= when + SCRAPED_EVERY_S), default=math.inf)
    return [value for t, value in samples if before <= t <= after]


def watched(far: Far, server: Prometheus) -> dict[str, Samples]:
    """The gauges, from rest to rest: twelve requests for eight slots, then the four that waited."""
    names = (*GAUGES, *GAUGES.values())
    eventually(lambda: all(server.value(name) == 0 for name in names), "gauges of an idle engine at 0")
    for burst in range(3):
        began = time.time() - 3 * SCRAPED_EVERY_S
        bodies = [far.live.body(16, 1000, seed=20 + 12 * burst + n, chat=False) for n in range(12)]
        assert [result.status for result in run_many(far.live.port, bodies, 12)] == [200] * 12
        time.sleep(4 * SCRAPED_EVERY_S)
        seen = {name: server.samples(name, time.time() - began) for name in names}
        if all(b[0] - a[0] < 3 * SCRAPED_EVERY_S for each in seen.values() for a, b in pairwise(each)):
            return seen
    raise AssertionError("this machine is too busy for a scrape a second")


@once
def test_gauges_are_the_engine_s_at_the_same_moment(far: Far, calls: list[Call], server: Prometheus) -> None:
    seen = watched(far, server)
    for ours, theirs in GAUGES.items():
        for when, value in seen[theirs]:
            near = around(seen[ours], when)
            assert near and min(near) - 1e-5 <= value <= max(near) + 1e-5, (ours, when, value, near)
        assert seen[ours][-1][1] == seen[theirs][-1][1] == 0, "at rest"
    # The levels at which they stood still: slots taken and a queue, half of them; the blocks that both hold.
    levels = {"stagetrace_batch_size": (8, 4), "stagetrace_queue_depth": (4, 0)}
    levels["stagetrace_kv_cache_utilization"] = tuple(held / BLOCKS for held in (16, 8, 4))
    for ours, values in levels.items():
        for level in values:
            counts = [sum(abs(v - level) < 1e-5 for _, v in seen[name]) for name in (ours, GAUGES[ours])]
            assert min(counts) >= 1, (ours, level, counts)


@once
def test_evictions_are_counted_as_the_engine_counts_them(far: Far, calls: list[Call], server: Prometheus) -> None:
    """Eight requests that come to need more blocks than there are."""
    ours, theirs = "stagetrace_preemptions_total", "vllm:num_preemptions_total"
    before = total(server, ours)
    run_many(far.live.port, [far.live.body(16, 1100, seed=40 + n, chat=False) for n in range(8)], 8)
    eventually(lambda: total(server, ours) == total(server, theirs) > before, "our evictions are the engine's")


@once
def test_requests_are_counted_as_the_engine_counts_them(far: Far, calls: list[Call], server: Prometheus) -> None:
    """The engine counts each answer of ``n`` > 1, and neither those it refused nor those whose client left."""
    count = "gen_ai_server_request_duration_seconds_count"
    answered = Counter(call.status for call in calls)["ok"]
    more = sum(call.n - 1 for call in calls if call.status == "ok")
    theirs = 'vllm:request_success_total{finished_reason!="abort"}'

    def agree() -> bool:
        ours, sequences = (
            total(server, f'{count}{{error=""}}'),
            total(server, "stagetrace_queue_duration_seconds_count"),
        )
        return ours >= answered and ours + more == sequences == total(server, theirs)

    eventually(agree, "our count of answers is the engine's")
    assert total(server, f'{count}{{error="aborted"}}') == 6
    assert total(server, f'{count}{{error!~"|aborted"}}') == 6


@once
def test_percentiles_from_its_buckets_are_ours_within_a_bucket(far: Far, calls: list[Call], server: Prometheus) -> None:
    done = "sum(gen_ai_server_request_duration_seconds_count)"
    eventually(lambda: server.value(done) == len(stored(far.live, CALLS)), "every call is counted and stored")
    check_percentiles(server, json.loads(stagetrace("numbers", str(far.live.store), "--json"))["timers"])
