"""``stagetrace export``: what a store holds, in a file that other tools read. Exporters bring the formats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from .collect.sinks import ExportError, exporters
from .exporting import Say
from .outfile import STDOUT, spare, writing
from .store import load

#: So many bytes tell a kind of file.
_ALIKE = 12


def export(file: Path, form: str, out: Path, say: Say) -> int:
    """Write the requests of the store ``file`` to ``out``; return how many calls that are."""
    formats = {name: lines for exporter in exporters(say) for name, lines in exporter.formats.items()}
    if form not in formats:
        raise ExportError(f"--format {form}: not known; there is {', '.join(sorted(formats))}")
    trace = load(file, steps=False)
    if out != STDOUT and out.exists() and os.path.samefile(file, out):
        raise ExportError(f"{out}: is the store itself; name another file")
    try:
        lines = formats[form](trace.requests, trace.runs[-1] if trace.runs else None)
    except ValueError as error:  # of the environment: exporters read it, too
        raise ExportError(f"--format {form}: {error}") from None
    running = sum(record.status == "in_flight" for record in trace.requests)
    if running:
        say(f"{running} requests had not ended and are left out")
    return _write(out, lines)


def _begins(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_ALIKE)


def _write(out: Path, lines: Iterator[str]) -> int:
    try:
        # Only what begins as this does, an earlier export, gives way to it.
        first = next(lines, "")
        spare("-o", out, lambda there: _begins(there) == first.encode()[:_ALIKE])
        with writing(out) as file:
            return sum(1 for line in chain([first] if first else [], lines) if file.write(line + "\n"))
    except BrokenPipeError:
        raise  # whoever reads has enough
    except OSError as error:
        raise ExportError(f"{out}: {error.strerror}; name another file") from None
