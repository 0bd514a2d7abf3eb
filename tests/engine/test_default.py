"""The default layout of a CPU server (V1 runner, synchronous scheduling, three processes) under ``stagetrace run``."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from stagetrace import load
from stagetrace.floor import (
    DEVICES,
    Rates,
    decode_pass,
    embedding,
    lm_head,
    model_of,
    prefill,
    read_config,
    sample,
)
from tests.engine.conftest import Live, Starter, Untraced, mixed_bodies, serial_bodies
from tests.engine.serving import ClientResult, get, run_many, send
from tests.invariants import violations


@pytest.fixture(scope="module")
def live(starter: Starter, untraced: Untraced) -> Iterator[Live]:
    # A CPU has no floor of its own: one is named.
    yield from starter.start("plain", traced=True, STAGETRACE_GPU="reference")


@pytest.fixture(scope="module")
def alone(live: Live) -> list[ClientResult]:
    """Requests of several kinds, one at a time, after one that pays for what a server does once."""
    run_many(live.port, [live.body(50, 5, seed=90), live.body(50, 5, seed=91, chat=False)], 1)
    return run_many(live.port, serial_bodies(live), 1)


@pytest.fixture(scope="module")
def mixed(live: Live, alone: list[ClientResult]) -> list[ClientResult]:
    """100 mixed requests, 16 at a time."""
    return run_many(live.port, mixed_bodies(live), 16)


def test_the_answers_are_the_untraced_servers(alone: list[ClientResult], untraced: Untraced) -> None:
    assert [r.text for r in alone] == untraced.serial


def test_under_load_no_more_answers_differ_than_between_two_untraced_runs(
    mixed: list[ClientResult], untraced: Untraced
) -> None:
    first, second = untraced.loaded
    noise = sum(a != b for a, b in zip(first, second, strict=True))
    differing = min(
        sum(r.text != text for r, text in zip(mixed, run, strict=True)) for run in untraced.loaded
    )  # fmt: skip
    # Both are counts of a few in a hundred that vary by themselves; two is the room they get.
    assert differing <= noise + 2, f"{differing} answers differ from an untraced run's; two untraced runs: {noise}"


def test_one_complete_record_per_request(live: Live, mixed: list[ClientResult]) -> None:
    records = live.records(mixed)
    assert len({r.span_id for r in records}) == len(mixed)
    assert [r.status for r in records] == ["ok"] * len(mixed)
    assert [problem for r in records for problem in violations(r)] == []
    applicable = [s for r in records for s in r.stages if s.state != "not_applicable"]
    assert {s.state for s in applicable} == {"measured"}
    assert {s.source for s in applicable} == {"host_clock"}


def test_floors_are_what_the_lengths_alone_cost(live: Live, model: Path, alone: list[ClientResult]) -> None:
    """Of requests that nobody else is with: the pure function of the model's own config and of their lengths."""
    shape = model_of({**read_config(model), "dtype": "float32"})
    rates = Rates.of(DEVICES[0], shape)
    for record in live.records(alone):
        facts = {stage.key: stage.attributes for stage in record.stages}
        cached, prompt = record.cached_tokens, record.prompt_tokens
        steps = facts["decode"]["floor_steps"]
        assert 0 <= record.output_tokens - 1 - steps <= 3, "passes before the first text was sent are not in stage 11"
        contexts = range(prompt + record.output_tokens - steps, prompt + record.output_tokens)
        expected = {
            "embedding": embedding(shape, prompt - cached), "prefill": prefill(shape, prompt - cached, cached),
            "lm_head": lm_head(shape), "sample": sample(shape),
        }  # fmt: skip
        for key, work in expected.items():
            assert facts[key]["floor_ms"] == pytest.approx(rates.ms(work)), key
        assert facts["decode"]["floor_ms"] == pytest.approx(sum(rates.ms(decode_pass(shape, at)) for at in contexts))
        for stage in record.stages:
            if "floor_ms" in stage.attributes:
                assert stage.attributes["over_floor"] == pytest.approx(stage.duration_ms / stage.attributes["floor_ms"])
                assert stage.attributes["over_floor"] > 1, "two CPU cores, and a GPU's floor"
    config = load(live.store).runs[-1].config
    assert config["floor_gpu"] == "reference" and config["model_config"]["hidden_size"] == shape.hidden


def test_stages_json_lists_every_request(live: Live, mixed: list[ClientResult]) -> None:
    live.records(mixed)
    out = subprocess.run(
        [sys.executable, "-m", "stagetrace", "stages", str(live.store), "--json"], capture_output=True, check=True
    ).stdout
    document = json.loads(out)
    assert document["schema"] == 1
    ids = [request["request_id"] for request in document["requests"]]
    assert len(ids) == len(set(ids))
    assert all([s["number"] for s in r["stages"]] == list(range(1, 13)) for r in document["requests"])


def test_coverage(live: Live, mixed: list[ClientResult]) -> None:
    records = live.records(mixed)
    long = [r.coverage for r in records if r.e2e_ms >= 500]
    short = [r.unattributed_ms for r in records if r.e2e_ms < 500]
    assert long and median(long) >= 0.97
    # `make bench` holds this to 5 ms; a test must pass on a machine that is busy with other things, too.
    assert short and median(short) <= 20.0


def test_times_are_a_clients_own_at_concurrency_1(live: Live, alone: list[ClientResult]) -> None:
    """5 ms + 2 % at the median, in one of four rounds: on a busy machine it is the client that waits for a CPU.

    On a quiet one it is 1 ms + 1 %: docs/measurements/truth.md.
    """
    rounds = []
    for again in range(4):
        results = run_many(live.port, serial_bodies(live) * 2, 1) if again else alone
        pairs = list(zip(results, live.records(results), strict=True))
        e2e = [(client.e2e_ms, client.e2e_ms - record.e2e_ms) for client, record in pairs]
        ttft = [(c.ttft_ms, c.ttft_ms - r.ttft_ms) for c, r in pairs if c.ttft_ms and r.ttft_kind == "streamed"]
        for times in (e2e, ttft):
            # A send's mark comes when the server has the CPU again, by which time a client may have read it all.
            assert median(late for _, late in times) >= -0.5
        rounds.append([round(median(late - 0.02 * time for time, late in times), 2) for times in (e2e, ttft)])
        if max(rounds[-1]) <= 5:
            return
    pytest.fail(f"beyond 5 ms + 2 % of a client's time, e2e and TTFT in ms: {rounds}")


def test_times_are_a_clients_own_at_concurrency_16(live: Live, mixed: list[ClientResult]) -> None:
    """5 ms + 5 % at the median, in one of three rounds, for the same reason."""
    rounds = []
    for again in range(3):
        results = run_many(live.port, mixed_bodies(live), 16) if again else mixed
        pairs = list(zip(results, live.records(results), strict=True))
        e2e = [result.e2e_ms - record.e2e_ms - 0.05 * result.e2e_ms for result, record in pairs]
        ttft = [c.ttft_ms - r.ttft_ms - 0.05 * c.ttft_ms for c, r in pairs if r.ttft_kind == "streamed" and c.ttft_ms]
        assert len(ttft) > 30
        rounds.append([round(median(e2e), 2), round(median(ttft), 2)])
        if max(rounds[-1]) <= 5:
            return
    pytest.fail(f"beyond 5 ms + 5 % of a client's time, e2e and TTFT in ms: {rounds}")


def test_token_counts_are_the_apis_usage(live: Live, alone: list[ClientResult], mixed: list[ClientResult]) -> None:
    results = [*alone, *mixed]
    for result, record in zip(results, live.records(results), strict=True):
        assert result.usage is not None
        assert (record.prompt_tokens, record.output_tokens) == (
            result.usage["prompt_tokens"], result.usage["completion_tokens"]
        )  # fmt: skip


def test_blocks_are_what_the_prompt_needs(live: Live, mixed: list[ClientResult]) -> None:
    for record in live.records(mixed):
        facts = record.stage("kv_allocate").attributes
        assert facts["blocks"] == math.ceil(record.prompt_tokens / facts["block_size"])


def test_queue_and_prefill_are_the_engines_own(live: Live, mixed: list[ClientResult]) -> None:
    """The engine's histograms grow by one request's times; its clock stands on the same machine's monotonic one.

    To 1 ms + 2 %, in one of four tries: between its look at the clock and ours either may lose the CPU.
    """
    for length, tokens in enumerate((30, 700, 1900)):
        tries = []
        for again in range(4):
            before = _sums(live.port)
            result = send(live.port, live.body(tokens, 4, seed=40 + 4 * length + again))
            record = live.records([result])[0]
            theirs = [(after - before[name]) * 1e3 for name, after in sorted(_sums(live.port).items())]
            allocate, text = record.stage("kv_allocate"), record.stage("detokenize")
            ours = [text.start_ms - allocate.start_ms, record.stage("admission").attributes["wait_ms"]]
            tries.append((ours, theirs))
            if ours == [pytest.approx(ms, abs=1.0, rel=0.02) for ms in theirs]:
                break
        else:
            pytest.fail(f"{tokens} tokens: prefill and queue in ms, ours and the engine's: {tries}")


def _sums(port: int) -> dict[str, float]:
    found = {}
    for line in get(port, "/metrics")[1].splitlines():
        for name in ("queue", "prefill"):
            if line.startswith(f"vllm:request_{name}_time_seconds_sum"):
                found[name] = float(line.split()[-1])
    return found


def test_warm_and_cold(live: Live) -> None:
    body = live.body(2000, 5, seed=70)
    cold, *warm = live.records([send(live.port, body) for _ in range(4)])
    assert cold.cached_tokens == 0
    assert all(record.cached_tokens >= 1800 for record in warm)
    # One of them may have had to wait for a CPU.
    assert min(record.prefill_ms for record in warm) * 2 < cold.prefill_ms


def test_several_answers_to_one_request_share_its_root(live: Live) -> None:
    result = send(live.port, {**live.body(30, 6, seed=71), "n": 3, "temperature": 0.8, "seed": 1})
    live.records([result])
    records = [r for r in load(live.store).requests if r.request_id == result.response_id]
    assert [r.sequence for r in records] == [0, 1, 2]
    assert len({(r.trace_id, r.span_id) for r in records}) == 1
    assert [r.output_tokens for r in records] == [6, 6, 6]
    assert [problem for r in records for problem in violations(r)] == []


def test_a_stop_string_ends_the_request_where_the_front_end_sees_it(live: Live) -> None:
    free = send(live.port, live.body(40, 60, seed=72))
    stop = free.text[20:23]
    result = send(live.port, {**live.body(40, 60, seed=72), "stop": [stop]})
    record = live.records([result])[0]
    assert (record.status, record.finish_reason) == ("ok", "stop")
    assert record.output_tokens == result.usage["completion_tokens"]
    assert violations(record) == []


def test_a_caller_is_the_parent(live: Live) -> None:
    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Request-Id": "mine-1"}
    record = live.records([send(live.port, live.body(20, 3, seed=73), header)])[0]
    assert record.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert record.parent_span_id == "b7ad6b7169203331"
    assert record.external_id == "mine-1"


def test_a_refused_request_is_an_error_in_the_stage_that_refused_it(live: Live) -> None:
    count = len(load(live.store).requests)
    assert send(live.port, {"model": "stagetrace-demo", "messages": "nonsense"}).status == 400
    assert send(live.port, live.body(20, 9000, seed=74)).status == 400
    until = time.monotonic() + 60
    while len(fresh := load(live.store).requests[count:]) < 2:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert [r.status for r in fresh] == ["error", "error"]
    assert [(r.http_status, r.error_type) for r in fresh] == [(400, "400")] * 2
    assert [problem for r in fresh for problem in violations(r)] == []
    assert all(r.active_stage in ("http_receive", "tokenize", "chat_template", "admission") for r in fresh)


def test_a_client_that_leaves_is_an_abort(live: Live) -> None:
    count = len(load(live.store).requests)
    send(live.port, live.body(30, 2000, seed=75), hang_up_after_chunks=5)
    until = time.monotonic() + 60
    while not (fresh := [r for r in load(live.store).requests[count:] if r.status != "in_flight"]):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert (fresh[0].status, fresh[0].active_stage) == ("aborted", "decode")
    assert (fresh[0].http_status, fresh[0].error_type) == (200, "aborted")
    assert violations(fresh[0]) == []


def test_pause_and_resume(live: Live) -> None:
    def command(word: str) -> None:
        subprocess.run([sys.executable, "-m", "stagetrace", word, live.session.name], check=True, capture_output=True)

    count = len(load(live.store).requests)
    command("pause")
    paused = send(live.port, live.body(20, 5, seed=76))
    command("resume")
    resumed = send(live.port, live.body(20, 5, seed=77))
    record = live.records([resumed])[0]
    assert paused.status == 200
    assert violations(record) == []
    assert len(load(live.store).requests) == count + 1


def test_nothing_of_ours_shows_inside_but_the_hooks(live: Live, untraced: Untraced) -> None:
    inside = live.look_inside()
    # Helper processes of the engine load the plug-in too (a model-registry probe does); only these three record.
    assert len({ring.name.split("-")[1] for ring in live.session.glob("ring-*")}) == 3
    assert sorted(inside) == sorted(untraced.inside) == ["API", "EngineCore", "Worker"]
    for role, seen in inside.items():
        before = untraced.inside[role]
        extra = {m.partition(".")[0] for m in set(seen["modules"]) - set(before["modules"])}
        assert extra <= {"stagetrace", "stagetrace_vllm", "wrapt"}, role
        assert len(seen["threads"]) == len(before["threads"]), (role, seen["threads"], before["threads"])
        assert before["wrapped"] == [], "without a session nothing may be wrapped"
        assert seen["wrapped"], role


def test_a_killed_engine_leaves_its_requests_as_errors(live: Live) -> None:
    """Last, since it ends the server: eight requests stream, then the engine's process is gone."""
    count = len(load(live.store).requests)
    bodies = [live.body(50, 1500, seed=80 + i) for i in range(8)]
    clients = threading.Thread(target=lambda: run_many(live.port, bodies, 8))
    clients.start()
    until = time.monotonic() + 60
    while len([r for r in load(live.store).requests[count:] if r.ttft_ms]) < 8:
        assert time.monotonic() < until
        time.sleep(0.2)
    core = next(pid for pid, command in live.server.processes().items() if "EngineCore" in command)
    os.kill(core, signal.SIGKILL)
    clients.join(60)
    live.server.wait(60)
    records = load(live.store).requests[count:]
    assert [r.status for r in records] == ["error"] * 8
    assert {r.error_type for r in records} == {"engine_died"}, "their streams had begun"
    assert {r.active_stage for r in records} == {"decode"}
    assert [problem for r in records for problem in violations(r)] == []
