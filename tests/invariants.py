"""What must hold for every request record, whatever happened to the request. (The engine tests call `violations`.)"""

from __future__ import annotations

from stagetrace.model import RequestRecord


def violations(record: RequestRecord) -> list[str]:
    """Every broken rule, in words; empty when the record is sound."""
    found = []
    if [s.number for s in record.stages] != list(range(1, 13)):
        found.append("not twelve stages in order")
    reached = 0.0
    for stage in record.stages:
        measured = stage.state in ("measured", "estimated")
        if measured != (stage.duration_ms is not None and stage.start_ms is not None):
            found.append(f"{stage.key}: {stage.state} with {stage.start_ms}, {stage.duration_ms}")
        if measured and stage.key != "embedding":
            if stage.start_ms < reached - 1e-6:
                found.append(f"{stage.key} overlaps: {stage.start_ms} < {reached}")
            reached = stage.start_ms + stage.duration_ms
    return [f"{record.request_id}: {problem}" for problem in found]
