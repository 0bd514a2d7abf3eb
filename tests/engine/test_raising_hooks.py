"""Every hook made to raise, one at a time: no request notices, its stages say that nobody saw them, we say why, once.

The cases are the rows of the integration's own table, so a new hook is a case by itself; one that is called in neither
of the two engines here fails the last test until it is listed there or somebody calls it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stagetrace import live, load
from stagetrace.model import RequestRecord
from stagetrace.stages import BY_KEY
from stagetrace_vllm import INTEGRATION
from tests.engine.configurations import CONFIGURATIONS, SABOTEUR
from tests.engine.conftest import NAME, Starter
from tests.engine.fleet import GPU_LIKE, STARTED_WITH, Fleet
from tests.engine.saboteur.saboteur_control import ENTER, FAIL, LEAVE, Control
from tests.engine.serving import ClientResult
from tests.engine.ship import CANARY, Ship
from tests.invariants import violations

#: Whichever of these tests comes first waits for several servers to start.
pytestmark = pytest.mark.timeout(900)

#: Where this one fails, requests are known from the engine's door on only, under a trace of their own.
UNWATCHED = "fastapi.applications:FastAPI.build_middleware_stack"
#: Handlers of routes that versions may lack: `doctor` does not count stage 1 among what they cost.
HANDLERS = {
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages",
    "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens",
}
#: Functions of ours beside the rows, and the row whose guard is theirs.
BESIDE = {
    "stagetrace_vllm.asgi:texts": UNWATCHED,
    "stagetrace_vllm.asgi:has_text": UNWATCHED,
    "stagetrace_vllm.worker_hooks:_embedding_entered": "vllm.v1.worker.gpu_worker:Worker.load_model",
    "stagetrace_vllm.worker_hooks:_embedding_left": "vllm.v1.worker.gpu_worker:Worker.load_model",
}


class Case(NamedTuple):
    """A function that raises: the ``hook``'s name as the saboteur knows it, and the ``row`` it belongs to."""

    hook: str
    part: int
    row: str

    def __str__(self) -> str:
        return f"{self.hook.partition(':')[2]}-{('enter', 'leave', 'fail')[self.part - 1]}"


#: How we begin to speak of a hook; a progress bar may stand before it in the line.
OURS = "stagetrace: hook "
#: Nothing raises.
WELL = Case("", 0, "")
ROWS = {hook.target: group for group in INTEGRATION.hooks for hook in group.hooks}
#: The runner that a CPU chooses by itself.
V1_ROWS = {row for row, group in ROWS.items() if group.name == "v1_runner"}
#: These need a GPU, a pooling model, a draft model beside the V2 runner, or asynchronous scheduling beside the V1.
ELSEWHERE = ("device", "pooling", "pooled_v1", "pooled_v2", "v2_speculative")
NOT_CALLED_HERE = {row for row, group in ROWS.items() if group.name in ELSEWHERE}
NOT_CALLED_HERE |= V1_ROWS if GPU_LIKE else {row for row in V1_ROWS if row.endswith(".get_output")}
CASES = [
    Case(hook.target, part, hook.target)
    for group in INTEGRATION.hooks
    for hook in group.hooks
    for part, function in ((ENTER, hook.enter), (LEAVE, hook.leave), (FAIL, hook.fail))
    if function is not None
] + [Case(name, ENTER, row) for name, row in BESIDE.items()]
#: Called while the server is started: the fleet's ``plain`` is started with this one raising.
BUILDING = Case(STARTED_WITH, ENTER, STARTED_WITH)


@dataclass
class Run:
    """What became of the requests of one case, and what was said on stderr while it lasted."""

    answers: list[ClientResult] = field(default_factory=list)
    records: list[list[RequestRecord]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def raised(self) -> bool:
        return any("Sabotage" in line for line in self.said)


def mix(ship: Ship) -> list[dict[str, Any]]:
    """Requests that call different hooks, enough of them for one to be removed; the last one gives up."""
    body = ship.live.body
    responses = {"model": NAME, "input": "hello", "max_output_tokens": 3, "temperature": 0.0}
    messages = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0.0}
    ids = {"model": NAME, "token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 3, "temperature": 0.0}}
    return [
        *({"body": body(90, 6, seed=i)} for i in range(3)),
        *({"body": body(40, 5, seed=i, stream=False, chat=False)} for i in range(2)),
        {"body": responses, "path": "/v1/responses"},
        {"body": messages, "path": "/v1/messages"},
        {"body": ids, "path": "/inference/v1/generate"},
        {"body": {**body(20, 3), "logprobs": True, "top_logprobs": 999}},
        {"body": body(30, 2000, seed=3), "hang_up_after_chunks": 3},
    ]


@pytest.fixture(scope="module")
def runs(ships: Fleet) -> dict[Case, Run]:
    """All cases on one server, whose store is read once, at the end. The first is that of nothing raising."""
    ship, found, traces = ships.plain, {}, {}
    asks = mix(ship)
    building = ship.said()
    for case in (WELL, *CASES):
        # While nothing raises, these find every hook put back.
        ship.control.order()
        ship.ask_many([{"body": ship.live.body(12, 1)}] * 2, 1)
        before = len(ship.said())
        ship.control.order(case.hook, case.part)
        # Some at once, and some afterwards, one by one: batches make other sums.
        answers = [*ship.ask_many(asks, 10), *ship.ask_many([asks[0], asks[3], asks[-1]], 1)]
        ship.idle()
        traces[case] = [trace for trace, _ in answers]
        found[case] = Run([answer for _, answer in answers], said=ship.said()[before:])
    ship.control.order()
    found[BUILDING].said = [line for line in building if "Sabotage" in line]
    for case, run in found.items():
        if case.row == UNWATCHED and case is not WELL:
            run.records = _by_answer(ship, run.answers)
        else:
            run.records = ship.stored(traces[case])
    return found


def _by_answer(ship: Ship, answers: list[ClientResult]) -> list[list[RequestRecord]]:
    """The records of calls whose headers nobody has read, by the ids they were answered with."""
    known: dict[str, RequestRecord] = {}
    for record in load(ship.store).requests:
        known[record.request_id] = known[record.request_id.rpartition("-")[0]] = record
    return [[known[answer.response_id]] if answer.response_id in known else [] for answer in answers]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hook_that_raises(runs: dict[Case, Run], case: Case) -> None:
    run, well = runs[case], runs[WELL]
    for answer, usual in zip(run.answers, well.answers, strict=True):
        assert (answer.status, answer.error, answer.usage) == (usual.status, usual.error, usual.usage)
    assert [a.text for a in run.answers[-3:-1]] == [a.text for a in well.answers[-3:-1]]
    assert [problem for records in run.records for r in records for problem in violations(r)] == []
    may_lose = set(ROWS[case.row].stages) if run.raised else set()
    if case.row in HANDLERS:
        may_lose |= {"http_receive"}  # of this route's requests
    for records, usual in zip(run.records, well.records, strict=True):
        if not records and case.row == UNWATCHED:  # it was refused before it had an id
            continue
        ((record,), (as_usual,)) = records, usual
        assert record.status == as_usual.status
        assert lost(record, as_usual) <= may_lose, f"{case}: {lost(record, as_usual)} are lost, not {may_lose} alone"
    said = [line for line in run.said if "failed" in line]
    assert said == ([f"stagetrace: hook {case.row} failed (Sabotage); its stage may be missing"] if run.raised else [])


def lost(record: RequestRecord, usual: RequestRecord) -> set[str]:
    """The stages that nobody saw of a request, though the same request has them as a rule."""
    pairs = zip(record.stages, usual.stages, strict=True)
    gone = {stage.key for stage, before in pairs if stage.state == "not_observable" != before.state}
    others = [
        (stage.key, stage.state, before.state)
        for stage, before in zip(record.stages, usual.stages, strict=True)
        if stage.state not in (before.state, "not_observable") and record.status == "ok"
    ]
    assert others == [], "neither seen nor said to be unseen"
    return gone


#: Some of them in full: hook → what nobody sees of a streamed chat without it.
UNSEEN = {
    "OpenAIServingChat.create_chat_completion-enter": {"http_receive"},
    "BaseRenderer.render_chat_async-enter": {"chat_template"},
    "BaseRenderer.tokenize_prompts_async-leave": {"chat_template", "tokenize"},
    "OutputProcessor.add_request-enter": {stage for stage, row in BY_KEY.items() if row.number > 3},
    "KVCacheManager.get_computed_blocks-enter": {"admission", "kv_allocate"},
    "Scheduler._free_request-leave": {"decode", "teardown"},
    "Worker.execute_model-enter": {"embedding", "prefill", "lm_head", "sample"},
    # With the V2 runner the head's end goes with the hook that is removed, too.
    **({"Sampler.__call__-leave": {"lm_head", "sample"}} if GPU_LIKE else {"GPUModelRunner._sample-leave": {"sample"}}),
    "_embedding_left-enter": {"embedding"},
}


@pytest.mark.parametrize("name", UNSEEN)
def test_its_stages_were_not_observable(runs: dict[Case, Run], name: str) -> None:
    case = next(case for case in CASES if str(case) == name)
    # The last chat but the one that gave up was sent when the hook had raised often enough.
    ((record,), (usual,)) = runs[case].records[-3], runs[WELL].records[-3]
    assert (record.status, lost(record, usual)) == ("ok", UNSEEN[name])


def test_doctor_says_why(ships: Fleet, runs: dict[Case, Run]) -> None:
    told = live.server(ships.plain.live.session)
    out = subprocess.run([sys.executable, "-m", "stagetrace", "doctor", "--json"], capture_output=True, timeout=120)
    document = json.loads(out.stdout)
    rows = {row["target"]: row for row in document["hooks"]}
    raised = {case.row for case, run in runs.items() if run.raised}
    for target in raised:
        assert rows[target]["state"] in ("failing", "removed") and rows[target]["reason"] == "Sabotage", rows[target]
        assert told.states[target].endswith(" Sabotage")
    stages = {stage["key"]: stage for stage in document["stages"]}
    for key in {key for target in raised for key in ROWS[target].stages}:
        assert stages[key]["state"] == "not_observable" and "Sabotage" in stages[key]["reason"], stages[key]


@dataclass
class Offline:
    """What one case generated, in the process of one's own, what was recorded of it, and what was said."""

    texts: list[str]
    records: list[RequestRecord]
    said: list[str]


@pytest.fixture(scope="module")
def offline(runs: dict[Case, Run], starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Offline]:
    """What is called in neither an API server nor the V1 runner: `LLM` and the V2 runner, all in one process."""
    called = {case.row for case, run in runs.items() if run.raised}
    rest = [WELL, *(case for case in CASES if case.row not in called | NOT_CALLED_HERE)]
    folder = tmp_path_factory.mktemp("offline")
    store, control = folder / "store.db", folder / "control"
    Control(control)
    environment = {**os.environ, **starter.engine.environment(), **CONFIGURATIONS["v2_async_inproc"].environment()}
    environment |= {"SABOTAGE": str(control), "SABOTAGE_SAYS": CANARY}
    environment["PYTHONPATH"] = os.pathsep.join([SABOTEUR, environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--",
         sys.executable, str(Path(__file__).with_name("raising_offline.py")), str(control), str(starter.model),
         json.dumps([case[:2] for case in rest])],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    spoken = [part.splitlines() for part in done.stderr.split("CASE ")[1:]]
    known = {case[:2]: case for case in rest}
    found = {}
    for line, after, said in zip(lines, [*lines[1:], {"began": float("inf")}], spoken, strict=True):
        records = [r for r in load(store).requests if line["began"] <= r.start_unix_ns < after["began"]]
        found[known[tuple(line["case"])]] = Offline(
            line["texts"], records, [text[text.index(OURS) :] for text in said if OURS in text]
        )
    assert len(found) == len(rest)
    return found


def test_a_hook_that_raises_offline(offline: dict[Case, Offline]) -> None:
    well = offline[WELL]
    assert sorted(r.status for r in well.records) == ["error", "error", "ok", "ok", "ok", "ok"]
    assert max(r.preemptions for r in well.records) == 1
    for case, run in offline.items():
        assert run.texts == well.texts, case
        assert [problem for r in run.records for problem in violations(r)] == [], case
        assert [r.status for r in run.records].count("ok") == 4, case
        # What is refused by the tokenizer is a call from where the tokenizer's hook sees it.
        assert [r.status for r in run.records].count("error") in ((1, 2) if run.said else (2,)), case
        assert run.said in ([], [f"stagetrace: hook {case.row} failed (Sabotage); its stage may be missing"]), case


def test_every_hook_has_raised(runs: dict[Case, Run], offline: dict[Case, Offline]) -> None:
    there = {case.row for case, run in runs.items() if run.raised}
    here = {case.row for case, run in offline.items() if run.said}
    assert set(ROWS) - there - here == NOT_CALLED_HERE
