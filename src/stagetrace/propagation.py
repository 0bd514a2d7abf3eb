"""The W3C trace context of a request, as strictly as the specification reads it; and sampling by trace id."""

from __future__ import annotations

import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """A caller's span: lower-case hex ids, and whether the caller records."""

    trace_id: str
    span_id: str
    sampled: bool


def chosen(trace_id: str, share: float) -> bool:
    """Whether a trace is among the ``share`` (0 to 1) that is sampled.

    As the official sampler decides, so that whoever samples by the same id and ratio keeps the same traces.
    """
    return int(trace_id[-16:], 16) < round(share * (1 << 64))


def parse(traceparent: str) -> Parent | None:
    """Read a ``traceparent`` header; None for anything malformed, all-zero, or of version ff."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return Parent(trace, span, bool(int(flags, 16) & 1))
