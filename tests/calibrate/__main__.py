"""``python -m tests.calibrate``: the gate's false alarms and catches, on real servers of this machine.

It compares the demo's server with itself, again and again over the time given, and draws further comparisons from those
runs. In between it compares it with servers that have a delay in one stage. What is in DIR already counts: it may be
interrupted, and goes on. With --steady it loads one server again and again instead: runs that vary by less; with
--paced one whose stages keep a steady pace: they vary by less still.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase

import numpy as np
from rich.console import Console

from benchmarks.output import environment
from stagetrace.faults import Fault as Unusable
from stagetrace.gate.ab import Command, Plan, measure
from stagetrace.gate.compare import Report, compare
from stagetrace.gate.decide import FAIL, FALSE_ALARMS, INCONCLUSIVE
from stagetrace.gate.match import match
from stagetrace.gate.runs import Run, runs_of_store
from stagetrace.gate.settings import Wishes
from stagetrace_vllm.demo_server import DemoServer
from tests.faults.plugin.stagetrace_faults import control
from tests.faults.plugin.stagetrace_faults.control import Fault
from tests.faults.server import PLUGIN

from . import paced, steady
from .draws import STAGES, Found, draw, draw_as_asked, in_a_row, noise

SIZES = (5, 10, 20, 40)
SLOWER = (0.10, 0.25)
#: A delay is this share of its stage, or so many standard deviations of runs, whichever is more; known of so many runs.
DELAY, DEVIATIONS, FEWEST = 0.25, 4.0, 30
#: So many loads in a row are compared; runs that vary by no more are quiet.
IN_A_ROW, QUIET = (5, 10, 15), 0.04
#: Of the comparisons that could not tell, so many are made again with the runs they asked for.
FOLLOWED = 100
PROMPT_TOKENS, OUTPUT_TOKENS = "60,400", 60


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="python -m tests.calibrate", description=__doc__)
    made.add_argument("--dir", type=Path, default=Path("calibration"), metavar="DIR", help="where runs are kept")
    made.add_argument("--tries", type=int, default=10, metavar="N", help="of the same server on both sides (10)")
    made.add_argument("--side", type=int, default=4, metavar="N", help="runs a side of each try (4)")
    made.add_argument("--delayed", type=int, default=5, metavar="N", help="runs of each delayed server (5)")
    made.add_argument("--hours", type=float, default=2.0, metavar="H", help="spread the tries over this time (2)")
    made.add_argument("--requests", type=int, default=40, metavar="N", help="requests in a run (40)")
    made.add_argument(
        "--steady", type=int, default=0, metavar="N", help="on one server, 2 N loads, and N for each stage delayed"
    )
    made.add_argument(
        "--paced",
        type=int,
        default=0,
        metavar="N",
        help="on a server with a fixed time put into a stage, for each stage N rounds of 3 loads",
    )
    made.add_argument("--comparisons", type=int, default=500, metavar="N", help="to draw for each row (500)")
    made.add_argument("--markdown", type=Path, metavar="OUT", help="write what was found to OUT as a page")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; 0 if the gate did what it promises, 1 if not, 2 if it could not be measured."""
    asked = parser().parse_args(arguments)
    engine, console = DemoServer(), Console()
    missing = engine.missing()
    if missing:
        print(f"calibrate: {missing}", file=sys.stderr)
        return 2
    asked.dir.mkdir(parents=True, exist_ok=True)
    try:
        if asked.steady:
            made = steady.make(engine, asked.dir, asked.steady, _plan(1, asked), console)
            lines, kept = _steady(made, asked, console)
        elif asked.paced:
            rounds = paced.make(engine, asked.dir, asked.paced, asked.requests, console)
            lines, kept = paced.page(rounds, asked.comparisons)
        else:
            bench = Bench(engine, asked, console)
            bench.make()
            lines, kept = _page(bench, asked, console)
    except Unusable as fault:
        print(f"calibrate: {fault}", file=sys.stderr)
        return 2
    if asked.markdown:
        asked.markdown.write_text("\n".join(["# Calibration of the gate", "", *lines, ""]))
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    return 0 if kept else 1


class Bench:
    """Starts the servers. What is in the folder already counts, and is not made again."""

    def __init__(self, engine: DemoServer, asked: argparse.Namespace, console: Console) -> None:
        self.dir: Path = asked.dir
        self.asked, self.console = asked, console
        model = engine.make_model(self.dir / "model")
        self._words = tuple(engine.command(model, "{port}"))  # type: ignore[arg-type]
        self._environment = engine.environment()

    def make(self) -> None:
        """The same server on both sides, at equal distances in time; once the noise is known, those with a delay."""
        first = [run.started_unix_ns / 1e9 for run in self.pool()]
        began = min(first, default=time.time())
        for number in range(self.asked.tries):
            if len(self.pool()) >= FEWEST:
                self._delays()
            due = began + number * self.asked.hours * 3600 / max(1, self.asked.tries - 1)
            if not self.tried(number).exists():
                time.sleep(max(0.0, due - time.time()))
                none = self._command(None)
                self._run(self.tried(number), [none, none], self.asked.side)
        self._delays()

    def tried(self, number: int) -> Path:
        """Where the runs of a try are."""
        return self.dir / f"same-{number + 1:02d}"

    @property
    def delays(self) -> Path:
        """Where the runs with a delay are: side b and on, in the order of STAGES. Side a has none."""
        return self.dir / "delays"

    def delay_ms(self, stage: str) -> float:
        """What was put into that stage, in ms a request."""
        fault = json.loads(self._control(stage).read_text())
        return float(fault["delay_ms"]) * _times(stage)

    def pool(self) -> list[Run]:
        """Every run without a delay that both sides of a try were made of."""
        return [run for folder in sorted(self.dir.glob("same-??")) for side in runs_in(folder, "ab") for run in side]

    def _delays(self) -> None:
        if self.delays.exists():
            return
        faults = [None]
        found = noise(self.pool())
        for stage in STAGES:
            mean_ms, variation = found[stage]
            faults.append(Fault(stage, max(DELAY, DEVIATIONS * variation) * mean_ms / _times(stage)))
        self._run(self.delays, [self._command(fault) for fault in faults], self.asked.delayed)

    def _run(self, folder: Path, commands: list[Command], runs: int) -> None:
        """All of them in turn, each run on a server of its own; in place when it is whole."""
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        measure(commands, _plan(runs, self.asked), part, lambda *_: None)
        part.rename(folder)
        self.console.print(f"{time.strftime('%H:%M:%S')} {folder.name}: {judged(folder).verdict}", highlight=False)

    def _command(self, fault: Fault | None) -> Command:
        """The server; all have the plug-in, and look at a file."""
        path = self._control(fault.place if fault else "none")
        control.write(path, fault)
        return Command(self._words, {**self._environment, control.ENV: str(path), "PYTHONPATH": str(PLUGIN)})

    def _control(self, name: str) -> Path:
        return (self.dir / f"{name}.json").resolve()


def _plan(runs: int, asked: argparse.Namespace) -> Plan:
    return Plan(runs, asked.requests, 1, PROMPT_TOKENS, str(OUTPUT_TOKENS))


def _times(stage: str) -> int:
    return steady.times_delayed(stage, OUTPUT_TOKENS)


def runs_in(folder: Path, sides: str) -> list[list[Run]]:
    """The runs of these sides of a comparison that was made."""
    return [[run for store in sorted(folder.glob(f"*-{side}.db")) for run in runs_of_store(store)] for side in sides]


def judged(folder: Path, other: str = "b") -> Report:
    """The gate's verdict on one side of it against the first."""
    before, after = runs_in(folder, f"a{other}")
    return compare(match(before, after, settings=False), Wishes())


def _page(bench: Bench, asked: argparse.Namespace, console: Console) -> tuple[list[str], bool]:
    """What was found, and whether it is what is promised."""
    pool = bench.pool()
    lines, kept = [*_about(pool, asked)], []
    for rows, good in (_drawn(pool, asked, console), _same_twice(bench), _delays(bench)):
        lines += rows
        kept.append(good)
    return lines, all(kept)


def _steady(found: steady.Steady, asked: argparse.Namespace, console: Console) -> tuple[list[str], bool]:
    """The same of loads on one server, and the real delays in it."""
    lines, kept = _drawn(found.pool, asked, console)
    sizes = [runs for runs in IN_A_ROW if runs <= asked.steady]
    heads = [*(f"{runs} runs a side" for runs in sizes), f"of those that varied by {QUIET:.0%} at most"]
    lines += [
        "",
        f"Really delayed by {steady.SLOWER:.0%} of the stage's mean: every so many loads in a row. FAIL under the "
        "right stage, and by how much runs varied in it (median).",
        "",
        f"| delayed | by (ms) | {' | '.join(heads)} |",
        f"|---|--:|{'--:|' * (len(sizes) + 1)}",
    ]
    for stage, after in found.delayed.items():
        compared = [in_a_row(found.pool[::2], after, runs, stage) for runs in sizes]
        quiet = [verdict for each in compared for spread, verdict in each.noise if spread <= QUIET]
        cells = [
            f"{each.named} of {each.comparisons} ({np.median([spread for spread, _ in each.noise]):.1%})"
            for each in compared
        ]
        cells.append(f"{quiet.count(FAIL)} of {len(quiet)}")
        lines.append(f"| `{stage}` | {found.added_ms[stage]:.2f} | {' | '.join(cells)} |")
    return [*_about(found.pool, asked, "one server"), *lines], kept


def _same_twice(bench: Bench) -> tuple[list[str], bool]:
    """The same server on both sides, again and again."""
    verdicts = [judged(bench.tried(number)).verdict for number in range(bench.asked.tries)]
    said = ", ".join(verdicts)
    line = f"The same server twice, {len(verdicts)} times {bench.asked.side} runs a side: {said}."
    return ["", line], FAIL not in verdicts


def _delays(bench: Bench) -> tuple[list[str], bool]:
    """A delay in one stage after the other."""
    lines = [
        "",
        f"Six servers in turn, {bench.asked.delayed} runs of each; all but the first delayed in one stage:",
        "",
        "| delayed stage | by (ms) | seen (ms) | verdict | named | other measures that failed |",
        "|---|--:|--:|---|---|---|",
    ]
    kept = True
    for stage, side in zip(STAGES, ascii_lowercase[1:], strict=False):
        report = judged(bench.delays, side)
        named = report.culprit.measure.key if report.culprit else "—"
        seen = next(row.change_ms for row in report.rows if row.measure.key == stage)
        failed = [row.measure.key for row in report.rows if row.outcome.verdict == FAIL]
        others = ", ".join(f"`{key}`" for key in failed if key != stage)
        kept = kept and report.verdict == FAIL and named == stage
        lines.append(
            f"| `{stage}` | {bench.delay_ms(stage):.2f} | {seen:+.2f} | {report.verdict} | {named} | {others} |"
        )
    return lines, kept


def _about(pool: list[Run], asked: argparse.Namespace, where: str = "a server of its own") -> Iterator[str]:
    times = sorted(run.started_unix_ns for run in pool)
    known = environment()
    yield ", ".join(f"{key} {value}" for key, value in known.items())
    yield ""
    hours = (times[-1] - times[0]) / 3.6e12
    yield f"{len(pool)} runs of {asked.requests} requests over {hours:.1f} hours, each on {where}."
    yield from ("", "| | mean (ms) | runs vary by |", "|---|--:|--:|")
    yield from (f"| `{key}` | {mean:.2f} | {variation:.1%} |" for key, (mean, variation) in noise(pool).items())


def _drawn(pool: list[Run], asked: argparse.Namespace, console: Console) -> tuple[list[str], bool]:
    """Comparisons drawn from the runs, with nothing or with a slower stage put on top of one side."""
    rng = np.random.default_rng(0)
    sizes = [runs for runs in SIZES if 2 * runs <= len(pool)]
    lines = [
        "",
        f"Drawn from them, {asked.comparisons} comparisons for each field: PASS / **FAIL** / INCONCLUSIVE in % (of the "
        "FAIL under the right stage).",
        "",
        f"| put on top | {' | '.join(f'{runs} runs a side' for runs in sizes)} |",
        f"|---|{'--:|' * len(sizes)}",
    ]
    kept, first = True, []
    for stage, size in [(None, 0.0), *((stage, size) for stage in STAGES for size in SLOWER)]:
        made = [draw(pool, runs, asked.comparisons, rng, stage, size) for runs in sizes]
        lines.append(f"| {_top(made[0])} | {' | '.join(map(_field, made))} |")
        console.print(f"{_top(made[0])}: drawn", highlight=False)
        first.append(made[0])
        if stage is None:
            kept = all(found.shares()[FAIL] <= FALSE_ALARMS for found in made)
    return [*lines, *_as_asked(pool, first, rng)], kept


def _field(found: Found) -> str:
    passed, failed, unknown = found.shares().values()
    right = f" ({found.named / found.verdicts[FAIL]:.0%})" if found.stage and found.verdicts[FAIL] else ""
    return f"{100 * passed:.1f} / **{100 * failed:.1f}**{right} / {100 * unknown:.1f}"


def _as_asked(pool: list[Run], made: list[Found], rng: np.random.Generator) -> Iterator[str]:
    """How many runs those that could not tell asked for, and how many are decided with so many."""
    yield from (
        "",
        "| put on top | runs a side | asked for, p10 / p50 / p90 | decided with so many |",
        "|---|--:|--:|--:|",
    )
    for found in made:
        if found.needed:
            asked = " / ".join(f"{runs:.0f}" for runs in np.percentile(found.needed, (10, 50, 90)))
            again = draw_as_asked(pool, found, FOLLOWED, rng)
            decided = again.comparisons - again.verdicts[INCONCLUSIVE]
            yield f"| {_top(found)} | {found.runs} | {asked} | {decided} of {again.comparisons} |"


def _top(found: Found) -> str:
    return f"`{found.stage}` +{found.slower:.0%}" if found.stage else "nothing"


if __name__ == "__main__":
    sys.exit(main())
