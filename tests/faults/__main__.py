"""``python -m tests.faults``: proof that time lands in the stage it belongs to."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.output import environment, write
from stagetrace_vllm.demo_server import DemoServer

from . import modes
from .measure import FAIL, PROMPT_TOKENS, UNCLEAR, Plan, measure
from .moved import ONCE, moved
from .plugin.stagetrace_faults.places import GAPS, PLACES, STAGES
from .server import FaultyServer, serve
from .table import RULE, Results, page, show

EPILOG = """\
exit code: 0 every delay landed · 1 one did not · 2 it could not be measured, or bad arguments · 3 one is unclear
"""
ABOUT = {
    "default": "API server, engine core and worker apart, synchronous scheduling",
    "gpu": "what one GPU runs: V2 runner, asynchronous scheduling, worker inside the engine core; interpreted kernels",
}
#: The interpreter takes some 50 ms a step, so there the sizes are larger.
SIZES_MS = {"default": (5.0, 20.0, 80.0), "gpu": (100.0, 300.0, 900.0)}
PAIRS = {"default": 16, "gpu": 6}
ROUNDS = 3
MODE_PAIRS = 12
Case = tuple[str, float]


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--list", action="store_true", help="list the places, and measure nothing")
    made.add_argument(
        "--place", action="append", metavar="PLACE", choices=PLACES,
        help="delay this place only; may be repeated (see --list)",
    )  # fmt: skip
    made.add_argument("--size", action="append", metavar="MS", type=float, help="by so much only; may be repeated")
    made.add_argument("--config", choices=("default", "gpu", "all"), default="default", help="which layout(s)")
    made.add_argument("--pairs", type=int, metavar="N", help="requests with a control beside them, per row")
    made.add_argument("--markdown", metavar="OUT", type=Path, help="write the tables to OUT as a page")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; see the epilog for the exit code."""
    asked = parser().parse_args(arguments)
    if asked.list:
        for place in PLACES.values():
            print(f"{place.name:22} lands in {place.lands}{f' ({place.part})' if place.part else ''}")
        return 0
    wrong = _unusable(asked)
    if wrong:
        return _fail(wrong)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    layouts = list(ABOUT) if asked.config == "all" else [asked.config]
    try:
        found = [_layout(name, asked, console) for name in layouts]
    except (RuntimeError, AssertionError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    for results in found:
        show(console, results)
    console.print(RULE, style="dim", highlight=False)
    if asked.markdown:
        fault = write(asked.markdown, page(found, environment()))
        if fault:
            return _fail(fault)
    verdicts = set().union(*(results.verdicts for results in found))
    return 1 if FAIL in verdicts else 3 if UNCLEAR in verdicts else 0


def _unusable(asked: argparse.Namespace) -> str | None:
    if asked.markdown and not asked.markdown.parent.is_dir():
        return f"{asked.markdown}: there is no directory {asked.markdown.parent}"
    if any(size <= 0 for size in asked.size or ()):
        return "--size: a delay is more than 0 ms"
    if asked.pairs is not None and asked.pairs < 1:
        return "--pairs: at least 1"
    return DemoServer().missing()


def cases(layout: str, asked: argparse.Namespace) -> list[Case]:
    """(place, size) of every row: by default, stages and gaps at each size, their parts at the middle one."""
    sizes = asked.size or SIZES_MS[layout]
    if asked.place:
        return [(name, size) for name in asked.place for size in sizes]
    middle = sorted(sizes)[len(sizes) // 2]
    return [
        (name, size) for name in PLACES for size in (sizes if name in (*STAGES, *GAPS) else (middle,))
    ]  # fmt: skip


def _layout(layout: str, asked: argparse.Namespace, console: Console) -> Results:
    """Start one server and measure every row on it."""
    rows, pairs = cases(layout, asked), asked.pairs or PAIRS[layout]
    with_modes = not asked.place and layout == "default"
    total = pairs * len(rows) + (MODE_PAIRS * 5 + pairs * len(ONCE) if with_modes else 0)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = Results(layout, ABOUT[layout])
    with (
        Progress(*columns, console=console) as progress,
        tempfile.TemporaryDirectory(prefix="stagetrace-faults-") as folder,
    ):
        task = progress.add_task(f"{layout}: starting a server", total=total)
        engine = DemoServer()
        model = engine.make_model(Path(folder) / "model")
        with serve(engine, model, Path(folder), layout) as server:
            _warm_up(server)
            for done, (name, size) in enumerate(rows):
                progress.update(task, completed=done * pairs, description=f"{layout}: {name} {size:g} ms")
                plan = Plan(pairs, ROUNDS)
                results.rows.append(measure(server, name, size, plan, lambda: progress.advance(task)))
            if with_modes:
                progress.update(task, completed=len(rows) * pairs, description=f"{layout}: beside delayed controls")
                size = sorted(SIZES_MS[layout])[1]
                results.moved += [
                    moved(server, name, size, Plan(pairs, ROUNDS), lambda: progress.advance(task)) for name in ONCE
                ]
                progress.update(task, description=f"{layout}: some requests, growing")
                results.shown += _modes(server, lambda: progress.advance(task))
    results.about += f"; load average {os.getloadavg()[0]:.1f} at the end"
    return results


def _warm_up(server: FaultyServer) -> None:
    """What a server does once is nobody's delay."""
    for tokens in (1, 2, 20, 2, 1):
        server.send("warm", PROMPT_TOKENS, tokens)


def _modes(server: FaultyServer, tick: Callable[[], None]) -> list[modes.Shown]:
    return [
        modes.bystanders(server, MODE_PAIRS, tick),
        modes.by_position(server, MODE_PAIRS, tick),
        *modes.by_batch(server, MODE_PAIRS, tick),
    ]


def _fail(line: str) -> int:
    print(f"faults: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
