"""A store in Python, also while a server writes it: which stage the slowest request spent its time in.

python read_store.py traces.db
"""

from __future__ import annotations

import sys

import stagetrace

trace = stagetrace.load(sys.argv[1] if len(sys.argv) > 1 else "traces.db")
finished = [request for request in trace.requests if request.e2e_ms is not None]
print(f"{len(trace.requests)} requests, {len(trace.steps)} steps of the engine")
if finished:
    slowest = max(finished, key=lambda request: request.e2e_ms or 0.0)
    timed = [stage for stage in slowest.stages if stage.duration_ms is not None]
    stage = max(timed, key=lambda stage: stage.duration_ms or 0.0)
    print(f"slowest: {slowest.request_id}, {slowest.e2e_ms:.1f} ms, {stage.duration_ms:.1f} ms of them in {stage.key}")
