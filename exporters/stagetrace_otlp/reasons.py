"""Why the official exporters fail: they return no reason, but log one."""

from __future__ import annotations

import logging
import re
import threading
from enum import Enum

from .settings import Signal

_ERRNO = re.compile(r"\[Errno -?[0-9]+\] ([A-Za-z ]+)")
#: Of a server's own words.
_MOST = 60
_RAN_OUT = "DEADLINE_EXCEEDED"


class Reasons(logging.Handler):
    """Keeps the last reason logged in each thread, as a few words; never the error itself, which holds the message."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last: dict[int | None, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        transient = str(record.msg).startswith("Transient error")
        for argument in arguments[:1] if transient else arguments:
            if words := reason(argument) or (transient and isinstance(argument, str) and clean(argument)):
                # That time ran out while it was tried again says less than what it was tried again for.
                if words != _RAN_OUT or record.thread not in self._last:
                    self._last[record.thread] = words
                return

    def forget(self) -> None:
        """Begin anew in this thread: what was wrong the last time may not be any more."""
        self._last.pop(threading.get_ident(), None)

    def of(self, thread: int | None = None) -> str:
        """The last reason in ``thread``, or in the one that asks; empty if there was none."""
        return self._last.get(thread or threading.get_ident(), "")


heard = Reasons()


def listen() -> None:
    """Hear the official exporters instead of having them write lines with tracebacks for every failure."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    logger = logging.getLogger("opentelemetry.exporter")
    logger.setLevel(logging.WARNING)
    logger.propagate = False  # other handlers may keep the record, and with it the message
    if heard not in logger.handlers:
        logger.addHandler(heard)


def reason(what: object) -> str:
    """A gRPC status, an HTTP status or an error in a few words; empty for anything else."""
    if isinstance(what, Enum):
        return what.name
    if isinstance(what, int) and not isinstance(what, bool) and 100 <= what < 600:
        return f"HTTP {what}"
    if isinstance(what, BaseException):
        found = _ERRNO.search(str(what))
        return found[1].strip() if found else type(what).__name__
    return ""


def clean(text: str) -> str:
    """One line of what may be any server's words."""
    return "".join(c if c.isprintable() else "?" for c in text)[:_MOST]


def complaint(to: Signal | None, what: str, cost: str, why: str) -> str:
    """One line: where, what, why, and what to do."""
    place, cure = (f" {to.shown}", f"; start a collector there, or correct {to.origin}") if to else ("", "")
    return f"the OTLP endpoint{place} did not take {what}{f' ({why})' if why else ''}; serving goes on, {cost}{cure}"
