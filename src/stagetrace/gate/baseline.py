"""The baseline: runs in a file that is small, is committed, and whose differences can be read."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import outfile
from ..faults import Fault
from .measures import BY_KEY, MEASURES
from .runs import Request, Run, runs_of_store

#: Version of the file. One more with every change that an older stagetrace would misread.
SCHEMA = 1
KIND = "stagetrace-baseline"
_COLUMNS = ["prompt_tokens", "output_tokens", *(measure.key for measure in MEASURES)]
#: Significant digits of a time: more would be noise in every difference.
_DIGITS = 4
_SQLITE = b"SQLite format 3\0"


def write_baseline(runs: list[Run], path: Path) -> None:
    """Write the runs, whole or not at all. Fault where something else lies there."""
    try:
        outfile.spare("-o", path, _is_baseline)
        with outfile.writing(path, 0o644) as file:  # it is to be committed, and holds times and settings only
            file.write(render(runs))
    except BrokenPipeError:
        raise  # whoever reads has enough
    except OSError as error:
        raise Fault(f"-o {path}: {error.strerror}; name another file") from None


def render(runs: list[Run]) -> str:
    """The file's text: a line for each request."""
    head = {"schema": SCHEMA, "kind": KIND, "columns": _COLUMNS}
    lines = [f'"{key}": {json.dumps(value)},' for key, value in head.items()]
    shown = ",\n".join(_render_run(run) for run in sorted(runs, key=lambda run: run.started_unix_ns))
    return "{\n" + "\n".join(lines) + '\n"runs": [\n' + shown + "\n]\n}\n"


def _render_run(run: Run) -> str:
    started = datetime.fromtimestamp(run.started_unix_ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")
    rows = [f"  {json.dumps(key)}: {json.dumps(_row(request))}" for key, request in sorted(run.requests.items())]
    return (
        f' {{"started": "{started}",\n'
        f'  "fingerprint": {json.dumps(dict(sorted(run.fingerprint.items())))},\n'
        f'  "without": {json.dumps(dict(sorted(run.without.items())))},\n'
        '  "requests": {\n' + ",\n".join(rows) + "\n }}"
    )


def _row(request: Request) -> list[float | int | None]:
    times = [request.ms.get(measure.key) for measure in MEASURES]
    rounded = [None if ms is None else float(f"{ms:.{_DIGITS}g}") for ms in times]
    return [request.prompt_tokens, request.output_tokens, *rounded]


def read_runs(path: Path) -> list[Run]:
    """The runs of a baseline or of a store, whichever it is. Fault or StoreError if it is neither."""
    if path.is_dir():
        raise Fault(f"{path}: a directory; name the stores or the baseline in it")
    try:
        with open(path, "rb") as file:
            start = file.read(len(_SQLITE))
    except OSError as error:
        raise Fault(f"{path}: {error.strerror}; name a store or a baseline") from None
    # What is no JSON is told what is wrong with it by the store's reader.
    return _runs_of_json(path) if start.removeprefix(BOM_UTF8).lstrip()[:1] == b"{" else runs_of_store(path)


def _is_baseline(path: Path) -> bool:
    try:
        return KIND in path.read_text(encoding="utf-8")[:200]
    except (OSError, ValueError):
        return False


def _runs_of_json(path: Path) -> list[Run]:
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise Fault(f"{path}: truncated or damaged JSON ({error}); make it anew with `stagetrace baseline`") from None
    if document.get("kind") != KIND:
        raise Fault(f"{path}: JSON, but no baseline; make one with `stagetrace baseline FILE... -o {path}`")
    if document.get("schema") != SCHEMA:
        cure = "use a newer stagetrace" if _number(document.get("schema")) > SCHEMA else "make it anew"
        raise Fault(f"{path}: baseline of schema {document.get('schema')}, this stagetrace reads {SCHEMA}; {cure}")
    try:
        runs = [_run_of(path, index, each, document["columns"]) for index, each in enumerate(document["runs"], 1)]
    except KeyError as error:
        raise Fault(f"{path}: not a whole baseline ({error} is missing); make it anew") from None
    except ValueError as error:
        raise Fault(f"{path}: not a whole baseline ({error}); make it anew") from None
    except (TypeError, AttributeError, OverflowError):
        raise Fault(f"{path}: not a whole baseline (a value in it is of the wrong kind); make it anew") from None
    if not runs or not all(run.requests for run in runs):
        raise Fault(f"{path}: no requests in it; make it anew with `stagetrace baseline`")
    return runs


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def _run_of(path: Path, index: int, written: dict[str, Any], columns: list[str]) -> Run:
    started = datetime.fromisoformat(written["started"]).timestamp()
    requests = {key: _request_of(row, columns) for key, row in written["requests"].items()}
    fingerprint, without = dict(written["fingerprint"]), dict(written["without"])
    for text in (*fingerprint, *fingerprint.values(), *without, *without.values(), *requests):
        if not str(text).isprintable():  # a terminal, or what reads a job's log, would obey it
            raise ValueError(f"{str(text)[:60]!r} is not printable")
    return Run(f"{path} (run {index})", int(started * 1e9), fingerprint, requests, without)


def _request_of(row: list[Any], columns: list[str]) -> Request:
    cells = dict(zip(columns, row, strict=True))
    times = {key: float(cells[key]) for key in BY_KEY if cells.get(key) is not None}
    strange = [key for key, ms in times.items() if not 0 <= ms < math.inf]
    if strange:
        raise ValueError(f"{strange[0]} is no time")
    return Request(int(cells["prompt_tokens"]), int(cells["output_tokens"]), times)
