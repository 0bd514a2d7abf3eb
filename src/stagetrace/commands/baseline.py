"""``stagetrace baseline``: runs in a small file to be committed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Stores, each with one load or several.")]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--output", "--out", metavar="BASE.json", help="The file to write (required); - is stdout."),
]


def baseline(files: Files, out: Out = None) -> None:
    """Keep the runs of these stores as a baseline for `stagetrace gate`: times and settings, no text, no ids.

    One run is one load (`stagetrace load`) on one server (`stagetrace run`). Five are a good start; spread them over
    the times at which the gate will run.
    """
    from ..faults import Fault
    from ..gate.baseline import read_runs, write_baseline
    from ..gate.match import each_once, unlike
    from ..terminal import plain

    if out is None:
        raise Fault("baseline: name the file to write: -o BASE.json")
    runs = [run for file in files for run in read_runs(file)]
    each_once(runs)
    write_baseline(runs, out)
    requests = sum(len(run.requests) for run in runs)
    size = f" ({out.stat().st_size / 1024:,.0f} KiB)" if out.is_file() else ""
    typer.echo(f"{len(runs)} run{'s' * (len(runs) > 1)} with {requests} requests in {out}{size}", err=True)
    if how := unlike(runs):
        typer.echo(f"stagetrace: {plain(how)}: the gate will refuse this baseline, but for --allow FIELD", err=True)
