"""Loads on a server whose stages keep a steady pace, as those on an accelerator do: their runs vary by little.

Where two cores are shared with others, a stage of some milliseconds varies by 5 to 10 %. So one stage after the other
is given a computation of a fixed time on both sides, and is really slower by 10 % on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from stagetrace.gate.ab import Plan, order
from stagetrace.gate.decide import FAIL, FALSE_ALARMS
from stagetrace.gate.runs import Run, runs_of_store
from tests.faults.plugin.stagetrace_faults.control import Fault

from .draws import STAGES, Found, in_a_row, in_rounds, noise
from .steady import BEFORE, SLOWER, on_one_server, once, times_delayed, whole

#: What each stage is given, in ms a request, and the tokens of an answer. It is so much more than the stage's own time
#: that what that varies by is little of it.
PACE = {
    "tokenize": (60.0, 12),
    "admission": (60.0, 12),
    "prefill": (100.0, 12),
    "detokenize": (60.0, 12),
    "decode": (450.0, 5),
}
PROMPT_TOKENS = "60,400"
#: Two loads as they are, and one really slower.
SIDES = (False, False, True)
#: Compared are so many runs a side. Where they vary by no more than QUIET, CAUGHT of the slower ones have to be found.
RUNS, QUIET, CAUGHT = 5, 0.02, 0.95


@dataclass(frozen=True)
class Paced:
    """One stage's loads, in the rounds they were made in."""

    stage: str
    before: list[Run]
    same: list[Run]
    slower: list[Run]

    @property
    def mean_ms(self) -> float:
        """Of the stage, as it is."""
        return noise([*self.before, *self.same])[self.stage][0]

    @property
    def varies(self) -> float:
        """The coefficient of variation of its runs' means."""
        return noise([*self.before, *self.same])[self.stage][1]


def make(engine: Any, folder: Path, rounds: int, requests: int, console: Console) -> list[Paced]:
    """``rounds`` of loads of all ``SIDES`` in turn, a server for each stage; what is in ``folder`` already counts."""
    turns, found = order(rounds, len(SIDES)), []
    for stage in STAGES:
        plan = Plan(1, requests, 1, PROMPT_TOKENS, str(PACE[stage][1]))
        made = once(folder / f"paced-{stage}", partial(_measure, engine, stage, turns, plan, console))
        runs = whole(runs_of_store(made / "store.db"), BEFORE + len(turns), made)
        sides: list[list[Run]] = [[] for _ in SIDES]
        for side, run in zip(turns, runs[BEFORE:], strict=True):
            sides[side].append(run)
        found.append(Paced(stage, *sides))
    return found


def _measure(engine: Any, stage: str, turns: list[int], plan: Plan, console: Console, folder: Path) -> None:
    with on_one_server(engine, folder, plan) as (load, measured):
        for _ in range(BEFORE):
            load(None)
        measured.requests()  # returns when they are stored
        own_ms = noise(runs_of_store(measured.store))[stage][0]
        pace_ms = PACE[stage][0]
        more_ms = SLOWER * (pace_ms + own_ms)
        times = times_delayed(stage, int(plan.output_tokens))
        for side in track(turns, stage, console=console):
            load(Fault(stage, (pace_ms + SIDES[side] * more_ms) / times))


def page(found: list[Paced], comparisons: int) -> tuple[list[str], bool]:
    """A table of what the gate says of them, and whether it is what is promised."""
    rng, kept = np.random.default_rng(0), True
    lines = [
        f"{len(found[0].before)} rounds of three loads for each stage, on a server that gives it a fixed time; on the "
        f"slower side {SLOWER:.0%} more. PASS / **FAIL** / INCONCLUSIVE of {comparisons} comparisons of {RUNS} rounds "
        f"drawn, and the FAIL under the right stage among all {RUNS} rounds in a row.",
        "",
        f"| stage | mean (ms) | runs vary by | nothing changed | slower by {SLOWER:.0%} | right stage | in a row |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        same = in_rounds((each.before, each.same), RUNS, comparisons, rng, each.stage)
        slower = in_rounds((each.before, each.slower), RUNS, comparisons, rng, each.stage)
        row = in_a_row(each.before, each.slower, RUNS, each.stage)
        kept = kept and same.shares()[FAIL] <= FALSE_ALARMS
        if each.varies <= QUIET:
            kept = kept and slower.named >= CAUGHT * slower.comparisons
        lines.append(
            f"| `{each.stage}` | {each.mean_ms:.1f} | {each.varies:.2%} | {_shares(same)} | {_shares(slower)} "
            f"| {slower.named} of {slower.verdicts[FAIL]} | {row.named} of {row.comparisons} |"
        )
    return lines, kept


def _shares(found: Found) -> str:
    return "{:.1%} / **{:.1%}** / {:.1%}".format(*found.shares().values())
