"""``python -m tests.randomised``: thousands of random requests to real servers, and every rule for every trace."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.output import environment, write
from stagetrace_vllm.demo_server import DemoServer
from tests.engine.conftest import Starter, own_sessions
from tests.engine.ends import ended, told_to_end
from tests.engine.ship import Ship
from tests.receivers import receiver

from .mix import SLOW, generated, pooled
from .page import page, show
from .run import Outcome, random_run

EPILOG = "exit code: 0 every rule held · 1 one was broken · 2 it could not be run, or bad arguments"
#: As many blocks as the longest sequence there can be takes, and one: sequences that grow are evicted.
SLOTS, BUDGET, BLOCKS = 8, 256, 21
GENERATING = (
    "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BUDGET), "--num-gpu-blocks-override", str(BLOCKS),
    "--scheduling-policy", "priority", "--enable-scale-out",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A server: its configuration, what it is told, and how many requests it gets for a thousand of the first one."""

    configuration: str
    about: str
    arguments: tuple[str, ...] = GENERATING
    share: float = 1.0


LAYOUTS = {
    "default": Layout("two_api_servers", "two API servers, engine core and worker, synchronous scheduling"),
    "gpu": Layout(
        "v2_async_uni",
        "what one GPU runs: V2 runner, asynchronous scheduling, worker inside the engine core",
        share=0.2,
    ),
    "pooling": Layout(
        "plain",
        "a model that embeds: nothing is sampled or decoded",
        ("--runner", "pooling", "--convert", "embed"),
        0.2,
    ),
}


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="python -m tests.randomised", description=__doc__, epilog=EPILOG)
    made.add_argument(
        "--requests", type=int, default=2000, metavar="N", help="to the first server; the others get less"
    )
    made.add_argument("--seed", type=int, default=20261130, metavar="N", help="the same requests for the same number")
    made.add_argument("--layout", action="append", choices=LAYOUTS, help="only this server; may be repeated")
    made.add_argument("--markdown", metavar="OUT", type=Path, help="write what was found to OUT as a page")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run, check and report; see the epilog for the exit code."""
    asked = parser().parse_args(arguments)
    missing = DemoServer().missing()
    if missing or asked.requests < 1:
        return _fail(missing or "--requests: at least 1")
    if asked.markdown and not asked.markdown.parent.is_dir():
        return _fail(f"{asked.markdown}: there is no directory {asked.markdown.parent}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console, found = Console(), {}
    try:
        for name in asked.layout or LAYOUTS:
            found[name] = _layout(name, round(asked.requests * LAYOUTS[name].share) or 1, asked.seed, console)
            show(console, name, LAYOUTS[name].about, found[name])
    except (RuntimeError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    if asked.markdown:
        abouts = {name: LAYOUTS[name].about for name in found}
        fault = write(asked.markdown, page(found, abouts, asked.seed, environment()))
        if fault:
            return _fail(fault)
    return 1 if any(outcome.problems for outcome in found.values()) else 0


def _layout(name: str, count: int, number: int, console: Console) -> Outcome:
    """One server from its start to its end, which comes while it has requests in flight."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{name}: starting a server", total=count)
        with _ship(LAYOUTS[name]) as ship:
            progress.update(task, description=f"{name}: requests")
            outcome = _run(ship, name, count, number, lambda done: progress.advance(task, done))
            try:
                if name == "pooling":  # nothing lasts long enough to be in flight
                    ship.live.server.signal(signal.SIGTERM)
                    ended(ship, [], code=0)
                else:
                    told_to_end(ship, SLOTS)
            except AssertionError as broken:
                outcome.problems.append(f"its end: {broken}")
    return outcome


def _run(ship: Ship, name: str, count: int, number: int, tick: Callable[[int], None]) -> Outcome:
    prompts = ship.live.prompts
    asks = pooled(prompts) if name == "pooling" else generated(prompts, *([SLOW] if name == "gpu" else []))
    return random_run(ship, asks, count, number, tick)


@contextmanager
def _ship(layout: Layout) -> Iterator[Ship]:
    engine = DemoServer()
    with own_sessions(), tempfile.TemporaryDirectory(prefix="stagetrace-random-") as name, receiver() as received:
        folder = Path(name)
        starter = Starter(engine, engine.make_model(folder / "model"), folder)
        serve = starter.start(layout.configuration, traced=True, extra=layout.arguments, received=received)
        try:
            yield Ship(next(serve), received)
        finally:
            serve.close()


def _fail(line: str) -> int:
    print(f"random: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
