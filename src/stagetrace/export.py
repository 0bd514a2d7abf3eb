"""``stagetrace export``: what a store holds, in a file that other tools read. Exporters bring the formats."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .collect.sinks import ExportError, exporters
from .exporting import Say
from .store import load


def export(file: Path, form: str, out: Path, say: Say) -> int:
    """Write the requests of the store ``file`` to ``out``; return how many calls that are."""
    formats = {name: lines for exporter in exporters(say) for name, lines in exporter.formats.items()}
    if form not in formats:
        raise ExportError(f"--format {form}: not known; there is {', '.join(sorted(formats))}")
    trace = load(file, steps=False)
    if out.exists() and os.path.samefile(file, out):
        raise ExportError(f"{out}: is the store itself; name another file")
    try:
        lines = formats[form](trace.requests, trace.runs[-1] if trace.runs else None)
    except ValueError as error:  # of the environment: exporters read it, too
        raise ExportError(f"--format {form}: {error}") from None
    running = sum(record.status == "in_flight" for record in trace.requests)
    if running:
        say(f"{running} requests had not ended and are left out")
    return _write(out, lines)


def _write(out: Path, lines: Iterable[str]) -> int:
    """A new file appears whole or not at all; what is no file (a pipe, a terminal) is written as it is."""
    try:
        if out.exists() and not stat.S_ISREG(out.stat().st_mode):
            with open(out, "w", encoding="utf-8") as file:
                return sum(1 for line in lines if file.write(line + "\n"))
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=out.parent, prefix=".stagetrace-", delete=False
        ) as file:
            try:
                count = sum(1 for line in lines if file.write(line + "\n"))
                file.flush()
                os.replace(file.name, out)
            except BaseException:
                os.unlink(file.name)
                raise
        return count
    except OSError as error:
        raise ExportError(f"{out}: {error.strerror}; name another file") from None
