"""Whose text a thread of the renderer's pool has in its hands: such threads inherit no context variable.

What a call holds is known by its identity, for as long as the call keeps it alive. Equal short texts may be one and
the same object: what two calls hold at a time is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stagetrace.plugin import Root

_roots: dict[int, list[Root]] = {}


def hold(root: Root, things: Iterable[Any]) -> list[int]:
    """``root`` holds these; returns what :func:`release` takes."""
    marks = [id(thing) for thing in things if isinstance(thing, str | list | dict)]
    for mark in marks:
        _roots.setdefault(mark, []).append(root)
    return marks


def release(root: Root, marks: Iterable[int]) -> None:
    """It holds them no longer."""
    for mark in marks:
        roots = _roots.get(mark)
        if roots and root in roots:
            roots.remove(root)
            if not roots:
                del _roots[mark]


def root_of(things: Iterable[Any]) -> Root | None:
    """The one call that holds any of these; None if there is none, or more than one."""
    found = {root.number: root for thing in things for root in _roots.get(id(thing), ())}
    return next(iter(found.values())) if len(found) == 1 else None


def parts(request: Any) -> list[Any]:
    """What a request's body came with: its fields, and the members of those that are lists."""
    fields = list(vars(request).values())
    return fields + [member for field in fields if isinstance(field, list) for member in field]
