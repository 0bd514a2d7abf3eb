"""Who a request is to others: its ids, and what its caller's span is to it."""

from __future__ import annotations

from typing import Any

from .. import marks
from ..parents import trusted
from ..propagation import parse
from .book import Book, Name, Root, Sequence


def caller_of(root: Root) -> dict[str, Any]:
    """What the caller's span is to the root, if its traceparent is sound: the parent, or no more than a link."""
    span = parse(root.texts.get(marks.TRACEPARENT, ""))
    if span is None:
        return {}
    state = root.texts.get(marks.TRACESTATE) or None
    if not trusted():
        return {"link_trace_id": span.trace_id, "link_span_id": span.span_id, "tracestate": state}
    return {"parent_span_id": span.span_id, "caller_sampled": span.sampled, "tracestate": state}


def name_of(root: Root) -> Name:
    """The ids of a call; the trace is its caller's, where there is one to trust."""
    caller = parse(root.texts.get(marks.TRACEPARENT, "")) if trusted() else None
    trace = caller.trace_id if caller else root.trace_id
    return Name(root.texts.get(marks.EXTERNAL_ID, ""), trace, f"{root.number:016x}")


def name_in(book: Book, sequence: Sequence) -> Name | None:
    """Whose sequence it is, also if its call is over and has been written out."""
    root = book.roots.get(sequence.root) if sequence.root is not None else None
    return name_of(root) if root is not None else sequence.name
