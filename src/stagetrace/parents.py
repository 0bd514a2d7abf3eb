"""The caller's span that a root answers to: brought by headers, or current in this process under OpenTelemetry."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from .propagation import Parent, parse

#: Headers that are read, and their longest values; an over-long or unprintable one is nobody's context or id.
LIMITS = {"traceparent": 128, "tracestate": 512, "x-request-id": 128}


def kept(name: str, value: str) -> bool:
    """Whether a header is one that is read, and its value one that is kept: printable ASCII, and not too long."""
    return len(value) <= LIMITS.get(name.lower(), -1) and value.isascii() and value.isprintable()


class Caller(NamedTuple):
    """A caller's span, and what to hand on of it. ``explicit``: it came with the request, by headers."""

    span: Parent
    traceparent: str
    tracestate: str
    explicit: bool


def trusted() -> bool:
    """Whether the spans that callers name may be parents at all."""
    return os.environ.get("STAGETRACE_TRUST_TRACEPARENT") != "0"


def of_headers(headers: Mapping[str, str] | None) -> Caller | None:
    """The caller that sent ``headers``; None where their ``traceparent`` is missing or unsound."""
    found: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if kept(name, value):
            found.setdefault(name.lower(), value)
    return _caller(found.get("traceparent", ""), found.get("tracestate", ""), explicit=True)


def of_current_span() -> Caller | None:
    """The span the running code is in, where the host has OpenTelemetry; this never imports it."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    try:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        state = context.trace_state.to_header() if context.trace_state else ""
    except Exception:  # half imported, or a provider of the host's own making
        return None
    return _caller(text, state if len(state) <= LIMITS["tracestate"] else "", explicit=False)


def _caller(traceparent: str, tracestate: str, explicit: bool) -> Caller | None:
    span = parse(traceparent)
    return Caller(span, traceparent.strip(), tracestate, explicit) if span else None
