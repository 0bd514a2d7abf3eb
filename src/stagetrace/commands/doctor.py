"""``stagetrace doctor``: whether a server started from here would be recorded."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Try this OTLP endpoint; OTEL_EXPORTER_OTLP_* if not given.")
    ] = None,
) -> None:
    """Say which stages can be observed with the engine installed here, and what to do about those that cannot.

    Exit code: 0 when every applicable stage can be, and what is to be exported arrives; 2 otherwise.
    """
    from ..doctor import examine

    finding = examine(otlp)
    if as_json:
        typer.echo(json.dumps(finding.document, allow_nan=False))
    else:
        from rich.console import Console

        from ..report.doctor import doctor_view

        Console().print(doctor_view(finding), highlight=False)
    for line in finding.faults:
        typer.echo(f"stagetrace: {line}", err=True)
    raise typer.Exit(0 if finding.healthy else 2)
