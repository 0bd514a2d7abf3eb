"""Tables and rows: what the store's columns are, and how records become rows and rows records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import fields
from sys import intern
from typing import Any

from ..model import GpuSample, RequestRecord, RunRecord, StageRecord, StepRecord

Row = tuple[Any, ...]
#: Version of the tables, in the file's ``user_version``: one more with every change of them. A store of another
#: version is refused; nothing converts it.
VERSION = 4

# For a person with the sqlite3 shell: plain columns, JSON where a value is a dictionary or a list.
DDL = """
BEGIN;
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('pruned_requests', 0), ('pruned_steps', 0);
CREATE TABLE runs (
    run_id INTEGER PRIMARY KEY, session TEXT NOT NULL, engine TEXT, engine_version TEXT, model TEXT,
    config TEXT NOT NULL, started_unix_ns INTEGER NOT NULL, notes TEXT NOT NULL
);
CREATE TABLE requests (
    id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs,
    request_id TEXT NOT NULL, external_id TEXT, trace_id TEXT NOT NULL, operation TEXT NOT NULL, model TEXT,
    status TEXT NOT NULL, finish_reason TEXT, active_stage TEXT,
    prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER, start_unix_ns INTEGER NOT NULL,
    e2e_ms REAL, ttft_ms REAL, ttft_kind TEXT, queue_ms REAL, prefill_ms REAL, itl_ms TEXT NOT NULL,
    coverage REAL, coverage_ttft REAL, unattributed_ms REAL, preemptions INTEGER NOT NULL,
    sequence INTEGER NOT NULL, gaps_ms TEXT NOT NULL,
    span_id TEXT NOT NULL, parent_span_id TEXT, internal_id TEXT,
    caller_sampled INTEGER, engine INTEGER, process INTEGER, tracestate TEXT,
    link_trace_id TEXT, link_span_id TEXT, http_status INTEGER, error_type TEXT, gpu TEXT
);
CREATE INDEX requests_by_identity ON requests (trace_id, span_id, sequence);
CREATE INDEX requests_by_start ON requests (start_unix_ns);
CREATE TABLE stages (
    request INTEGER NOT NULL REFERENCES requests (id), number INTEGER NOT NULL, key TEXT NOT NULL,
    state TEXT NOT NULL, source TEXT, start_ms REAL, duration_ms REAL, attributes TEXT NOT NULL,
    PRIMARY KEY (request, number)
) WITHOUT ROWID;
CREATE TABLE token_times (
    request INTEGER PRIMARY KEY REFERENCES requests (id), tokens INTEGER NOT NULL,
    format TEXT NOT NULL, times BLOB NOT NULL
);
CREATE TABLE steps (
    id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs,
    step INTEGER NOT NULL, engine INTEGER NOT NULL,
    schedule_start_ns INTEGER NOT NULL, schedule_end_ns INTEGER NOT NULL,
    batch_size INTEGER NOT NULL, tokens INTEGER NOT NULL, prefill_tokens INTEGER NOT NULL,
    running INTEGER NOT NULL, waiting INTEGER NOT NULL, kv_usage REAL NOT NULL,
    update_start_ns INTEGER, update_end_ns INTEGER, execute_start_ns INTEGER, execute_end_ns INTEGER,
    forward_start_ns INTEGER, forward_end_ns INTEGER, lm_head_start_ns INTEGER, lm_head_end_ns INTEGER,
    sample_call_start_ns INTEGER, sample_call_end_ns INTEGER, sample_start_ns INTEGER, sample_end_ns INTEGER,
    embedding_start_ns INTEGER, embedding_end_ns INTEGER,
    preempted INTEGER NOT NULL, device_async INTEGER NOT NULL, device_timed INTEGER NOT NULL,
    UNIQUE (run_id, engine, step, schedule_start_ns)
);
CREATE TABLE gpu_samples (
    id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs,
    card TEXT NOT NULL, t_ns INTEGER NOT NULL, period_ns INTEGER NOT NULL, name TEXT,
    utilization REAL, memory_bandwidth_utilization REAL, memory_used_bytes INTEGER, memory_total_bytes INTEGER,
    power_w REAL, energy_j REAL, sm_clock_mhz INTEGER, memory_clock_mhz INTEGER, temperature_c INTEGER,
    throttle INTEGER, sm_active REAL, sm_occupancy REAL, tensor_active REAL, dram_active REAL
);
CREATE VIEW gauges AS SELECT
    run_id, engine, step, schedule_start_ns AS at_ns, kv_usage AS kv_cache_utilization,
    waiting AS queue_depth, running, batch_size, preempted FROM steps;
COMMIT;
"""

_JSON_COLUMNS = ("itl_ms", "gaps_ms", "config", "notes", "gpu")
_RUN_FIELDS = tuple(f.name for f in fields(RunRecord))
_REQUEST_FIELDS = tuple(f.name for f in fields(RequestRecord) if f.name not in ("stages", "token_times_ms"))
_STEP_FIELDS = tuple(f.name for f in fields(StepRecord))
_GPU_FIELDS = tuple(f.name for f in fields(GpuSample))


def _step_columns(name: str) -> tuple[str, ...]:
    stem = name.removesuffix("_ns")
    return (name,) if stem == name else (f"{stem}_start_ns", f"{stem}_end_ns")


_STEP_COLUMNS = tuple(column for name in _STEP_FIELDS for column in _step_columns(name))


def _insert(table: str, columns: Iterable[str]) -> str:
    names = tuple(columns)
    return f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


PUT_RUN = _insert("runs", ("run_id", *_RUN_FIELDS))
PUT_REQUEST = _insert("requests", ("id", "run_id", *_REQUEST_FIELDS))
PUT_STAGE = _insert("stages", ("request", *(f.name for f in fields(StageRecord))))
PUT_TIMES = _insert("token_times", ("request", "tokens", "format", "times"))
# Not OR REPLACE: that would give the row a new id, and the ids tell which steps are oldest.
PUT_STEP = (
    _insert("steps", ("run_id", *_STEP_COLUMNS)).replace(" OR REPLACE", "")
    + " ON CONFLICT (run_id, engine, step, schedule_start_ns) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _STEP_COLUMNS)
)
PUT_GPU = _insert("gpu_samples", ("run_id", *_GPU_FIELDS))
GET_GPU = f"SELECT {', '.join(_GPU_FIELDS)} FROM gpu_samples"
GET_RUNS = f"SELECT {', '.join(_RUN_FIELDS)} FROM runs"
GET_REQUESTS = f"SELECT {', '.join(('id', *_REQUEST_FIELDS))} FROM requests"
GET_STAGES = f"SELECT {', '.join(('request', *(f.name for f in fields(StageRecord))))} FROM stages"
GET_TIMES = "SELECT request, format, times FROM token_times"
GET_STEPS = f"SELECT {', '.join(_STEP_COLUMNS)} FROM steps"


_json = json.JSONEncoder(separators=(",", ":"), default=str).encode


def _cell(record: Any, name: str) -> Any:
    value = getattr(record, name)
    if name in _JSON_COLUMNS:
        return _json(value)
    # A lone surrogate (a header's stray byte) cannot be stored, and would take the whole batch with it.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def run_row(run: RunRecord) -> Row:
    """Return the cells of ``run``, but for its id."""
    return tuple(_cell(run, name) for name in _RUN_FIELDS)


def request_row(request: RequestRecord) -> Row:
    """Return the cells of ``request``, but for its id and its run."""
    return tuple(_cell(request, name) for name in _REQUEST_FIELDS)


def stage_row(stage: StageRecord) -> Row:
    """Return the cells of ``stage``, but for its request."""
    return (
        stage.number, stage.key, stage.state, stage.source,
        stage.start_ms, stage.duration_ms, _json(stage.attributes),
    )  # fmt: skip


def step_row(step: StepRecord) -> Row:
    """Return the cells of ``step``, but for its run."""
    cells: list[Any] = []
    for name in _STEP_FIELDS:
        value = getattr(step, name)
        if name.endswith("_ns"):
            cells.extend(value or (None, None))
        else:
            cells.append(value)
    return tuple(cells)


def gpu_row(sample: GpuSample) -> Row:
    """Return the cells of ``sample``, but for its run."""
    return tuple(getattr(sample, name) for name in _GPU_FIELDS)


def gpu_of(row: Row) -> GpuSample:
    """Return the sample of a row of ``GET_GPU``."""
    return GpuSample(*row)


def pack_times(times_ms: list[float]) -> tuple[int, str, bytes]:
    """Return count, format and bytes: 4 a token, exact to a microsecond, for 71 minutes."""
    count = len(times_ms)
    try:
        return count, "us32", struct.pack(f"<{count}I", *[round(time * 1000) for time in times_ms])
    except (struct.error, ValueError, OverflowError):
        return count, "ms64", struct.pack(f"<{count}d", *times_ms)


def unpack_times(form: str, times: bytes) -> list[float]:
    """Return what :func:`pack_times` was given, to a microsecond."""
    if form == "us32":
        return [time / 1000 for time in struct.unpack(f"<{len(times) // 4}I", times)]
    return list(struct.unpack(f"<{len(times) // 8}d", times))


def run_of(row: Row) -> RunRecord:
    """Return the record of a row of ``GET_RUNS``."""
    return RunRecord(**_cells(_RUN_FIELDS, row))


def request_of(row: Row) -> RequestRecord:
    """Return the record of a row of ``GET_REQUESTS`` less its id; its stages come from another table."""
    cells = _cells(_REQUEST_FIELDS, row)
    sampled = cells["caller_sampled"]
    cells["caller_sampled"] = None if sampled is None else bool(sampled)
    return RequestRecord(**cells, stages=[])


def _cells(names: tuple[str, ...], row: Row) -> dict[str, Any]:
    cells = dict(zip(names, row, strict=True))
    for name in _JSON_COLUMNS:
        if name in cells:
            cells[name] = json.loads(cells[name])
    return cells


def stage_of(row: Row) -> StageRecord:
    """Return the record of a row of ``GET_STAGES`` less its request."""
    number, key, state, source, start_ms, duration_ms, attributes = row
    # A store holds twelve of these a request, and only a few different words: keep one copy of each.
    source = source and intern(source)
    return StageRecord(
        number, intern(key), intern(state), source, start_ms, duration_ms, json.loads(attributes)
    )  # fmt: skip


def step_of(row: Row) -> StepRecord:
    """Return the record of a row of ``GET_STEPS``."""
    cells = iter(row)
    values: dict[str, Any] = {}
    for name in _STEP_FIELDS:
        first = next(cells)
        if name.endswith("_ns"):
            second = next(cells)
            values[name] = None if first is None else (first, second)
        else:
            values[name] = first
    for name in ("device_async", "device_timed"):
        values[name] = bool(values[name])
    return StepRecord(**values)
