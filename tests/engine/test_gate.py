"""The gate on a real server that is made slower while it serves: it names the stage, and does not fail the same twice.

The short form of `make calibrate`: loads on one server instead of servers started anew, and delays that a busy machine
cannot hide.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagetrace.gate.ab import Plan
from stagetrace.gate.compare import Report, compare
from stagetrace.gate.decide import FAIL
from stagetrace.gate.match import match
from stagetrace.gate.runs import Run, runs_of_store
from stagetrace.gate.settings import Wishes
from stagetrace.pytest_plugin import Measured, servers
from tests.faults.plugin.stagetrace_faults import control
from tests.faults.plugin.stagetrace_faults.control import Fault
from tests.faults.server import PLUGIN

#: Shorter than a block of the prefix cache: the same prompts again are computed again.
WARM_UP = 4
PLAN = Plan(runs=4, requests=5, prompt_tokens="60", output_tokens="8", warmup=1)
FAULTS = {
    "before": None, "same": None, "prefill": Fault("prefill", 120.0), "decode": Fault("decode", 25.0),
}  # fmt: skip


@dataclass(frozen=True)
class Inject:
    """Writes the file that the server looks at."""

    path: Path

    def __call__(self, fault: Fault | None) -> None:
        control.write(self.path, fault)


@pytest.fixture(scope="module")
def inject(tmp_path_factory: pytest.TempPathFactory) -> Inject:
    """Delays what the server is sent from now on."""
    path = tmp_path_factory.mktemp("faults") / "faults.json"
    control.write(path, None)
    return Inject(path)


@pytest.fixture(scope="module")
def measured(engine: Any, model: Path, inject: Inject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """The server, started as the pytest plug-in does it, and seen through it."""
    variables = {**engine.environment(), control.ENV: str(inject.path), "PYTHONPATH": str(PLUGIN)}
    assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    with servers(tmp_path_factory.mktemp("gate")) as start:
        live = start(f"{assigned} {shlex.join(engine.command(model, '{port}'))}")
        for tokens in ("1", "2", "20", "2")[:WARM_UP]:
            live.load(requests=1, prompt_tokens="60", output_tokens=tokens, warmup=1)
        yield live


@pytest.fixture(scope="module")
def runs(inject: Inject, measured: Measured) -> dict[str, list[Run]]:
    """Each side's runs, all of them interleaved: forth and back, so that what drifts meets all alike."""
    names: list[str] = []
    for number in range(PLAN.runs):
        for name in list(FAULTS) if number % 2 == 0 else list(FAULTS)[::-1]:
            inject(FAULTS[name])
            measured.send(PLAN)
            names.append(name)
    inject(None)
    measured.requests()
    found: dict[str, list[Run]] = {name: [] for name in FAULTS}
    for name, run in zip(names, runs_of_store(measured.store)[WARM_UP:], strict=True):
        found[name].append(run)
    return found


def report(runs: dict[str, list[Run]], name: str) -> Report:
    return compare(match(runs["before"], runs[name]), Wishes())


def seen(found: Report) -> list[tuple[str, str, float]]:
    return [(row.measure.key, row.outcome.verdict, round(row.change, 3)) for row in found.rows]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_delay_is_a_failure_of_its_stage(stage: str, runs: dict[str, list[Run]]) -> None:
    found = report(runs, stage)
    assert found.verdict == FAIL, seen(found)
    assert found.culprit is not None and found.culprit.measure.key == stage, seen(found)
    assert found.shown and all(shown.after_ms > shown.before_ms and shown.id for shown in found.shown)


def test_the_same_server_twice_is_none(runs: dict[str, list[Run]]) -> None:
    found = report(runs, "same")
    assert found.verdict != FAIL, seen(found)


def test_the_runs_say_what_was_run(runs: dict[str, list[Run]]) -> None:
    fingerprint = runs["before"][0].fingerprint
    assert (fingerprint["engine"], fingerprint["device"], fingerprint["concurrency"]) == ("vllm", "cpu", 1)
    assert fingerprint["cached_tokens"] == 0 and fingerprint["output_tokens"] == 8
    assert all(not run.without and len(run.requests) == PLAN.requests for side in runs.values() for run in side)


def test_a_stage_can_be_asserted(inject: Inject, measured: Measured, runs: dict[str, list[Run]]) -> None:
    inject(FAULTS["prefill"])
    measured.send(PLAN)
    inject(None)
    with pytest.raises(pytest.fail.Exception, match="prefill: p50 is 1"):
        measured.assert_stage("prefill", p50_ms=100)
    measured.assert_stage("prefill", p50_ms=60_000)
