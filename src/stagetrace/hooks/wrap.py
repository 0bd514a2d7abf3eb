"""The wrappers: our code inside a guard, the host's call outside it, exactly once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..guard import Guard
from .spec import HookSpec

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
#: Returned instead of a state when ``enter`` failed, so that ``leave`` is left out.
_FAILED = object()


def picker(
    parameters: Sequence[inspect.Parameter], takes: Sequence[str]
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
    """Return a function that finds the arguments ``takes``, bound now by name, in a call's args and kwargs."""
    wanted = [_place(parameters, name) for name in takes]
    if not wanted:
        return lambda args, kwargs: ()
    if len(wanted) == 1:
        ((at, only, default),) = wanted
        return lambda args, kwargs: (args[at] if len(args) > at else kwargs.get(only, default),)
    return lambda args, kwargs: tuple(args[i] if len(args) > i else kwargs.get(n, d) for i, n, d in wanted)


def _place(parameters: Sequence[inspect.Parameter], name: str) -> tuple[int, str, Any]:
    """Position, name and default of a parameter; what is passed by keyword only has no position."""
    at = next(index for index, parameter in enumerate(parameters) if parameter.name == name)
    default = None if parameters[at].default is inspect.Parameter.empty else parameters[at].default
    return sys.maxsize if parameters[at].kind is inspect.Parameter.KEYWORD_ONLY else at, name, default


def wrapper(
    spec: HookSpec, parameters: Sequence[inspect.Parameter], guard: Guard, paused: Callable[[], bool]
) -> Wrapper:
    """Build the wrapper of one hook for a target with ``parameters``."""
    pick = picker(parameters, spec.takes)
    if spec.awaits:
        return _awaiting(_Ours(spec, pick, guard, paused))
    if spec.fail is not None or spec.done is not None:
        return _watching(_Ours(spec, pick, guard, paused))
    return _calling(spec, pick, guard, paused)


@dataclass
class _Ours:
    """What a hook does before and after the host's call; nothing it raises gets out."""

    spec: HookSpec
    pick: Any
    guard: Guard
    paused: Callable[[], bool]

    def entered(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = self.spec
        try:
            if spec.pausable and self.paused():
                return _FAILED
            return spec.enter(instance, *self.pick(args, kwargs)) if spec.enter else None
        except Exception as error:
            self.guard.failed(error)
            return _FAILED

    def left(self, state: Any, instance: Any, result: Any) -> Any:
        """The result to hand to the host."""
        if state is _FAILED:
            return result
        try:
            ours = self.spec.leave(state, instance, result) if self.spec.leave else None
        except Exception as error:
            self.guard.failed(error)
            ours = result
        self._done(state)
        return ours if self.spec.replaces else result

    def raised(self, state: Any, instance: Any, error: BaseException) -> None:
        if state is _FAILED:
            return
        try:
            if self.spec.fail:
                self.spec.fail(state, instance, error)
        except Exception as ours:
            self.guard.failed(ours)
        self._done(state)

    def _done(self, state: Any) -> None:
        try:
            if self.spec.done:
                self.spec.done(state)
        except Exception as error:
            self.guard.failed(error)


def _calling(spec: HookSpec, pick: Any, guard: Guard, paused: Callable[[], bool]) -> Wrapper:
    """``entered`` and ``left`` written out: this is what an engine's every step runs through, and finds cold."""
    enter, leave, takes, pausable, replaces = spec.enter, spec.leave, spec.takes, spec.pausable, spec.replaces

    def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if guard.off:
            return wrapped(*args, **kwargs)
        state = None
        try:
            if pausable and paused():
                state = _FAILED
            elif enter is not None:
                state = enter(instance, *pick(args, kwargs)) if takes else enter(instance)
        except Exception as error:
            guard.failed(error)
            state = _FAILED
        result = wrapped(*args, **kwargs)
        if leave is None or state is _FAILED:
            return result
        try:
            ours = leave(state, instance, result)
        except Exception as error:
            guard.failed(error)
            return result
        return ours if replaces else result

    return call


def _watching(ours: _Ours) -> Wrapper:
    def call_and_watch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if ours.guard.off:
            return wrapped(*args, **kwargs)
        state = ours.entered(instance, args, kwargs)
        try:
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            ours.raised(state, instance, error)
            raise
        return ours.left(state, instance, result)

    return call_and_watch


def _awaiting(ours: _Ours) -> Wrapper:
    async def run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        state = ours.entered(instance, args, kwargs)
        try:
            result = await wrapped(*args, **kwargs)
        except BaseException as error:
            ours.raised(state, instance, error)
            raise
        return ours.left(state, instance, result)

    def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if ours.guard.off:
            return wrapped(*args, **kwargs)
        return run(wrapped, instance, args, kwargs)

    return call
