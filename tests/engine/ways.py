"""What must hold of a request, whichever way it came to be recorded."""

from __future__ import annotations

from collections.abc import Sequence

from stagetrace.model import RequestRecord
from tests.invariants import check_all

#: Stages that a way has no use for.
OFFLINE = DIRECT = ("http_receive", "chat_template")
OFFLINE_CHAT = ("http_receive",)
COMPLETION = ("chat_template",)
IDS = ("tokenize",)


def came_in(records: Sequence[RequestRecord], *absent: str, parent: tuple[str, str] | None = None) -> None:
    """One call, its root below ``parent`` (trace id, span id) or nobody; twelve stages, ``absent`` ones marked so."""
    check_all(records, complete=True)
    assert len({(record.trace_id, record.span_id) for record in records}) == 1, "one root"
    for record in records:
        assert record.status == "ok"
        assert record.parent_span_id == (parent[1] if parent else None)
        assert parent is None or record.trace_id == parent[0]
        assert {stage.key for stage in record.stages if stage.state == "not_applicable"} == set(absent)
        assert {stage.state for stage in record.stages} <= {"measured", "not_applicable"}, record.stages
