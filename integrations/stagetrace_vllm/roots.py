"""Roots: one for each call of a client, over HTTP, offline, or by code that holds the engine itself; and their parents.

The parent is the span that the request's headers name, else the one that ``trace_headers`` name, else the one the
running code is in. Never the environment: what lies there is older than the request.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from stagetrace import plugin
from stagetrace.plugin import (
    Entered,
    Root,
    chosen,
    current,
    enter,
    leave,
    marks,
    now,
    parents,
    recorder,
    signed,
    troubled,
)

Headers = Mapping[str, str]
#: The hook that puts our layer around an application.
APPLICATION = "fastapi.applications:FastAPI.build_middleware_stack"
#: The hook that sees a call become the engine's.
HAND_OVER = "vllm.v1.engine.output_processor:OutputProcessor.add_request"
#: ``marks.OPERATIONS``: of a call that did not come over HTTP.
_GENERATE = 3


class AtTheDoor(NamedTuple):
    """A call at the engine's door: its root, unless that is still to begin, and how to leave."""

    root: Root | None
    leave: Callable[[], None]


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
#: Set where a request comes in pieces: the headers it came with. A task that inherits it hands the pieces over.
_pieces: ContextVar[Headers | None] = ContextVar("stagetrace_pieces", default=None)


def begin(kind: int, operation: int = _GENERATE, started: int = 0, headers: Headers | None = None) -> Root:
    """A new root, begun at ``started`` (now if 0), with its parent."""
    caller = parents.of_headers(headers) or parents.of_current_span()
    started = started or now()
    root = plugin.begin(kind, operation, caller, started)
    high, low = signed(root.trace_high), signed(root.trace_low)
    recorder.mark(marks.ROOT, root.number, high, low, operation, kind, started)
    _note(root, caller)
    return root


def adopt(root: Root, caller: parents.Caller | None) -> None:
    """Give the root a parent that came later, unless the request has brought one, or its span has begun."""
    if root.live is None and not root.judged and not (root.caller is not None and root.caller.explicit):
        _note(root, caller)


def _note(root: Root, caller: parents.Caller | None) -> None:
    if caller is None:
        return
    before, root.caller = root.caller, caller
    recorder.text(marks.TRACEPARENT, root.number, caller.traceparent)
    if caller.tracestate or before is not None:
        recorder.text(marks.TRACESTATE, root.number, caller.tracestate)


def end(root: Root, raised: BaseException | None = None) -> None:
    """Note that the call is over."""
    if raised is not None:
        recorder.text(marks.ERROR, root.number, marks.class_of(raised))
    unseen = root.entered and not root.sequences and troubled(HAND_OVER)
    recorder.mark(marks.END, root.number, raised is not None, marks.ENGINE_UNSEEN if unseen else 0)
    root.over = True


def ended_unseen(root: Root) -> None:
    """Note that a call is over whose end we have missed: neither when it was is known, nor how."""
    if not root.over:
        recorder.mark(marks.END, root.number, 0, marks.END_UNSEEN)
        root.over = True


def headers_of(root: Root, share: float | None) -> dict[str, str] | None:
    """What makes a span of the engine's own the root's child; None for a root that is not certain to be exported.

    The child of a span that nobody has would be an orphan: then the request keeps what it came with, and the engine's
    span is what it would be without us. ``share`` is that of :func:`stagetrace.plugin.exported_share`; a live span's
    sampler has decided.
    """
    caller = root.caller if parents.trusted() else None
    trace = caller.span.trace_id if caller else f"{root.trace_high:016x}{root.trace_low:016x}"
    if root.live is not None:
        certain = root.live.sampled
    elif share is not None:
        certain = caller.span.sampled if caller else chosen(trace, share)
    else:
        return None
    if not certain:
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


def stranger() -> tuple[int, int]:
    """(kind, operation) of a request without a root: a program's own, unless a call has gone unwatched here."""
    return (marks.UNWATCHED, 0) if troubled(APPLICATION) else (marks.DIRECT, _GENERATE)


def handed_over() -> None:
    """The engine has all sequences of the current prompt: offline, what turns up next is another one."""
    if _offline.call is not None:
        _offline.call.open = False


def direct_entered(_engine: Any, request_id: Any, prompt: Any, trace_headers: Any) -> AtTheDoor | None:
    """A request at the engine's door. Unless it belongs to a call we know, the call begins here.

    The engine drops ``trace_headers`` right behind this door when its own tracing is off.
    """
    if isinstance(prompt, AsyncGenerator):  # it comes in pieces: there is no request before the first of them
        return AtTheDoor(None, partial(_pieces.reset, _pieces.set(trace_headers or {})))
    root = root_now()
    if root is not None:
        adopt(root, parents.of_headers(trace_headers))
        root.entered = True
        return None
    root = begin(*stranger(), headers=trace_headers)
    _at_the_door[request_id] = root
    return AtTheDoor(root, partial(_leave, enter(root), request_id))


def direct_left(state: AtTheDoor | None, _engine: Any, _result: Any) -> None:
    """The engine has it; its end is that of its last output."""
    if state is None:
        return
    if state.root is not None and not state.root.sequences:
        # The hand-over went unseen, and nothing more will be heard of it.
        recorder.mark(marks.END, state.root.number, 0, marks.ENGINE_UNSEEN)
        state.root.over = True


def direct_failed(state: AtTheDoor | None, _engine: Any, error: BaseException) -> None:
    """The engine refused it, or the caller gave it up at the door."""
    if state is None:
        if (known := root_now()) is not None:
            known.entered = False
        return
    if state.root is not None:
        if isinstance(error, CancelledError):
            recorder.mark(marks.DISCONNECT, state.root.number)
        end(state.root, error)


def direct_done(state: AtTheDoor | None) -> None:
    """What comes next is another call. One without a sequence that has not ended by now never will."""
    if state is not None:
        state.leave()
        if state.root is not None and not state.root.sequences:
            ended_unseen(state.root)


def _leave(before: Entered, request_id: str) -> None:
    leave(before)
    _at_the_door.pop(request_id, None)


def in_pieces() -> bool:
    """Whether the running code hands a request over piece by piece."""
    return _pieces.get() is not None


def root_of(request: Any) -> Root:
    """Whom an engine request belongs to. A call that nobody has seen coming begins here."""
    root = root_now()
    if root is None:
        pieces = _pieces.get()
        root = begin(*stranger(), headers=request.trace_headers or pieces)
        if pieces is not None:  # the task that hands the pieces over does nothing else, and ends with them
            current.set(root)
    return root


def prompt_entered(_processor: Any, request_id: Any) -> Entered | None:
    """A prompt is about to be made an engine request, as a rule in a thread that has inherited no context."""
    root = _at_the_door.get(request_id) if current.get() is None else None
    return enter(root) if root is not None else None


def prompt_done(entered: Entered | None) -> None:
    """The thread may serve others now."""
    if entered is not None:
        leave(entered)


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
    for root in _offline.call.roots if outermost and _offline.call else ():
        end(root, raised)


def offline_done(outermost: bool) -> None:
    """What comes next is another call; roots that have not ended by now never will."""
    call = _offline.call
    if not outermost or call is None:
        return
    _offline.call = None
    for root in call.roots:
        ended_unseen(root)
