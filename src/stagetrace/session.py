"""A session: the directory on tmpfs that ties the processes of one server together.

It is named by ``STAGETRACE_SESSION`` and inherited by children. A directory that somebody else owns, that others
may enter, or that is a link is refused: marks are not prompts, but they say who asked what and when.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

ENV = "STAGETRACE_SESSION"
BASE_ENV = "STAGETRACE_TMPDIR"
DEFAULT_BASE = "/dev/shm"
PAUSED = "paused"
OWNER = "collector.pid"
#: `flush` writes a stamp into the first; the collector copies it into the second once it has stored everything.
FLUSH = "flush"
FLUSHED = "flushed"


class SessionError(Exception):
    """One line: what is wrong with the session directory and how to cure it."""


def base() -> Path:
    """Where sessions live: tmpfs, because a mapped file on a disk can stall its writer."""
    return Path(os.environ.get(BASE_ENV) or DEFAULT_BASE)


def check(directory: Path) -> Path:
    """Return ``directory`` if it is ours alone, else raise :class:`SessionError`."""
    try:
        info = os.lstat(directory)
    except OSError as error:
        raise SessionError(f"session {directory} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise SessionError(f"session {directory} is not a directory (links are refused)")
    if info.st_uid != os.getuid():
        raise SessionError(f"session {directory} belongs to uid {info.st_uid}, not to {os.getuid()}")
    if info.st_mode & 0o077:
        raise SessionError(f"session {directory} is open to others; chmod 700 it")
    return directory


def create() -> Path:
    """Make a new session directory (0700) and name this process its collector."""
    root = base()
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"stagetrace-{os.getuid()}-", dir=root))
        (directory / OWNER).write_text(str(os.getpid()))
    except OSError as error:
        raise SessionError(
            f"no session under {root}: {error.strerror}; mount a tmpfs there or point {BASE_ENV} at one"
        ) from None
    return directory


def current() -> Path | None:
    """The session this process was started in, checked; None without one."""
    named = os.environ.get(ENV)
    return check(Path(named)) if named else None


def live() -> list[Path]:
    """Sessions of this user whose collector is alive, oldest first."""
    found = []
    for directory in sorted(base().glob(f"stagetrace-{os.getuid()}-*")):
        try:
            check(directory)
            owner = int((directory / OWNER).read_text())
        except (SessionError, OSError, ValueError):
            continue
        if alive(owner):
            found.append(directory)
    return found


def remove_stale() -> int:
    """Delete directories whose collector and writers are all gone; return how many."""
    removed = 0
    for directory in base().glob(f"stagetrace-{os.getuid()}-*"):
        try:
            check(directory)
            owner = int((directory / OWNER).read_text())
        except (SessionError, OSError, ValueError):
            continue
        writers = [int(ring.name.split("-")[1]) for ring in directory.glob("ring-*-*")]
        if not any(alive(pid) for pid in [owner, *writers]):
            shutil.rmtree(directory, ignore_errors=True)
            removed += 1
    return removed


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not (it can write no more)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
