"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from .child import RowFailed, run_apart
from .endpoints import KINDS
from .figures import OVER, Options
from .output import SHARED, VERDICTS, Results, as_json, as_markdown, environment, show, write
from .rows import ROWS, Row

EPILOG = """\
exit code: 0 no limit is exceeded · 1 one is · 2 a row could not be measured, or bad arguments

A limit counts as exceeded only when even the low end of the median's 95 % interval is above it.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What recording costs, measured here: each figure compares two things by turns in one run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--list", action="store_true", help="list the rows and how long they take, and measure nothing")
    made.add_argument(
        "--only", metavar="ROW", action="append", choices=[row.key for row in ROWS],
        help="measure this row only; may be repeated (%(choices)s)",
    )  # fmt: skip
    made.add_argument(
        "--servers", metavar="N", type=int, default=2,
        help="real servers of each kind, untraced and traced, in the row `servers` (default 2; 0 leaves the row out)",
    )  # fmt: skip
    made.add_argument(
        "--minutes", metavar="N", type=float, default=10.0, help="of load, in the row `endpoints` (default 10)"
    )
    made.add_argument(
        "--endpoint", metavar="KIND", action="append", choices=KINDS, default=[],
        help="endpoint in the rows about bad ones; may be repeated (%(choices)s; default: five, protocols mixed)",
    )  # fmt: skip
    made.add_argument("--json", metavar="OUT", type=Path, help="write every figure to OUT")
    made.add_argument("--markdown", metavar="OUT", type=Path, help="write the tables to OUT as a page")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; see the epilog for the exit code."""
    asked = parser().parse_args(arguments)
    console = Console()
    if asked.list:
        for row in ROWS:
            print(f"{row.key:12} {row.title} (about {row.seconds} s{', only if named' if row.long else ''})")
        return 0
    for path in filter(None, (asked.json, asked.markdown)):
        if not path.parent.is_dir():
            return _fail(f"{path}: there is no directory {path.parent}")
    chosen = [row for row in ROWS if (row.key in asked.only if asked.only else not row.long)]
    if asked.servers < 1:
        chosen = [row for row in chosen if row.key != "servers"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    where = environment()
    try:
        results = _measure(chosen, Options(asked.servers, asked.minutes, tuple(asked.endpoint)), console)
    except RowFailed as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    for row, outcome in results:
        show(console, row, outcome)
    console.print(f"{VERDICTS}\n{SHARED}", style="dim", highlight=False)
    faults = [
        write(path, render(results, where))
        for path, render in ((asked.json, as_json), (asked.markdown, as_markdown))
        if path
    ]
    for fault in filter(None, faults):
        return _fail(fault)
    return _verdict(results, console)


def _measure(rows: list[Row], options: Options, console: Console) -> Results:
    """Every row in a process of its own, one after the other."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    results: Results = []
    with Progress(*columns, console=console) as progress:
        tasks: list[TaskID] = [progress.add_task(row.key, start=False) for row in rows]
        for row, task in zip(rows, tasks, strict=True):
            progress.start_task(task)

            def tell(done: int, total: int, text: str, row: Row = row, task: TaskID = task) -> None:
                described = f"{row.key}: {text}" if text else row.key
                progress.update(task, completed=done, total=total, description=described)

            try:
                results.append((row, run_apart(row, options, tell)))
            except RowFailed as error:
                raise RowFailed(f"the row {row.key} could not be measured; the end of its log:\n{error}") from None
            progress.update(task, completed=1, total=1, description=row.key)
    return results


def _verdict(results: Results, console: Console) -> int:
    over = [f"{row.key}: {figure.name}" for row, found in results for figure in found.figures if figure.verdict == OVER]
    for name in over:
        console.print(f"over its limit: {name}", style="bold red", highlight=False)
    return 1 if over else 0


def _fail(line: str) -> int:
    print(f"benchmarks: {line}", file=sys.stderr)
    return 2
