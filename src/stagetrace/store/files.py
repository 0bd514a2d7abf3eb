"""The store as a file: whose it is, who may write it, how it is opened without touching it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from .schema import DDL, VERSION

#: In the file's header, so that ``file`` and we tell a store from any other database.
APPLICATION_ID = 0x53544754
_BUSY_SECONDS = 2.0


class StoreError(Exception):
    """One line for the user: the file, what is wrong with it, what to do about it."""


def show(path: Path | str) -> str:
    """Return ``path`` so that it stays on one line, whatever it contains."""
    text = str(path)
    if text.isprintable():
        return text
    # Bytes that are no text are shown as they are; Python has letters of its own for them.
    raw = text.encode("utf-8", "surrogateescape")
    return ascii(text) if raw.decode("utf-8", "replace") == text else repr(raw)[1:]


def explain(path: Path, fault: BaseException) -> StoreError:
    """Turn what SQLite or the system says of ``path`` into a StoreError."""
    if isinstance(fault, OSError):
        return StoreError(f"{show(path)}: {fault.strerror}; see to it or name another file")
    text = str(fault)
    cures = {
        "not a database": "not a stagetrace store; name another file",
        "locked": "locked by another program; close that one and try again",
        "full": "no room left to write it (disk full); free some space and start again",
        "readonly": "may not be written; change its permissions or name another file",
        "unable to open": "cannot be opened; check its permissions and its directory's",
        "I/O": f"cannot be read or written ({text}); check the disk, its space and its limits",
    }
    for sign, cure in cures.items():
        if sign in text:
            return StoreError(f"{show(path)}: {cure}")
    return StoreError(f"{show(path)}: damaged ({text}); move it away and record a new one")


def _refuse_unless_ours(path: Path, application_id: int, version: int) -> None:
    if application_id != APPLICATION_ID or version < 1:
        raise StoreError(f"{show(path)}: not a stagetrace store; name another file")
    if version == VERSION:
        return
    which, cure = "a newer", "upgrade stagetrace to use it"
    if version < VERSION:
        which, cure = "an older", "move it away or name another file"
    raise StoreError(f"{show(path)}: written by {which} stagetrace (store version {version}, not {VERSION}); {cure}")


def check(path: Path, db: sqlite3.Connection) -> None:
    """Raise StoreError unless the open database is a store of a version we know."""
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    _refuse_unless_ours(path, application_id, version)


def _refuse_unless_file(path: Path) -> None:
    """Raise StoreError unless ``path`` is a non-empty regular file."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise StoreError(f"{show(path)}: is {kind}; name a file")
    if not found.st_size:
        raise StoreError(f"{show(path)}: empty, not a stagetrace store; remove it or name another file")


# ---------------------------------------------------------------- writing


class WriterLock:
    """The right to write one store, from the constructor to :meth:`release`; StoreError if it is taken.

    The lock is an flock on an empty file beside the store, not on the store: closing any descriptor of the
    store would drop the POSIX locks that SQLite holds on it in this process. A killed writer leaves the
    file behind; its lock is gone with it, so the next writer just takes it over.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._path = f"{store}-lock"
        while True:
            self._fd = self._open()
            # Between our open and our flock its last owner may have removed the name: then try again.
            if self.named():
                return
            os.close(self._fd)

    def _open(self) -> int:
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise explain(Path(self._path), exc) from exc
        try:
            if os.fstat(fd).st_size or not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StoreError(f"{show(self._path)}: in the way of the store's lock; move it away")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as exc:
            os.close(fd)
            if isinstance(exc, BlockingIOError):
                busy = "another stagetrace is writing it; wait for its end or name another file"
                raise StoreError(f"{show(self._store)}: {busy}") from exc
            raise
        return fd

    def named(self) -> bool:
        """Whether others can see the lock: somebody may have removed its file."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path, follow_symlinks=False))
        return False

    def release(self) -> None:
        """Remove the lock file, then let go; the other order would remove the next writer's."""
        if self.named():
            with suppress(OSError):
                os.unlink(self._path)
        # Explicitly: a process forked meanwhile shares the lock and would keep it.
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def target(path: str | os.PathLike[str]) -> Path:
    """Return the real path a writer would write; StoreError if nothing could be written there."""
    real = Path(os.path.realpath(path))
    parent = real.parent
    name = show(os.fspath(path))
    try:
        if os.path.islink(path) and not real.exists():
            raise StoreError(f"{name}: a link to a file that is not there; name the file itself")
        if not parent.is_dir():
            raise StoreError(f"{name}: no such directory: {show(parent)}; make it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise StoreError(f"{name}: its directory may not be written; name a file elsewhere")
        if real.exists():
            _refuse_unless_file(real)
            if not os.access(real, os.R_OK | os.W_OK):
                raise StoreError(f"{name}: may not be read and written; change its mode or name another file")
    except OSError as exc:
        raise explain(real, exc) from exc
    return real


def create_or_check(real: Path) -> None:
    """Make a new store at ``real``, or refuse what is there and is not ours. Needs the writer's lock."""
    if not real.exists():
        with suppress(FileExistsError):
            _create(real)
    refuse_unless_ours(real)


def refuse_unless_ours(real: Path) -> None:
    """Raise StoreError unless a store of our version is there. Needs the writer's lock: it opens the file."""
    _refuse_unless_file(real)
    # Not through SQLite, which would tidy up behind a foreign file's last writer and so change it.
    with open(real, "rb") as file:
        header = file.read(100)
    if not header.startswith(b"SQLite format 3\0"):
        raise StoreError(f"{show(real)}: not a stagetrace store; name another file")
    _refuse_unless_ours(real, int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))


def _create(real: Path) -> None:
    """Build the empty store under another name: it appears whole, and never in another file's place."""
    with tempfile.TemporaryDirectory(prefix=".stagetrace-", dir=real.parent) as scratch:
        temporary = os.path.join(scratch, "store")
        # SQLite keeps the mode of a file it finds, and gives the same to -wal and -shm.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o600))
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.execute("PRAGMA page_size=4096")
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            db.execute(f"PRAGMA application_id={APPLICATION_ID}")
            db.executescript(DDL)
            db.execute(f"PRAGMA user_version={VERSION}")
            db.execute("PRAGMA journal_mode=WAL")
        os.link(temporary, real)


def refuse_unless_writable(path: str | os.PathLike[str]) -> None:
    """Raise StoreError unless a writer could begin here now. Nothing is made or left."""
    real = target(path)
    lock = WriterLock(real)
    try:
        if real.exists():
            refuse_unless_ours(real)
    finally:
        lock.release()


# ---------------------------------------------------------------- reading


def locate(path: str | os.PathLike[str]) -> Path:
    """Return the real path of the store to read; StoreError if there is no such file."""
    real = Path(os.path.realpath(path))
    try:
        _refuse_unless_file(real)
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise explain(real, exc) from exc
        name = show(os.fspath(path))
        raise StoreError(f"no such store: {name}; run `stagetrace run --store {name} -- CMD` first") from exc
    return real


def identity(path: str) -> tuple[int, int] | None:
    """What tells a file from another one that takes its name; None if there is none."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


def live(real: Path) -> bool:
    """Say whether the store is being written, or was when its writer was killed."""
    return os.path.exists(f"{real}-wal") and os.path.exists(f"{real}-shm")


def state(real: Path) -> tuple[int, ...]:
    """Return what changes when somebody writes the store while it is read without locks."""
    with suppress(FileNotFoundError):
        found = os.stat(real)
        return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


@contextmanager
def reading(real: Path) -> Iterator[sqlite3.Connection]:
    """Open a store read-only and check it. Nothing is created beside it, nothing in it changes.

    The file itself is left to SQLite: a descriptor of our own, closed, would drop a writer's locks in this
    process (see :class:`WriterLock`).
    """
    wal = Path(f"{real}-wal")
    source, query = real, "mode=ro"
    with ExitStack() as stack:
        if not live(real):
            if wal.exists() and wal.stat().st_size:
                # A copy of a killed writer's files, without -shm. SQLite would have to make one beside them.
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="stagetrace-"))
                for file in (real, wal):
                    shutil.copy(file, scratch)
                source = Path(scratch, real.name)
            else:
                # Nobody writes it: a writer always has a -wal. Plain read-only mode would make one here.
                query += "&immutable=1"
        uri = f"{source.as_uri()}?{query}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS)
        stack.enter_context(closing(db))
        db.execute("PRAGMA trusted_schema=OFF")
        check(real, db)
        yield db
