"""Reading a store: all of it or its newest requests, at one moment, while it may be written."""

from __future__ import annotations

import gc
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..model import GpuSample, RequestRecord, RunRecord, StepRecord
from . import files, schema
from .files import StoreError


@dataclass
class Trace:
    """What a store holds, oldest first. ``notices`` are lines a person should see with it."""

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    runs: list[RunRecord] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    gpu: list[GpuSample] = field(default_factory=list)


def load(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    steps: bool = True,
    session: str | None = None,
) -> Trace:
    """Read a store, also while it is written; StoreError if it cannot be read.

    ``limit`` reads only that many of the newest requests, ``steps=False`` no steps and no GPU samples,
    ``session`` only the runs of one session. A step's times are monotonic: those of several sessions do not compare.
    """
    real = files.locate(path)
    for _ in range(3):
        live, before = files.live(real), files.state(real)
        outcome: Trace | StoreError
        try:
            with files.reading(real) as db, _no_garbage():
                outcome = _read(real, db, limit, steps, session)
        except StoreError as exc:
            outcome = exc
        except (sqlite3.Error, OSError) as exc:
            outcome = files.explain(real, exc)
        except (ValueError, TypeError, KeyError, struct.error) as exc:
            outcome = files.explain(real, ValueError(f"unreadable content: {type(exc).__name__}"))
        # A store that nobody writes is read without locks: a writer that came meanwhile may have changed it.
        if files.live(real) == live and (live or files.state(real) == before):
            if isinstance(outcome, StoreError):
                raise outcome
            return outcome
    raise StoreError(f"{files.show(real)}: changed while it was read; try again")


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Put the cyclic collector off: going over all records again and again takes most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(path: Path, db: sqlite3.Connection, limit: int | None, steps: bool, session: str | None) -> Trace:
    db.execute("BEGIN")  # one moment for all tables
    trace = Trace()
    of_session = "WHERE ? IS NULL OR session = ?"
    chosen_runs = f"run_id IN (SELECT run_id FROM runs {of_session})"
    who = (session, session)
    found = db.execute(f"{schema.GET_RUNS} {of_session} ORDER BY run_id", who)
    trace.runs = [schema.run_of(row) for row in found]

    newest = f"SELECT id FROM requests WHERE {chosen_runs} ORDER BY start_unix_ns DESC, id DESC LIMIT ?"
    wanted = (*who, -1 if limit is None else limit)
    by_start = "ORDER BY start_unix_ns, trace_id, request_id, sequence"
    found = db.execute(f"{schema.GET_REQUESTS} WHERE id IN ({newest}) {by_start}", wanted)
    requests = {row[0]: schema.request_of(row[1:]) for row in found}
    # The primary key's order: each request's stages from 1 to 12.
    found = db.execute(f"{schema.GET_STAGES} WHERE request IN ({newest}) ORDER BY request, number", wanted)
    for row in found:
        requests[row[0]].stages.append(schema.stage_of(row[1:]))
    for number, form, times in db.execute(f"{schema.GET_TIMES} WHERE request IN ({newest})", wanted):
        requests[number].token_times_ms = schema.unpack_times(form, times)
    trace.requests = list(requests.values())

    if steps:
        found = db.execute(f"{schema.GET_STEPS} WHERE {chosen_runs} ORDER BY run_id, schedule_start_ns", who)
        trace.steps = [schema.step_of(row) for row in found]
        found = db.execute(f"{schema.GET_GPU} WHERE {chosen_runs} ORDER BY run_id, t_ns", who)
        trace.gpu = [schema.gpu_of(row) for row in found]
    pruned = dict(db.execute("SELECT key, value FROM meta"))
    if any(pruned.values()):
        trace.notices.append(
            f"store {files.show(path)}: {pruned['pruned_requests']} oldest requests and "
            f"{pruned['pruned_steps']} oldest steps were removed to keep to --store-max"
        )
    return trace


def find(trace: Trace, ident: str) -> list[RequestRecord]:
    """Return the requests with this response id, ``x-request-id``, internal id or trace id.

    Trace ids in either case; that of a caller who is only linked to counts, too.
    """
    if not ident:
        return []
    return [
        each
        for each in trace.requests
        if ident in (each.request_id, each.external_id, each.internal_id)
        or ident.lower() in (each.trace_id, each.link_trace_id)
    ]
