"""The hot path: marks go into a ring of shared memory, one ring per thread that writes.

No lock, no system call, nothing kept. The oldest mark is overwritten when the ring is full; the reader sees the gap
in the sequence numbers and counts it. Everything else (names, wall time, spans) is somebody else's work, elsewhere.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from . import marks, session
from .clock import anchor, now

MAGIC = b"stgtrc01"
#: magic, record size, capacity, pid, thread, anchor (monotonic, unix), role
HEADER = struct.Struct("@8sIIQQqq32s")
HEADER_BYTES = 4096
PAUSED_AT = 128
REFUSED_AT = 136
CAPACITY = 1 << 15
#: Threads of one process that may have a ring at once; further ones are refused and counted.
MAX_RINGS = 32

log = logging.getLogger("stagetrace")
_pack = marks.RECORD.pack_into


class Ring:
    """One thread's ring file. ``buffer`` is the mapping; ``count`` hands out sequence numbers from 1."""

    def __init__(self, path: Path, capacity: int, role: str) -> None:
        self.path = path
        self.capacity = capacity
        self.mask = capacity - 1
        self.count = itertools.count(1)
        head = HEADER.pack(
            MAGIC, marks.RECORD_SIZE, capacity, os.getpid(), threading.get_native_id(), *anchor(),
            role.encode("utf-8", "replace")[:32],
        )  # fmt: skip
        size = HEADER_BYTES + capacity * marks.RECORD_SIZE
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            # Without the pages really being there, a full tmpfs would be a SIGBUS in the engine.
            os.posix_fallocate(descriptor, 0, size)
            self.buffer = mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            for page in range(0, size, mmap.PAGESIZE):
                self.buffer[page] = 0
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        # The magic goes last: a reader that sees it sees a complete header.
        self.buffer[8 : len(head)] = head[8:]
        self.buffer[:8] = head[:8]


class _Lease:
    """A thread's hold on its ring. It lies in the thread's local storage, and so ends with the thread.

    ``Thread.is_alive`` would not do: threads that the engine's C++ made stay "alive" for ever.
    """

    def __init__(self, ring: Ring, free: list[Ring]) -> None:
        self._ring = ring
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._ring)


class _Local(threading.local):
    ring: Ring | None
    lease: _Lease


class Recorder:
    """Writes marks of this process into the session's directory; does nothing when there is none.

    Errors never reach the caller's business: a full or missing tmpfs means no recording, said once.
    """

    def __init__(self, directory: Path | None, capacity: int = CAPACITY) -> None:
        self.directory = directory
        self.capacity = capacity
        #: Called once per process, when its first ring is there.
        self.on_first_ring: Callable[[], None] | None = None
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def attach(self, directory: Path | None) -> None:
        """Write into ``directory`` from now on (or nowhere)."""
        self.directory = directory
        self._forget()

    @property
    def recording(self) -> bool:
        """Whether this process has a ring already."""
        return self._made > 0

    def _forget(self) -> None:
        """Start afresh: at birth, and in a forked child, which must not write into its parent's rings."""
        self._local = _Local()
        # Re-entrant: a signal handler may run engine code, and so hooks, while its thread gets its ring.
        self._lock = threading.RLock()
        self._made = 0
        self._first: Ring | None = None
        self._free: list[Ring] = []
        self._broken = False
        self._greeted = False

    def mark(self, kind: int, key: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, t: int = 0) -> None:
        """Write one mark; ``t`` is now unless given."""
        try:
            ring = self._local.ring
        except AttributeError:
            ring = self._open()
        if ring is None:
            return
        n = next(ring.count)
        _pack(
            ring.buffer,
            HEADER_BYTES + (n & ring.mask) * 64,
            n, t or now(), key, a, b, c, d, kind, n & 0xFFFFFFFF,
        )  # fmt: skip

    def text(self, field: int, key: int, text: str) -> None:
        """Write a string in chained records: at most 512 bytes of it."""
        data = text.encode("utf-8", "replace")[: marks.TEXT_BYTES * marks.TEXT_RECORDS]
        chunks = [data[i : i + marks.TEXT_BYTES] for i in range(0, len(data), marks.TEXT_BYTES)] or [b""]
        try:
            ring = self._local.ring
        except AttributeError:
            ring = self._open()
        if ring is None:
            return
        for index, chunk in enumerate(chunks):
            more = marks.TEXT_MORE if index + 1 < len(chunks) else 0
            kind = marks.TEXT_BIT | more | field << 8 | index
            n = next(ring.count)
            at = HEADER_BYTES + (n & (ring.capacity - 1)) * marks.RECORD_SIZE
            marks.TEXT.pack_into(ring.buffer, at, n, now(), key, chunk, kind, n & 0xFFFFFFFF)

    def paused(self) -> bool:
        """Whether `stagetrace pause` has silenced this thread's ring (one byte in its header)."""
        try:
            ring = self._local.ring
        except AttributeError:
            ring = self._open()
        return ring is None or ring.buffer[PAUSED_AT] != 0

    def _open(self) -> Ring | None:
        """Give the calling thread a ring: a new one, or one whose thread has ended."""
        ring = None
        if self.directory is not None and not self._broken:
            with self._lock:
                ring = self._free.pop() if self._free else self._make(self.directory)
        self._local.ring = ring
        if ring is not None:
            self._local.lease = _Lease(ring, self._free)
            if not self._greeted:
                self._greeted = True
                if self.on_first_ring:
                    self.on_first_ring()
        return ring

    def _make(self, directory: Path) -> Ring | None:
        if self._made >= MAX_RINGS:
            self._refuse()
            return None
        # The clock keeps the name unique when the system hands out a process id again.
        path = directory / f"ring-{os.getpid()}-{self._made}-{now():x}"
        try:
            session.check(directory)
            ring = Ring(path, self.capacity, threading.current_thread().name)
            # After the ring can be seen, or `stagetrace pause` could miss it in between; again if it moved meanwhile.
            while ring.buffer[PAUSED_AT] != (paused := (directory / session.PAUSED).exists()):
                ring.buffer[PAUSED_AT] = paused
        except (OSError, ValueError, MemoryError, session.SessionError) as error:
            self._broken = True
            log.warning("stagetrace: no recording in pid %d (%s: %s); serving goes on", os.getpid(), directory, error)
            return None
        self._made += 1
        self._first = self._first or ring
        return ring

    def _refuse(self) -> None:
        """Count a thread that gets no ring, where the reader finds it."""
        assert self._first is not None
        place = slice(REFUSED_AT, REFUSED_AT + 8)
        count = int.from_bytes(self._first.buffer[place], sys.byteorder) + 1
        self._first.buffer[place] = count.to_bytes(8, sys.byteorder)
