"""Runs: what a store, or a baseline, holds of one load on one server. The gate's own small, versioned structure."""

from __future__ import annotations

import hashlib
import re
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..faults import Fault
from ..model import RequestRecord, RunRecord
from ..store import load
from .measures import STAGE_KEYS

#: What may be known of a server, and compared: settings, never a command line or an environment.
SETTINGS = (
    "engine", "engine_version", "model", "device", "gpu", "tensor_parallel", "executor", "async_scheduling",
    "prefix_caching", "chunked_prefill", "speculative", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
    "block_size", "kv_blocks",
)  # fmt: skip
#: What is known of the load on it.
ASKED = ("concurrency", "request_rate", "prompt_mix", "output_tokens", "cached_tokens")
#: What `stagetrace load` calls its requests: which load, how driven, which request of it.
LOAD_ID = re.compile(r"load-(?:c(?P<concurrency>\d+)|r(?P<rate>[\d.e+-]+))-(?P<name>[0-9a-f]{8})-(?P<what>\w+)")
#: A run in which a larger share of the requests was not answered says nothing of latency.
MOST_FAILED = 0.05
TOKEN_TIMES = 2

Fingerprint = dict[str, "str | int | float | None"]


@dataclass(frozen=True)
class Request:
    """One answered request. ``ms`` holds what is known of it, by measure; ``id`` finds it in its store."""

    prompt_tokens: int
    output_tokens: int
    ms: Mapping[str, float]
    id: str = ""


@dataclass(frozen=True)
class Run:
    """One load on one server. ``requests`` by prompt: the same key is the same prompt in another run.

    ``without``: stages that have no time in any request, and their state. ``failed``: requests that were not answered.
    """

    name: str
    started_unix_ns: int
    fingerprint: Fingerprint
    requests: Mapping[str, Request]
    without: Mapping[str, str] = field(default_factory=dict)
    failed: int = 0


class NothingRecorded(Fault):
    """A store without a request of a load."""


def runs_of_store(path: Path) -> list[Run]:
    """The runs in a store, oldest first: one for each load of each server. Fault if there is none."""
    whole = load(path, steps=False)
    sessions = list(dict.fromkeys(run.session for run in whole.runs))
    found: list[Run] = []
    for session in sessions:
        trace = whole if len(sessions) == 1 else load(path, steps=False, session=session)
        if trace.requests:
            found += _runs(str(path), trace.runs[-1], trace.requests)
    if not found:
        raise NothingRecorded(
            f"{path}: no request of a load in it; record some with `stagetrace run --store {path} -- CMD`"
        )
    return sorted(found, key=lambda run: run.started_unix_ns)


def _runs(path: str, server: RunRecord, records: list[RequestRecord]) -> Iterable[Run]:
    loads: dict[str, dict[str, RequestRecord]] = {}
    hows: dict[str, Fingerprint] = {}
    for record in records:
        match = LOAD_ID.fullmatch(record.external_id or "")
        if match and match["what"].isdecimal() and not record.sequence:
            loads.setdefault(match["name"], {})[match["what"]] = record
            hows[match["name"]] = {
                "concurrency": int(match["concurrency"]) if match["concurrency"] else None,
                "request_rate": float(match["rate"]) if match["rate"] else None,
            }
    if not loads:  # somebody else's client: requests of equal lengths are equal, in the order they came
        counts: Counter[tuple[int | None, int | None]] = Counter()
        for record in (r for r in records if not r.sequence):
            lengths = record.prompt_tokens, record.output_tokens
            counts[lengths] += 1
            loads.setdefault("", {})[f"{lengths[0]}+{lengths[1]}#{counts[lengths]:04d}"] = record
        hows[""] = {"concurrency": _in_flight([r for r in records if not r.sequence]), "request_rate": None}
    for name, of_load in loads.items():
        yield _run(f"{path} ({name})" if len(loads) > 1 else path, server, of_load, hows[name])


def _in_flight(records: list[RequestRecord]) -> int:
    """How many requests there were when one came, itself included: the median."""
    starts = sorted(r.start_unix_ns for r in records)
    ends = sorted(r.start_unix_ns + (r.e2e_ms or 0.0) * 1e6 for r in records)
    return round(statistics.median(bisect_right(starts, at) - bisect_right(ends, at) for at in starts))


def _run(name: str, server: RunRecord, records: dict[str, RequestRecord], how: Fingerprint) -> Run:
    requests = {key: _request(r) for key, r in sorted(records.items()) if r.status == "ok" and r.e2e_ms is not None}
    failed = len(records) - len(requests)
    if failed > MOST_FAILED * len(records):
        raise Fault(f"{name}: {failed} of {len(records)} requests were not answered; what is left is no measurement")
    answered = [r for r in records.values() if r.status == "ok"]
    states = {key: Counter(r.stage(key).state for r in answered) for key in STAGE_KEYS}
    without = {
        key: states[key].most_common(1)[0][0]
        for key in STAGE_KEYS
        if all(key not in request.ms for request in requests.values())
    }
    settings = {"engine": server.engine, "engine_version": server.engine_version, "model": server.model}
    known = {**server.config, **{key: value for key, value in settings.items() if value is not None}}
    fingerprint: Fingerprint = {key: known.get(key) for key in SETTINGS} | how | _mix(requests, answered)
    started = min(r.start_unix_ns for r in records.values())
    return Run(name, started, fingerprint, requests, without, failed)


def _mix(requests: dict[str, Request], answered: list[RequestRecord]) -> Fingerprint:
    """What was asked: how many prompts, of which lengths, and how much of them was found in the cache."""
    lengths = [request.prompt_tokens for request in requests.values()]
    digest = hashlib.sha256(repr([(key, r.prompt_tokens) for key, r in requests.items()]).encode()).hexdigest()
    return {
        "prompt_mix": f"{len(lengths)} prompts of {min(lengths)}-{max(lengths)} tokens ({digest[:8]})",
        "output_tokens": round(statistics.fmean(r.output_tokens for r in requests.values()), 1),
        "cached_tokens": round(statistics.fmean(r.cached_tokens or 0 for r in answered), 1),
    }


def times_of(record: RequestRecord) -> dict[str, float]:
    """What is known of a request, by measure, in ms."""
    times = record.token_times_ms
    found: dict[str, Any] = {
        "ttft_ms": record.ttft_ms,
        "itl_ms": (times[-1] - times[0]) / (len(times) - 1) if len(times) >= TOKEN_TIMES else None,
        "prefill_ms": record.prefill_ms,
        "queue_ms": record.queue_ms,
        "e2e_ms": record.e2e_ms,
        **{stage.key: stage.duration_ms for stage in record.stages},
        "unattributed": record.unattributed_ms,
    }
    return {key: float(ms) for key, ms in found.items() if ms is not None}


def _request(record: RequestRecord) -> Request:
    return Request(record.prompt_tokens or 0, record.output_tokens or 0, times_of(record), record.request_id)
