"""Files that a command writes because it was asked to: where the name leads, and whole or not at all.

Links are followed. What is no regular file (a pipe, a terminal, an open descriptor) is written as it is, and so is
``-``, which is stdout.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .faults import Fault

STDOUT = Path("-")
#: As many links as the kernel follows.
_LINKS = 40
_DESCRIPTORS = re.compile(r"/proc/([0-9]+)(?:/task/[0-9]+)?/fd")


def to_stdout(path: Path) -> bool:
    """Whether ``path`` is this process's stdout, on which then nothing else belongs. OSError as for :func:`writing`."""
    return _place(path) == 1


def replaced(path: Path) -> Path | None:
    """The regular file that writing to ``path`` would replace; None if there is none. OSError as for :func:`writing`.

    What is not a regular file is not to be looked into: reading a pipe would take from whoever it is for.
    """
    place = _place(path)
    return None if isinstance(place, int) or _as_it_is(place) or not place.exists() else place


def spare(option: str, path: Path, fits: Callable[[Path], bool]) -> None:
    """Fault where writing to ``path`` would replace a file that is not ``fits``, of the kind that is written there."""
    there = replaced(path)
    if there is not None and not fits(there):
        raise Fault(f"{option} {path}: there is something else, which is not overwritten; name another file")


def folder(path: Path) -> Path | None:
    """The directory that a new file is made in; None where none is. OSError as for :func:`writing`."""
    place = _place(path)
    return None if isinstance(place, int) or _as_it_is(place) else place.parent


@contextmanager
def writing(path: Path, mode: int = 0o600, *, append: bool = False) -> Iterator[TextIO]:
    """A text file (UTF-8) whose content is at ``path`` once the block is left without an error.

    ``mode`` is that of a new file; ``append`` adds to what is there, in place. OSError if it cannot be written.
    """
    place = _place(path)
    if isinstance(place, int):
        if sys.stdout is not None:
            sys.stdout.flush()
        # Of its own, but with the position and the append flag of the one that was named.
        with open(os.dup(place), "w", encoding="utf-8") as file:
            yield file
    elif append or _as_it_is(place):
        with open(place, "a" if append else "w", encoding="utf-8") as file:
            yield file
    else:
        if place.exists():
            mode = stat.S_IMODE(place.stat().st_mode)
        descriptor, name = tempfile.mkstemp(prefix=".stagetrace-", dir=place.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                yield file
            os.chmod(name, mode)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise


def _place(path: Path) -> Path | int:
    """Where the links end: a name that is none, or a descriptor of this process."""
    if path == STDOUT:
        return 1
    for _ in range(_LINKS):
        place = Path(os.path.realpath(path.parent)) / path.name
        if inside := _descriptor(place):
            return int(place.name) if int(inside[1]) == os.getpid() else place
        if not place.is_symlink():
            return place
        path = place.parent / os.readlink(place)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _descriptor(place: Path) -> re.Match[str] | None:
    """A descriptor's name looks like a link to its file, which may have another name by now, or none."""
    return _DESCRIPTORS.fullmatch(str(place.parent)) if place.name.isdecimal() else None


def _as_it_is(place: Path) -> bool:
    """Whether nothing can, or should, take its place."""
    return bool(_descriptor(place)) or (place.exists() and not place.is_file())
