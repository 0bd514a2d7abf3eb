"""A hook is a row; rows that only make sense together form a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HookSpec:
    """One method to watch.

    ``target`` is ``module:Class.method``; where versions differ, ``otherwise`` lists older places, tried in order.
    ``takes`` names the arguments ``enter`` wants: ``enter(instance, *values)`` runs before the call and may return a
    state for ``leave(state, instance, result)``, which runs after it, or ``fail(state, instance, error)``, which runs
    if it raised. ``done(state)`` only takes back what ``enter`` has set. It runs after these even if they failed: else
    one failure of ours would show in other requests. ``awaits`` says that ``leave`` belongs after the coroutine, not
    after the call that made it. ``replaces`` makes ``leave`` return the result to hand to the host.
    """

    target: str
    enter: Callable[..., Any] | None = None
    leave: Callable[[Any, Any, Any], Any] | None = None
    fail: Callable[[Any, Any, BaseException], None] | None = None
    done: Callable[[Any], None] | None = None
    takes: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    awaits: bool = False
    replaces: bool = False
    #: False for a hook that has work to do even where nothing is recorded (yet): it is called all the same.
    pausable: bool = True


@dataclass(frozen=True)
class HookGroup:
    """Hooks that are installed together or not at all; ``stages`` lose their source when they are not."""

    name: str
    stages: tuple[str, ...]
    hooks: tuple[HookSpec, ...]
    #: A group that the engine's version may lack altogether (another model runner, say).
    optional: bool = False
