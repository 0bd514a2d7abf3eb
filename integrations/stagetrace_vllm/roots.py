"""Roots: one for each call of a client, over HTTP, offline, or by code that holds the engine itself; and their parents.

The parent is the span that the request's headers name, else the one that ``trace_headers`` name, else the one the
running code is in. Never the environment: what lies there is older than the request.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping
from contextvars import Token
from dataclasses import dataclass
from inspect import isasyncgen
from typing import Any

from stagetrace.plugin import Root, chosen, current, marks, new_root, now, parents, recorder, signed

#: A call at the engine's door: its root, what was current before, and the id it came with.
Entered = tuple[Root, "Token[Root | None]", str]
#: ``marks.OPERATIONS``: of a call that did not come over HTTP.
_GENERATE = 3


@dataclass
class OfflineCall:
    """One ``LLM.generate`` or ``LLM.chat``: many roots, made one after the other as prompts are rendered."""

    started: int
    roots: list[Root]
    open: bool = False


class _Offline:
    call: OfflineCall | None = None


_offline = _Offline()
#: Requests at the engine's door, by the id they came with: their prompts may be tokenised in another thread.
_at_the_door: dict[str, Root] = {}


def begin(kind: int, operation: int = _GENERATE, started: int = 0, headers: Mapping[str, str] | None = None) -> Root:
    """A new root, begun at ``started`` (now if 0), with its parent."""
    root = new_root(kind)
    high, low = signed(root.trace_high), signed(root.trace_low)
    recorder.mark(marks.ROOT, root.number, high, low, operation, kind, started)
    adopt(root, parents.of_headers(headers) or parents.of_current_span())
    return root


def adopt(root: Root, caller: parents.Caller | None) -> None:
    """Note the root's parent, unless the request has brought one."""
    if caller is None or (root.caller is not None and root.caller.explicit):
        return
    before, root.caller = root.caller, caller
    recorder.text(marks.TRACEPARENT, root.number, caller.traceparent)
    if caller.tracestate or before is not None:
        recorder.text(marks.TRACESTATE, root.number, caller.tracestate)


def end(root: Root, raised: BaseException | None = None) -> None:
    """Note that the call is over."""
    if raised is not None:
        recorder.text(marks.ERROR, root.number, marks.class_of(raised))
    recorder.mark(marks.END, root.number, raised is not None)


def headers_of(root: Root, share: float) -> dict[str, str] | None:
    """What makes a span of the engine's own the root's child; None for a root that is not certain to be exported.

    The child of a span that nobody has would be an orphan: then the request keeps what it came with, and the engine's
    span is what it would be without us. ``share`` is that of :func:`stagetrace.plugin.exported_share`.
    """
    caller = root.caller if parents.trusted() else None
    trace = caller.span.trace_id if caller else f"{root.trace_high:016x}{root.trace_low:016x}"
    if not (caller.span.sampled if caller else chosen(trace, share)):
        return None
    headers = {"traceparent": f"00-{trace}-{root.number:016x}-01"}
    return {**headers, "tracestate": caller.tracestate} if caller and caller.tracestate else headers


def root_now() -> Root | None:
    """The root the running code works for; offline, a new one for each prompt that turns up."""
    root = current.get()
    call = _offline.call
    if root is not None or call is None:
        return root
    if not call.open:
        call.roots.append(begin(marks.OFFLINE, started=call.started))
        call.open = True
    return call.roots[-1]


def handed_over() -> None:
    """The engine has all sequences of the current prompt: offline, what turns up next is another one."""
    if _offline.call is not None:
        _offline.call.open = False


def direct_entered(_engine: Any, request_id: Any, prompt: Any, trace_headers: Any) -> Entered | None:
    """A request at the engine's door. Unless it belongs to a call we know, the call begins here.

    The engine drops ``trace_headers`` right behind this door when its own tracing is off.
    """
    root = root_now()
    if root is not None:
        adopt(root, parents.of_headers(trace_headers))
        return None
    if isasyncgen(prompt):  # a request in pieces: each is handed over by a task of its own
        return None
    root = begin(marks.DIRECT, headers=trace_headers)
    _at_the_door[request_id] = root
    return root, current.set(root), request_id


def direct_left(state: Entered | None, _engine: Any, _result: Any) -> None:
    """The engine has it; its end is that of its last output."""
    if state is not None:
        _leave(*state)


def direct_failed(state: Entered | None, _engine: Any, error: BaseException) -> None:
    """The engine refused it, or the caller gave it up at the door."""
    if state is None:
        return
    root = state[0]
    if isinstance(error, CancelledError):
        recorder.mark(marks.DISCONNECT, root.number)
    end(root, error)
    _leave(*state)


def _leave(_root: Root, before: Token[Root | None], request_id: str) -> None:
    current.reset(before)
    _at_the_door.pop(request_id, None)


def prompt_entered(_processor: Any, request_id: Any) -> Token[Root | None] | None:
    """A prompt is about to be made an engine request, as a rule in a thread that has inherited no context."""
    root = _at_the_door.get(request_id) if current.get() is None else None
    return current.set(root) if root is not None else None


def prompt_left(token: Token[Root | None] | None, _processor: Any, _result: Any) -> None:
    """The thread may serve others now."""
    if token is not None:
        current.reset(token)


def offline_entered(_llm: Any) -> bool:
    """An offline call begins; ``chat`` may call ``generate``, which then is part of it."""
    if _offline.call is not None or current.get() is not None:
        return False
    _offline.call = OfflineCall(now(), [])
    return True


def offline_left(outermost: bool, _llm: Any, _result: Any) -> None:
    """The outputs are about to be returned."""
    _offline_end(outermost)


def offline_failed(outermost: bool, _llm: Any, error: BaseException) -> None:
    """The call raised."""
    _offline_end(outermost, error)


def _offline_end(outermost: bool, raised: BaseException | None = None) -> None:
    call = _offline.call
    if not outermost or call is None:
        return
    _offline.call = None
    for root in call.roots:
        end(root, raised)
