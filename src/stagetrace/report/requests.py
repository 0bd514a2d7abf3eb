"""Requests of a store, printed: as JSON for programs, as stopwatches for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ..model import SCHEMA, RequestRecord, RunRecord
from .stopwatch import stopwatch
from .terminal import terminal


def print_json(records: list[RequestRecord]) -> None:
    """The documented document on stdout, one request after the other: stores may be large."""
    sys.stdout.write(f'{{"schema": {SCHEMA}, "requests": [')
    for index, record in enumerate(records):
        sys.stdout.write(("," if index else "") + "\n" + json.dumps(record.to_json(), allow_nan=False))
    sys.stdout.write("\n]}\n")


def print_stopwatches(records: list[RequestRecord], file: Path, runs: list[RunRecord]) -> None:
    """A stopwatch each, oldest first, and once what their floors are of, or why they have none."""
    console = terminal()
    if not records:
        console.print(f"{file} holds no requests yet")
    for record in records:
        name = record.request_id or record.external_id or record.trace_id
        which = f" (sequence {record.sequence})" if record.sequence else ""
        console.print(stopwatch(record, f"{record.operation} {name}{which}"))
    for line in _floors(runs) if records else ():
        console.print(line, highlight=False, markup=False)


def _floors(runs: list[RunRecord]) -> Iterator[str]:
    """Of the last run that says anything of it."""
    said = next((run.config for run in reversed(runs) if run.config.keys() & {"floor_gpu", "floor_missing"}), {})
    if said.get("floor_gpu"):
        yield f"× floor: times as long as {said['floor_gpu']} needs at least for what was done."
    elif said:
        yield f"No floors: {said['floor_missing']}."
