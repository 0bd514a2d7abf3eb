"""Puts the delays into the engine's classes, each when its module is imported in this process."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import wrapt

from . import calls
from .calls import Call
from .control import Control
from .places import PLACES, Seam

#: Not to be delayed, but to know whom a process works for; outermost, so that it is known in time.
_NOTED = (
    ("starlette.requests:Request.json", calls.body_read),
    ("vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", calls.step_begins),
)
Act = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def install(path: str) -> None:
    """Patch every seam of every place; what is delayed is decided call by call, by the file ``path``."""
    control = Control(path)
    for place in PLACES.values():
        for seam in place.seams:
            _when_imported(seam.target, _delay(control, place.name, seam), seam.after)
    for target, note in _NOTED:
        _when_imported(target, _tell(note), after=False)


def _delay(control: Control, place: str, seam: Seam) -> Act:
    def act(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fault = control.fault()
        if fault is None or fault.place != place:
            return
        hit = seam.who(Call(place, owner, args, kwargs))
        chosen = {name: n for name, n in hit.requests.items() if fault.only in name} if hit else {}
        if hit and chosen:
            factor = {"batch": hit.batch, "position": max(chosen.values())}.get(fault.grow or "", 1)
            control.delay(fault, list(chosen), factor)

    return act


def _tell(note: Callable[[Call], None]) -> Act:
    return lambda owner, args, kwargs: note(Call("", owner, args, kwargs))


def _when_imported(target: str, act: Act, after: bool) -> None:
    name, _, path = target.partition(":")
    wrapt.register_post_import_hook(lambda module: _patch(module, path, act, after), name)


def _patch(module: Any, path: str, act: Act, after: bool) -> None:
    owner_name, _, method = path.partition(".")
    owner = getattr(module, owner_name, None)
    original = vars(owner).get(method) if owner is not None else None
    if not inspect.isfunction(original):
        print(f"stagetrace_faults: no {path} in {module.__name__}: no delay there", file=sys.stderr, flush=True)
        return
    setattr(owner, method, _around(original, act, after))


def _around(original: Any, act: Act, after: bool) -> Any:
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def patched_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            act(self, args, kwargs)
            return await original(self, *args, **kwargs)

        return patched_async

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not after:
            act(self, args, kwargs)
        result = original(self, *args, **kwargs)
        if after:
            act(self, args, kwargs)
        return result

    return patched
