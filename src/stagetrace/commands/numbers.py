"""``stagetrace numbers``: the numbers of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..faults import Fault


def numbers(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="A store; stagetrace.db if not given.")] = Path(
        "stagetrace.db"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="A run's session; the last in the store if not given.")
    ] = None,
) -> None:
    """The numbers of a run: four timers and four gauges at p50, p95 and p99, and the facts that give them a meaning."""
    from ..numbers import aside, numbers
    from ..store import load

    sessions = list(dict.fromkeys(run.session for run in load(file, limit=0, steps=False).runs))
    if session is not None and session not in sessions:
        raise Fault(f"{file} has no session {session}; it has: {', '.join(sessions) or 'none'}")
    # Times of steps are monotonic, and settings are an engine's own: runs of several sessions do not mix.
    trace = load(file, session=session or (sessions[-1] if sessions else None))
    document, beside = numbers(trace), aside(trace)
    for line in trace.notices:
        typer.echo(f"stagetrace: {line}", err=True)
    if as_json:
        if beside.others:
            typer.echo(f"stagetrace: {beside.left_out()}", err=True)
        typer.echo(json.dumps(document, allow_nan=False))
        return
    from ..report.numbers import numbers_view
    from ..report.terminal import terminal

    terminal().print(numbers_view(document, beside, str(file), sessions))
