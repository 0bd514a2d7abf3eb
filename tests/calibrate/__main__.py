"""``python -m tests.calibrate``: the gate's false alarms and catches, on real servers of this machine.

It makes runs of the demo's server, spread over the time given (those that are in DIR already count), draws comparisons
from them, and then starts servers with a delay in one stage and compares those with servers without.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.output import environment
from stagetrace.faults import Fault as Unusable
from stagetrace.gate.ab import Command, Plan, measure
from stagetrace.gate.compare import Report, compare
from stagetrace.gate.match import match
from stagetrace.gate.runs import Run, runs_of_store
from stagetrace.gate.settings import Wishes
from stagetrace_vllm.demo_server import DemoServer
from tests.faults.plugin.stagetrace_faults import control
from tests.faults.plugin.stagetrace_faults.control import Fault

from .draws import STAGES, Found, draw, noise

PLUGIN = Path(__file__).parents[1] / "faults" / "plugin"
SIZES = (5, 8)
SLOWER = (0.10, 0.15, 0.25)
#: A delay is this share of its stage, or so many standard deviations of runs, whichever is more.
DELAY, DEVIATIONS = 0.25, 4.0
PER_TOKEN = ("decode",)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="python -m tests.calibrate", description=__doc__)
    made.add_argument("--dir", type=Path, default=Path("calibration"), metavar="DIR", help="where runs are kept")
    made.add_argument("--runs", type=int, default=30, metavar="N", help="runs to draw from (30)")
    made.add_argument("--hours", type=float, default=2.0, metavar="H", help="spread them over this time (2)")
    made.add_argument("--requests", type=int, default=50, metavar="N", help="requests in a run (50)")
    made.add_argument("--comparisons", type=int, default=500, metavar="N", help="to draw for each row (500)")
    made.add_argument("--side", type=int, default=5, metavar="N", help="runs a side with real delays (5)")
    made.add_argument("--tries", type=int, default=10, metavar="N", help="of the same server twice (10)")
    made.add_argument("--stage", action="append", choices=STAGES, help="delay this one only; may be repeated")
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
    bench = Bench(engine, asked, console)
    try:
        pool = bench.pool()
        lines = [*_about(pool, asked), *_drawn(pool, asked, console)]
        wrong: list[str] = []
        lines += [*bench.same_twice(wrong), *bench.delays(pool, wrong)]
    except Unusable as fault:
        print(f"calibrate: {fault}", file=sys.stderr)
        return 2
    if asked.markdown:
        asked.markdown.write_text("\n".join(["# Calibration of the gate", "", *lines, ""]))
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    return 1 if wrong else 0


class Bench:
    """Starts the servers."""

    def __init__(self, engine: DemoServer, asked: argparse.Namespace, console: Console) -> None:
        self.asked, self.console = asked, console
        model = engine.make_model(asked.dir / "model")
        self._words = tuple(engine.command(model, "{port}"))  # type: ignore[arg-type]
        self._environment = engine.environment()
        self._plan = Plan(1, asked.requests, 1, "60,400", "60")

    def command(self, fault: Fault | None = None, name: str = "none") -> Command:
        """The server, delayed or not; both have the plug-in, and look at a file."""
        path = (self.asked.dir / f"fault-{name}.json").resolve()
        control.write(path, fault)
        return Command(self._words, {**self._environment, control.ENV: str(path), "PYTHONPATH": str(PLUGIN)})

    def pool(self) -> list[Run]:
        """The runs to draw from: one server each, at equal distances in time."""
        began = time.time()
        for number in range(self.asked.runs):
            folder = self.asked.dir / f"run-{number + 1:02d}"
            if not folder.exists():
                due = began + number * self.asked.hours * 3600 / self.asked.runs
                time.sleep(max(0.0, due - time.time()))
                measure((self.command(), self.command()), self._plan, folder, lambda *_: None)
                self.console.print(f"{folder} at {time.strftime('%H:%M:%S')}", highlight=False)
        stores = sorted(self.asked.dir.glob("run-*/*.db"))
        return [run for store in stores for run in runs_of_store(store)]

    def compared(self, name: str, one: Command, other: Command) -> Report:
        """Both commands in turn, whole runs of servers."""
        folder = self.asked.dir / name
        plan = Plan(self.asked.side, self.asked.requests, 1, "60,400", "60")
        before, after = measure((one, other), plan, folder, lambda *_: None)
        report = compare(match(before, after, settings=False), Wishes())
        self.console.print(f"{name}: {report.verdict}", highlight=False)
        return report

    def same_twice(self, wrong: list[str]) -> Iterator[str]:
        """The same server on both sides, again and again."""
        verdicts = [self.compared(f"same-{n + 1:02d}", self.command(), self.command()) for n in range(self.asked.tries)]
        failed = [report for report in verdicts if report.verdict == "FAIL"]
        wrong += ["the same server twice failed"] * len(failed)
        if verdicts:
            said = ", ".join(report.verdict for report in verdicts)
            yield from ("", f"The same server twice, {len(verdicts)} times {self.asked.side} runs a side: {said}.")

    def delays(self, pool: list[Run], wrong: list[str]) -> Iterator[str]:
        """A delay in one stage after the other."""
        found = noise(pool)
        yield from ("", "| delayed stage | by (ms) | verdict | named | change (ms) |", "|---|--:|---|---|--:|")
        for stage in self.asked.stage or STAGES:
            base_ms, variation = found[stage]
            delay_ms = max(DELAY, DEVIATIONS * variation) * base_ms
            tokens = 59 if stage in PER_TOKEN else 1
            report = self.compared(
                f"delay-{stage}", self.command(), self.command(Fault(stage, delay_ms / tokens), stage)
            )
            named = report.culprit.measure.key if report.culprit else "—"
            change = f"{report.culprit.change_ms:+.2f}" if report.culprit else "—"
            wrong += [f"{stage} was not named"] if named != stage else []
            yield f"| `{stage}` | {delay_ms:.2f} | {report.verdict} | {named} | {change} |"


def _about(pool: list[Run], asked: argparse.Namespace) -> Iterator[str]:
    times = sorted(run.started_unix_ns for run in pool)
    known = environment()
    yield ", ".join(f"{key} {value}" for key, value in known.items())
    yield ""
    hours = (times[-1] - times[0]) / 3.6e12
    yield f"{len(pool)} runs of {asked.requests} requests over {hours:.1f} hours, each on a server of its own."
    yield from ("", "| | mean (ms) | runs vary by |", "|---|--:|--:|")
    yield from (f"| `{key}` | {mean:.2f} | {variation:.1%} |" for key, (mean, variation) in noise(pool).items())


def _drawn(pool: list[Run], asked: argparse.Namespace, console: Console) -> Iterator[str]:
    rng = np.random.default_rng(0)
    yield from (
        "",
        "| runs a side | put on top | PASS | FAIL | INCONCLUSIVE | right stage |",
        "|--:|---|--:|--:|--:|--:|",
    )
    for runs in SIZES:
        if len(pool) < 2 * runs:
            continue
        rows = [(None, 0.0), *((stage, size) for stage in STAGES for size in SLOWER)]
        for stage, size in rows:
            found: Found = draw(pool, runs, asked.comparisons, rng, stage, size)
            shares = " | ".join(f"{share:.1%}" for share in found.shares().values())
            top = f"`{stage}` +{size:.0%}" if stage else "nothing"
            yield f"| {runs} | {top} | {shares} | {found.named / found.comparisons:.1%} |" if stage else (
                f"| {runs} | {top} | {shares} | |"
            )  # fmt: skip
        console.print(f"{runs} runs a side: drawn", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
