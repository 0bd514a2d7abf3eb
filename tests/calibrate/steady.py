"""Loads on one server, one after the other: they vary by less than servers do. In two of four it is really delayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from stagetrace.faults import Fault as Unusable
from stagetrace.gate.ab import Plan, order
from stagetrace.gate.runs import Run, runs_of_store
from stagetrace.pytest_plugin import Measured
from stagetrace.serve import Served, free_port
from tests.faults.plugin.stagetrace_faults import control
from tests.faults.plugin.stagetrace_faults.calls import DECODING
from tests.faults.plugin.stagetrace_faults.control import Fault
from tests.faults.server import PLUGIN

from .draws import noise

#: What is delayed, and by which share of its mean over so many loads before.
STAGES, SLOWER, BEFORE = ("prefill", "decode"), 0.10, 5
SIDES = (None, None, *STAGES)


@dataclass(frozen=True)
class Steady:
    """The loads without a delay, and by stage those with; ``added_ms`` to that stage of each request."""

    pool: list[Run]
    delayed: dict[str, list[Run]]
    added_ms: dict[str, float]


def make(engine: Any, folder: Path, loads: int, plan: Plan, console: Console) -> Steady:
    """``loads`` of each of ``SIDES`` in turn, on one server; what is in ``folder`` already is not made again."""
    made = once(folder / "steady", lambda part: _measure(engine, part, loads, plan, console))
    # The first loads warmed it up, and said how long the stages take.
    runs = whole(runs_of_store(made / "store.db"), BEFORE + len(_in_turn(loads)), made)
    sides: dict[str | None, list[Run]] = {side: [] for side in SIDES}
    for side, run in zip(_in_turn(loads), runs[BEFORE:], strict=True):
        sides[SIDES[side]].append(run)
    pool = sides.pop(None)
    return Steady(pool, {str(stage): found for stage, found in sides.items()}, _added_ms(runs[:BEFORE]))


def once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """``folder``, filled if it is not there yet; there only when it is whole."""
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        fill(part)
        part.rename(folder)
    return folder


def _measure(engine: Any, folder: Path, loads: int, plan: Plan, console: Console) -> None:
    tokens = int(plan.output_tokens)
    with on_one_server(engine, folder, plan) as (load, measured):
        for _ in range(BEFORE):
            load(None)
        measured.requests()  # returns when they are stored
        added = _added_ms(runs_of_store(measured.store))
        delays = {stage: Fault(stage, ms / times_delayed(stage, tokens)) for stage, ms in added.items()}
        for side in track(_in_turn(loads), "loads", console=console):
            stage = SIDES[side]
            load(delays[stage] if stage else None)


@contextmanager
def on_one_server(engine: Any, folder: Path, plan: Plan) -> Iterator[tuple[Callable[[Fault | None], None], Measured]]:
    """A server whose store is in ``folder``, and a function that sends it a load while it is delayed so."""
    path, port, store = folder / "delay.json", free_port(), folder / "store.db"
    control.write(path, None)
    # Without a cache of prefixes: what was asked before is computed anew, as the first time.
    words = [*engine.command(engine.make_model(folder.parent / "model"), port), "--no-enable-prefix-caching"]
    environment = {**engine.environment(), control.ENV: str(path.resolve()), "PYTHONPATH": str(PLUGIN)}
    with Served(words, port, store, folder / "server.log", environment) as server:
        measured = Measured(server)

        def load(delay: Fault | None) -> None:
            control.write(path, delay)
            measured.send(replace(plan, warmup=1))

        yield load, measured
        measured.requests()


def whole(runs: list[Run], loads: int, made: Path) -> list[Run]:
    """The runs, if they are so many."""
    if len(runs) != loads:
        raise Unusable(f"{made}: holds {len(runs)} loads, not the {loads} that were asked for; remove it to begin anew")
    return runs


def times_delayed(stage: str, output_tokens: int) -> int:
    """How often a request is delayed in it: in decode once for each further token."""
    return output_tokens - DECODING if stage == "decode" else 1


def _in_turn(loads: int) -> list[int]:
    return order(loads, len(SIDES))


def _added_ms(before: list[Run]) -> dict[str, float]:
    means = noise(before)
    return {stage: SLOWER * means[stage][0] for stage in STAGES}
