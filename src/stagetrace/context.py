"""Which call of a client the running code works for: a mutable context behind a context variable.

Mutable, because a web framework runs a request's handler and its response in tasks of their own: they inherit the
variable, but what they set in it is invisible to each other.
"""

from __future__ import annotations

import itertools
import os
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import marks
from .parents import Caller

if TYPE_CHECKING:
    from .provider import LiveRoot

_salt = int.from_bytes(os.urandom(8), "little")
#: Its ``next`` is one step of the interpreter: threads cannot get the same number.
_issued = itertools.count(1)


def number() -> int:
    """A new 64-bit number for a root, a sequence or a step's engine: never 0, distinct across processes."""
    # An odd multiplier walks through all 2**64 values, so numbers of one process never repeat.
    return (_salt + next(_issued) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF or number()


def _reseed() -> None:
    """A forked child must not hand out its parent's numbers."""
    global _salt
    _salt = int.from_bytes(os.urandom(8), "little")


os.register_at_fork(after_in_child=_reseed)


@dataclass
class Root:
    """One call of a client, alive from its first byte to its last."""

    number: int
    trace_high: int
    trace_low: int
    #: Where it comes from: ``marks.HTTP``, ``OFFLINE`` or ``DIRECT``.
    kind: int = marks.HTTP
    caller: Caller | None = None
    #: What stands before the number that the front end gives each of a call's engine requests in their ids.
    numbered: str = ""
    received_bytes: int = 0
    handled: bool = False
    #: Its headers have said whose child it is, or that it is nobody's; what the engine reads in them does not count.
    judged: bool = False
    #: The engine has taken it.
    entered: bool = False
    #: Its end has been noted.
    over: bool = False
    text_sent: bool = False
    streams: bool = False
    #: Sequence numbers handed to the engine so far.
    sequences: list[int] = field(default_factory=list)
    #: Its span, where it is one of the host's own: then its ids are that span's.
    live: LiveRoot | None = None


current: ContextVar[Root | None] = ContextVar("stagetrace_root", default=None)


def new_root(kind: int = marks.HTTP) -> Root:
    """A root with fresh ids: 128 random bits for the trace, 64 for the span."""
    while True:
        high, low = int.from_bytes(os.urandom(8), "little"), int.from_bytes(os.urandom(8), "little")
        if high or low:
            return Root(number(), high, low, kind)
