"""Install groups of hooks as the engine imports its modules, and take them out again without a trace."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ..guard import Guard
from .resolve import Unresolved, live, parsed, ready, split, static
from .spec import HookGroup, HookSpec
from .wrap import wrapper

_MISSING = object()


class _Replaced(NamedTuple):
    """One line of the journal: ``original`` is what the class's own dictionary held, if anything."""

    group: str
    owner: type
    name: str
    original: Any
    ours: Any
    guard: Guard


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
        self._cleared: set[str] = set()
        self._loaded: set[str] = set()
        self._registering = False
        self._journal: list[_Replaced] = []
        self._lock = threading.RLock()
        self._active = False

    def install(self) -> None:
        """Watch for the modules of every hook; those already imported are hooked now. Never raises.

        A module that is half imported at this moment is looked at again with the next one, or the next call.
        """
        import wrapt

        with self._lock:
            if not self._active:
                self._active = self._registering = True
                hooks = [hook for group in self.groups for hook in group.hooks]
                self.states = dict.fromkeys([hook.target for hook in hooks], "waiting")
                for module in dict.fromkeys(module for hook in hooks for module in _modules(hook)):
                    wrapt.register_post_import_hook(partial(self._imported, module), module)
                self._registering = False
            self._commit_all()

    def uninstall(self) -> None:
        """Put every original back, exactly, newest first."""
        with self._lock:
            self._active = False
            for guard in self.guards.values():
                guard.off = True
            self._restore(self._journal)
            self._journal = []
            self.guards.clear()
            self.states.clear()
            self._cleared.clear()

    def _imported(self, module: str, _: object) -> None:
        """Called when ``module`` has been imported, by whichever thread. An exception would fail that import."""
        with self._lock:
            # While registering, it means no more than that the import has begun.
            if not self._registering:
                self._loaded.add(module)
                self._commit_all()

    def _commit_all(self) -> None:
        if self._active:
            for group in self.groups:
                self._commit(group)
        parsed.cache_clear()

    def _commit(self, group: HookGroup) -> None:
        """Install the group's hooks whose modules are imported, if every hook of the group can be."""
        waiting = [hook for hook in group.hooks if self.states.get(hook.target) == "waiting"]
        due = [hook for hook in waiting if any(map(self._whole, _modules(hook)))]
        if not due:
            return
        try:
            if group.name not in self._cleared:
                for hook in group.hooks:
                    resolve(hook, self._whole)
                self._cleared.add(group.name)
            for hook in due:
                target = resolve(hook, self._whole)
                if self._whole(split(target)[0]):
                    self._wrap(group, hook, target)
        except Exception as error:
            self._refuse(group, error)

    def _whole(self, module: str) -> bool:
        """Whether all of the module is there. Import hooks run a little before the import system says so."""
        return module in self._loaded or ready(module)

    def _wrap(self, group: HookGroup, hook: HookSpec, target: str) -> None:
        import wrapt

        owner, name, parameters = live(target, hook.takes, hook.awaits)
        original = owner.__dict__.get(name, _MISSING)
        guard = Guard(hook.target, self._report)
        ours = wrapt.FunctionWrapper(
            inspect.getattr_static(owner, name), wrapper(hook, parameters, guard, self._paused)
        )
        setattr(owner, name, ours)
        self._journal.append(_Replaced(group.name, owner, name, original, ours, guard))
        self.guards[hook.target] = guard
        # The flag comes last: a hook that says "installed" is.
        self._say(hook.target, "installed")

    def _refuse(self, group: HookGroup, error: Exception) -> None:
        """Take out what the group has installed so far: a group is whole or not there."""
        why = str(error) if isinstance(error, Unresolved) else type(error).__name__
        mine = [entry for entry in self._journal if entry.group == group.name]
        self._journal = [entry for entry in self._journal if entry.group != group.name]
        for entry in mine:
            entry.guard.off = True
        self._restore(mine)
        for hook in group.hooks:
            self.guards.pop(hook.target, None)
            self._say(hook.target, f"refused: {why}")

    @staticmethod
    def _restore(journal: list[_Replaced]) -> None:
        for entry in reversed(journal):
            if entry.owner.__dict__.get(entry.name) is not entry.ours:
                continue  # somebody wrapped it again after us: leave theirs, ours passes through
            with suppress(Exception):  # one class that cannot be written must not keep the others
                if entry.original is _MISSING:
                    delattr(entry.owner, entry.name)
                else:
                    setattr(entry.owner, entry.name, entry.original)

    def _say(self, target: str, state: str) -> None:
        if self.states.get(target) != state:
            self.states[target] = state
            with suppress(Exception):
                self._report(target, state)


def resolve(hook: HookSpec, whole: Callable[[str], bool] = ready) -> str:
    """Return the first of the hook's places that exists; raise :class:`Unresolved` with the first reason."""
    first: Unresolved | None = None
    for target in (hook.target, *hook.otherwise):
        try:
            if whole(split(target)[0]):
                live(target, hook.takes, hook.awaits)
            else:
                static(target, hook.takes, awaits=hook.awaits)
        except Unresolved as error:
            first = first or error
        except Exception as error:  # source that cannot be read or parsed, a module that fails lazily
            first = first or Unresolved(f"{target} cannot be examined ({type(error).__name__})")
        else:
            return target
    raise first or Unresolved(hook.target)


def _modules(hook: HookSpec) -> list[str]:
    return [split(target)[0] for target in (hook.target, *hook.otherwise)]
