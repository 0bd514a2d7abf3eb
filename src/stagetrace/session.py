"""A session: the directory on tmpfs that ties the processes of one server together.

It is named by ``STAGETRACE_SESSION`` and inherited by children. A directory that somebody else owns, that others
may enter, or that is a link is refused: marks are not prompts, but they say who asked what and when.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ENV = "STAGETRACE_SESSION"
BASE_ENV = "STAGETRACE_TMPDIR"
DEFAULT_BASE = "/dev/shm"
PAUSED = "paused"
OWNER = "collector.pid"
#: `flush` writes a stamp into the first; the collector copies it into the second once it has stored everything.
FLUSH = "flush"
FLUSHED = "flushed"
#: Lies there while the collector sends traces to a back end, and says which share of those that have no caller.
TRACES = "traces"
#: Where the collector stores, and why it does not if it should, as JSON.
STORE = "store.json"
#: What the collector has heard of each process's hooks, as JSON: rings are written round and round, and forget it.
HOOKS = "hooks.json"
#: Which cards the collector samples, and which it cannot, as JSON.
GPU = "gpu.json"
#: A session of another container is left alone for this long after it was made, whatever it looks like.
YOUNG_S = 60.0


class SessionError(Exception):
    """One line: what is wrong with the session directory and how to cure it."""


def base() -> Path:
    """Where sessions live: tmpfs, because a mapped file on a disk can stall its writer."""
    # Absolute, since children may live in another directory.
    return Path(os.environ.get(BASE_ENV) or DEFAULT_BASE).absolute()


def check(directory: Path) -> Path:
    """Return ``directory`` if it is ours alone, else raise :class:`SessionError`."""
    try:
        info = os.lstat(directory)
    except OSError as error:
        raise SessionError(f"session {directory} cannot be used: {reason(error)}") from None
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
    directory = None
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"stagetrace-{os.getuid()}-", dir=root))
        write(directory / OWNER, _me())
    except OSError as error:
        if directory is not None:  # no room for a byte, but for an empty directory
            shutil.rmtree(directory, ignore_errors=True)
        raise SessionError(
            f"no session under {root}: {reason(error)}; mount a tmpfs there or point {BASE_ENV} at one"
        ) from None
    return directory


def own(directory: Path) -> int:
    """Make this process the collector of ``directory``; returns the lock it must hold while it is.

    A lock, not the process id alone: containers often share their tmpfs, and cannot see each other's processes.
    """
    descriptor = os.open(directory / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    text = _me().encode()
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))
    return descriptor


def write(path: Path, text: str) -> None:
    """Write a small file of a session, for its owner's eyes only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def current() -> Path | None:
    """The session this process was started in, checked; None without one."""
    named = os.environ.get(ENV)
    return check(Path(named)) if named else None


def live() -> list[Path]:
    """Sessions of this user whose collector is alive, oldest first."""
    return [directory for directory in _all() if _locked(directory) or _starting(directory)]


def remove_stale() -> int:
    """Delete directories whose collector and writers are all gone; return how many."""
    removed = 0
    for directory in _all():
        if not _locked(directory) and not _starting(directory) and not writers(directory):
            shutil.rmtree(directory, ignore_errors=True)
            removed += 1
    return removed


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not (it can write no more)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def owner(directory: Path) -> int:
    """The process that collects ``directory``, as it has written itself; 0 if nobody has."""
    return _owner(directory)[0]


def reason(error: Exception) -> str:
    """What the system says is wrong, without the path."""
    return getattr(error, "strerror", None) or str(error)


def _me() -> str:
    return f"{os.getpid()} {_namespace()}"


def _namespace() -> str:
    """The name space in which process ids mean something; the same for all processes outside containers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def _all() -> list[Path]:
    """Session directories of this user that somebody has claimed, oldest first."""
    found = []
    for directory in base().glob(f"stagetrace-{os.getuid()}-*"):
        with suppress(SessionError, OSError):
            if owner(check(directory)):
                found.append((os.lstat(directory / OWNER).st_ctime_ns, directory))
    return [directory for _, directory in sorted(found)]


def _owner(directory: Path) -> tuple[int, str]:
    try:
        pid, _, namespace = (directory / OWNER).read_text(encoding="ascii", errors="replace").partition(" ")
        return int(pid), namespace
    except (OSError, ValueError):
        return 0, ""


def _locked(directory: Path) -> bool:
    """Whether a collector holds the directory: it has locked its name."""
    try:
        descriptor = os.open(directory / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _starting(directory: Path) -> bool:
    """Whether the process that made the directory still lives; its collector may be about to take over."""
    pid, namespace = _owner(directory)
    if namespace == _namespace():
        return alive(pid)
    with suppress(OSError):
        return time.time() - os.lstat(directory).st_mtime < YOUNG_S
    return False


def writers(directory: Path) -> list[int]:
    """Who may still write: process ids in the names of the rings, if they mean something here.

    What a container's processes write that nobody collects is no loss.
    """
    if _owner(directory)[1] != _namespace():
        return []
    parts = [ring.name.split("-") for ring in directory.glob("ring-*-*")]
    return [pid for pid in {int(part[1]) for part in parts if part[1].isdecimal()} if alive(pid)]
