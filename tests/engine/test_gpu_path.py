"""What GPU users run (V2 runner, asynchronous scheduling, worker inside the engine), on a CPU: the same twelve stages.

Kernels go through Triton's interpreter, and what they are launched on is a device on paper, so times mean little here;
order, number, tokens and who waits for whom do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagetrace import load
from stagetrace.guard import MAX_FAILURES
from stagetrace.model import RequestRecord
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.conftest import NAME, OFFLINE_PROMPTS, Live, Starter, Untraced, serial_bodies
from tests.engine.ends import crowd, ended, kill
from tests.engine.gpupath.plugin.gpu_default_path.device import WORK_NS
from tests.engine.kinds import CHAT, IDS_ONLY, Kind, adds_up, ask_all, at_once, chat, check, text
from tests.engine.saboteur.saboteur_control import MODEL, Control
from tests.engine.serving import run_many, send
from tests.engine.ship import Ship
from tests.invariants import violations
from tests.randomised import mix
from tests.randomised.run import random_run
from tests.receivers import receiver

#: One file, one configuration at a time; each server answers all of these.
SERVERS = ("v2_async_uni", "v2_async_mp", "v1_async_uni")


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Control:
    return Control(tmp_path_factory.mktemp("control") / "orders")


@pytest.fixture(scope="module", params=SERVERS)
def live(request: pytest.FixtureRequest, starter: Starter, untraced: Untraced, control: Control) -> Iterator[Live]:
    # Few blocks, for evictions; still enough for the longest prompt.
    extra = ("--num-gpu-blocks-override", "24", "--scheduling-policy", "priority", "--enable-scale-out")
    with receiver() as received:
        yield from starter.start(request.param, traced=True, extra=extra, received=received, SABOTAGE=str(control.path))


#: A clock read in other units, or from another step's beginning, is wrong by far more.
CLAMPED_MS = 20.0
ON_DEVICE = ("embedding", "prefill", "lm_head", "sample")


def all_measured(record: RequestRecord, by: str = "cuda_event") -> None:
    """Twelve stages, once each, every applicable one measured; what runs on the device ``by`` its clock."""
    assert violations(record) == []
    assert {s.state for s in record.stages} <= {"measured", "not_applicable"}, [(s.key, s.state) for s in record.stages]
    measured = [s for s in record.stages if s.state == "measured"]
    assert {s.source for s in measured if s.key in ON_DEVICE} == {by}
    assert {s.source for s in measured if s.key not in ON_DEVICE} == {"host_clock"}
    # Where the host loses the CPU, the two clocks agree as well as that allows, and no better.
    assert max(s.attributes.get("clamped_ms", 0.0) for s in measured) < CLAMPED_MS
    decode = record.stage("decode")
    # The steps may all be over when the first text is sent: then there is nothing to be divided.
    if decode.state == "measured" and decode.attributes["split_ms"]["forward"]:
        assert decode.attributes["split_source"] == by


def test_twelve_stages_and_the_same_answers(live: Live, untraced: Untraced) -> None:
    results = run_many(live.port, serial_bodies(live), 1)
    assert [r.text for r in results] == untraced.serial
    for result, record in zip(results, live.records(results), strict=True):
        all_measured(record)
        assert record.output_tokens == result.usage["completion_tokens"]


def test_several_at_once(live: Live) -> None:
    bodies = [live.body(60 + 200 * i, 8, seed=i, stream=i % 2 == 0) for i in range(6)]
    results = run_many(live.port, bodies, 6)
    for record in live.records(results):
        all_measured(record)
        split = record.stage("decode").attributes["split_ms"]
        assert split["forward"] > 0


def test_kinds(live: Live) -> None:
    """Of test_kinds.py those that the engine's layout might make a difference to."""
    ids = {**live.body(20, 5, chat=False), "prompt": list(range(10, 60))}
    stop = send(live.port, chat(live, 40, 20, 600)).text[8:11]
    grammar = {"structured_outputs": {"choice": ["yes", "perhaps"]}, "ignore_eos": False}
    kinds = {
        "n": Kind(CHAT, chat(live, 60, 5, 601, n=2, temperature=0.8), sequences=2, ttft="internal"),
        "ids": Kind("/v1/completions", ids, "text_completion", IDS_ONLY),
        "stop": Kind(CHAT, chat(live, 40, 20, 600, stop=[stop]), finish="stop"),
        "grammar": Kind(CHAT, chat(live, 40, 9, 602, **grammar), finish="stop"),
        "prompt-logprobs": Kind(CHAT, chat(live, 100, 3, 603, stream=False, prompt_logprobs=1), ttft="internal"),
        "responses": Kind(
            "/v1/responses", {"model": NAME, "input": text(live, 60, 604), "max_output_tokens": 4, "stream": True},
        ),
    }  # fmt: skip
    for answered in ask_all(live, kinds).values():
        check(answered)


def test_preemption(live: Live) -> None:
    records = at_once(live, "evicted", 60, *[600] * 4)
    assert sum(r.preemptions for r in records) > 0
    for record in records:
        split = record.stage("decode").attributes["split_ms"]
        assert (split["preempted"] > 0) == (record.preemptions > 0)
        adds_up(record)


def test_a_client_that_leaves(live: Live) -> None:
    send(live.port, live.body(30, 2000, seed=3), hang_up_after_chunks=2)
    after = live.records([send(live.port, live.body(30, 3, seed=4))])
    all_measured(after[0])
    aborted = [r for r in load(live.store).requests if r.status == "aborted"]
    assert [r.active_stage for r in aborted] == ["decode"]


def test_the_device_is_asked_and_never_waited_for(live: Live) -> None:
    """After all of the above: by calls of ours the host has waited for nothing, and only real steps had events."""
    all_measured(live.records([send(live.port, live.body(30, 5, seed=5))])[0])
    inside = live.look_inside()
    counts = inside["Worker" if "Worker" in inside else "EngineCore"]["device"]
    assert counts["synchronize vllm"] > 0
    ours = {what.rpartition(" ")[0]: n for what, n in counts.items() if what.endswith((" stagetrace", "_vllm"))}
    assert ours.keys() <= {"make", "record", "query", "elapsed_time", "is_current_stream_capturing"}, ours
    assert "elapsed_time too early" not in counts
    steps = [step for step in load(live.store).steps if step.tokens]
    assert ours["record"] == 7 * ours["is_current_stream_capturing"] == 7 * len(steps)
    assert ours["make"] < 200 and len(steps) > 100


def test_steps_are_where_the_device_had_them(live: Live) -> None:
    """In order, within what the host saw of them, and as long as the device took, which the host did not."""
    live.records([send(live.port, live.body(30, 20, seed=6))])
    steps = [step for step in load(live.store).steps if step.tokens]
    reached, overlaps_ns = 0, []
    for step in steps:
        assert step.device_timed and step.execute_ns and step.update_ns
        forward, head, sample = step.forward_ns, step.lm_head_ns, step.sample_ns
        assert forward and head and sample
        edges = [step.execute_ns[0], forward[0], forward[1], head[0], head[1], sample[0], sample[1]]
        assert edges == sorted(edges) and sample[1] <= step.update_ns[0]
        assert min(head[1] - head[0], sample[1] - sample[0]) >= WORK_NS - 1000
        overlaps_ns.append(reached - forward[0])
        reached = sample[1]
    # Each step's times are put on the host's clock for themselves. Where the host lost the CPU before it saw a step's
    # end, that step may lie late by as much, into the next; the assembler divides what two of them claim.
    assert sum(ns > 100_000 for ns in overlaps_ns) <= len(steps) / 10, sorted(overlaps_ns)[-20:]


def test_a_random_mix(live: Live) -> None:
    """The short form of `make random`."""
    outcome = random_run(Ship.joining(live), mix.generated(live.prompts, mix.SLOW), count=20, number=22)
    assert outcome.problems == []


#: Who is killed; in the server that is left the model raises, which ends its engine.
VICTIMS = {"v2_async_uni": "EngineCore", "v2_async_mp": "Worker"}


def test_a_server_that_ends(live: Live, control: Control, request: pytest.FixtureRequest) -> None:
    """This comes last: each with all slots taken and two requests waiting."""
    ship = Ship.joining(live)
    calls = crowd(ship)
    victim = VICTIMS.get(request.node.callspec.params["live"])
    if victim:
        kill(ship, victim)
    else:
        control.order(engine=MODEL)
    records = ended(ship, calls, code=0)
    assert {(r.status, r.finish_reason) for r in records} == {("error", None)}
    assert {r.error_type for r in records} <= {"500", "engine_died"}
    assert [r.active_stage for r in records] == ["decode"] * 8 + ["admission"] * 2
    assert all(r.e2e_ms is not None for r in records)


def test_a_device_that_fails_costs_its_times_and_nothing_else(starter: Starter, untraced: Untraced) -> None:
    """Every time it is asked for one; the CPU's own times are true here, and stand in."""
    for live in starter.start("v1_async_uni", traced=True, GPU_DEVICE_FAILS="elapsed_time"):
        results = run_many(live.port, serial_bodies(live), 1)
        assert [r.text for r in results] == untraced.serial
        for record in live.records(results):
            all_measured(record, by="host_clock")
        log = (live.folder / "server.log").read_text()
        assert log.count("torch.cuda.Event") == log.count("hook torch.cuda.Event failed (RuntimeError)") == 1
        assert live.look_inside()["EngineCore"]["device"]["elapsed_time stagetrace"] == MAX_FAILURES


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
prompts = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560, max_num_seqs=8)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
one = llm.chat([[{"role": "user", "content": p}] for p in prompts], params)
print("ANSWERS", json.dumps([o.outputs[0].text for o in one]))
"""


@pytest.mark.parametrize("name", ["v2_async_inproc", "v2_async_uni_fork"])
def test_offline(name: str, starter: Starter, untraced: Untraced, model: Path, tmp_path: Path) -> None:
    """``LLM.chat`` in one process, or with a forked engine: a root per prompt, no HTTP stage."""
    configuration = CONFIGURATIONS[name]
    prompts = [starter.prompt(tokens, 5) for tokens in OFFLINE_PROMPTS]
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    store = tmp_path / "store.db"
    command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--", sys.executable, str(script)]
    environment = {**os.environ, **starter.engine.environment(), **configuration.environment()}
    done = subprocess.run(
        [*command, str(model), json.dumps(prompts)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    assert json.loads(answers.removeprefix("ANSWERS ")) == untraced.offline
    records = load(store).requests
    assert len({r.span_id for r in records}) == len(prompts)
    for record in records:
        all_measured(record)
        assert record.stage("http_receive").state == "not_applicable"
        assert record.stage("chat_template").state == "measured"
        assert (record.output_tokens, record.ttft_kind) == (12, "internal")
