"""Install groups of hooks as the engine imports its modules, and take them out again without a trace."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ..guard import Guard
from .resolve import Unresolved, live, ready, split, static
from .spec import HookGroup, HookSpec
from .wrap import wrapper

_MISSING = object()


class Installer:
    """Owns the journal of what was replaced. ``report(target, state)`` is told of each hook's fate.

    States: ``installed``, ``waiting`` (its module is not imported yet), ``refused: why``.
    """

    def __init__(
        self, groups: Iterable[HookGroup], paused: Callable[[], bool], report: Callable[[str, str], None]
    ) -> None:
        self.groups = tuple(groups)
        self.states: dict[str, str] = {}
        self.guards: dict[str, Guard] = {}
        self._paused = paused
        self._report = report
        self._refused: set[str] = set()
        self._cleared: set[str] = set()
        self._journal: list[tuple[type, str, Any, Any]] = []
        self._lock = threading.RLock()
        self._active = False

    def install(self) -> None:
        """Watch for the modules of every hook; those already imported are hooked now. Never raises."""
        import wrapt

        with self._lock:
            if self._active:
                return
            self._active = True
            modules: dict[str, None] = {}
            for group in self.groups:
                for hook in group.hooks:
                    self.states.setdefault(hook.target, "waiting")
                    for target in (hook.target, *hook.otherwise):
                        modules.setdefault(split(target)[0])
        for module in modules:
            # An exception in an import hook would fail the host's import.
            wrapt.register_post_import_hook(lambda m, name=module: self._imported(name), module)

    def uninstall(self) -> None:
        """Put every original back, exactly, newest first."""
        with self._lock:
            self._active = False
            while self._journal:
                owner, name, original, ours = self._journal.pop()
                if inspect.getattr_static(owner, name, None) is not ours:
                    continue  # somebody wrapped it again after us: leave theirs, ours passes through
                if original is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
            for guard in self.guards.values():
                guard.off = True
            self.guards.clear()
            self.states.clear()
            self._cleared.clear()
            self._refused.clear()

    def _imported(self, module: str) -> None:
        try:
            with self._lock:
                if self._active:
                    for group in self.groups:
                        self._commit(group, module)
        except Exception as error:
            self._say(module, f"refused: {type(error).__name__}")

    def _commit(self, group: HookGroup, module: str) -> None:
        """Install the group's hooks that live in ``module``, if every hook of the group can be."""
        mine = [h for h in group.hooks if any(split(t)[0] == module for t in (h.target, *h.otherwise))]
        if not mine or group.name in self._refused:
            return
        if group.name not in self._cleared:
            try:
                for hook in group.hooks:
                    resolve(hook)
            except Unresolved as error:
                self._refused.add(group.name)
                for hook in group.hooks:
                    self._say(hook.target, f"refused: {error}")
                return
            self._cleared.add(group.name)
        for hook in mine:
            target = resolve(hook)
            if split(target)[0] == module and self.states.get(hook.target) != "installed":
                self._wrap(hook, target)

    def _wrap(self, hook: HookSpec, target: str) -> None:
        import wrapt

        owner, name, names = live(target, hook.takes)
        original = owner.__dict__.get(name, _MISSING)
        guard = Guard(hook.target, self._report)
        ours = wrapt.FunctionWrapper(
            inspect.getattr_static(owner, name), wrapper(hook, names, guard, self._paused)
        )
        setattr(owner, name, ours)
        self._journal.append((owner, name, original, ours))
        self.guards[hook.target] = guard
        # The flag comes last: a hook that says "installed" is.
        self._say(hook.target, "installed")

    def _say(self, target: str, state: str) -> None:
        if self.states.get(target) != state:
            self.states[target] = state
            self._report(target, state)


def resolve(hook: HookSpec) -> str:
    """Return the first of the hook's places that exists; raise :class:`Unresolved` with the first reason."""
    first: Unresolved | None = None
    for target in (hook.target, *hook.otherwise):
        try:
            (live if ready(split(target)[0]) else static)(target, hook.takes)
        except Unresolved as error:
            first = first or error
        else:
            return target
    raise first or Unresolved(hook.target)
