"""Roots as live spans of the host's own TracerProvider, where ``instrument`` was given one.

Nothing here knows OpenTelemetry: an exporter does, see :class:`stagetrace.exporting.Exporter`. Without a provider, and
whenever it fails, a root has ids of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token
from typing import NamedTuple, Protocol

from .clock import anchor
from .context import Root, current, new_root
from .guard import Guard
from .marks import OPERATIONS
from .parents import Caller, trusted

Report = Callable[[str, str], None]
NAME = "tracer_provider"


class LiveRoot(Protocol):
    """A root's span while it runs: its ids, whether it is sampled, and how it becomes the current span."""

    trace_id: int
    span_id: int
    sampled: bool

    def attach(self) -> object: ...
    def detach(self, token: object) -> None: ...


class LiveSpans(Protocol):
    """Starts live roots. May raise; None where there can be no span with an id of its own."""

    def begin(self, operation: str, caller: Caller | None, start_unix_ns: int) -> LiveRoot | None: ...


class Entered(NamedTuple):
    """What was current before a root was."""

    ours: Token[Root | None]
    live: LiveRoot | None
    token: object


class _State:
    spans: LiveSpans | None = None
    guard = Guard(NAME)
    anchor_ns = (0, 0)


_state = _State()


def use(spans: LiveSpans, report: Report | None = None) -> tuple[int, int]:
    """Make the roots of this process live spans from now on; returns the (monotonic, unix) pair of their times."""
    _state.guard = Guard(NAME, report)
    _state.anchor_ns = anchor()
    _state.spans = spans
    return _state.anchor_ns


def release() -> None:
    """Give the roots that begin from now on ids of our own."""
    _state.spans = None


def begin(kind: int, operation: int, caller: Caller | None, started: int) -> Root:
    """A new root, begun at ``started`` (monotonic ns)."""
    root = new_root(kind)
    spans = _state.spans
    if spans is None or _state.guard.off:
        return root
    mono, wall = _state.anchor_ns
    parent = caller if trusted() else None
    try:
        live = spans.begin(OPERATIONS.get(operation, "unknown"), parent, wall + started - mono)
    except Exception as error:
        _state.guard.failed(error)
        return root
    if live is not None:
        root.live, root.number = live, live.span_id
        root.trace_high, root.trace_low = live.trace_id >> 64, live.trace_id & 0xFFFFFFFFFFFFFFFF
    return root


def enter(root: Root) -> Entered:
    """Make ``root`` the one the running code works for, and its span the current one."""
    ours, live, token = current.set(root), root.live, None
    if live is not None:
        try:
            token = live.attach()
        except Exception as error:
            _state.guard.failed(error)
            live = None
    return Entered(ours, live, token)


def leave(entered: Entered) -> None:
    """Make current again what was so before."""
    if entered.live is not None:
        try:
            entered.live.detach(entered.token)
        except Exception as error:
            _state.guard.failed(error)
    current.reset(entered.ours)
