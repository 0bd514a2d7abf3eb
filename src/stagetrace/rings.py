"""The reader's side of the rings: bounds-checked, tolerant of torn, lost and foreign bytes.

Rings are read with ``pread``, not mapped: of a file that somebody cuts short that is a short read, not a SIGBUS.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import marks
from .marks import Mark, TextMark
from .recorder import HEADER, HEADER_BYTES, MAGIC, PAUSED_AT, REFUSED_AT

SIZE = marks.RECORD_SIZE
MAX_CAPACITY = 1 << 22
_KIND_AT = 56
#: Records looked at in one go.
_CHUNK = 512
#: How far to look for the next whole record when one was given up halfway.
_AHEAD = 16


@dataclass
class Ring:
    """An open ring. ``lost`` counts marks that were overwritten before they were read, or never finished."""

    path: Path
    pid: int
    thread: int
    role: str
    anchor_ns: tuple[int, int]
    capacity: int
    descriptor: int
    expected: int = 1
    lost: int = 0
    _gap: int = 0
    _parts: list[bytes] = field(default_factory=list)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; there is nothing to read any more."""
        if self.descriptor >= 0:
            with suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1

    def refused(self) -> int:
        """How many threads of the writer got no ring, because its process has too many."""
        return int.from_bytes(self._bytes(REFUSED_AT, 8), sys.byteorder)

    def read(self, final: bool = False) -> Iterator[Mark | TextMark]:
        """Yield what has been written since the last call, in order, never a torn record.

        About two rings full at most, or a busy writer would keep its reader here for ever. ``final`` says that the
        writer is gone: what is not whole now never will be.
        """
        for _ in range(2 * self.capacity // _CHUNK + 2 * _AHEAD):
            body = self._take()
            for at in range(0, len(body), SIZE):
                decoded = self._decode(body[at : at + SIZE])
                if decoded is not None:
                    yield decoded
            if not body and not self._step_over(final):
                return

    def _take(self) -> bytes:
        """The next whole records.

        They were whole if both their ends are there in a first look. In a second look they still are, if the writer,
        who goes round in order, has by then not finished the one before the first that overwrites them.
        """
        whole = 0
        for row in marks.RECORD.iter_unpack(self._records(self.expected, min(self.capacity, _CHUNK))):
            if not _ends(row, self.expected + whole):
                break
            whole += 1
        body = self._records(self.expected, whole)
        if len(body) < whole * SIZE or self._head(self.expected - 1) >= self.expected - 1 + self.capacity:
            return b""
        self.expected += whole
        return body

    def _step_over(self, final: bool) -> bool:
        """Step over what was overwritten, or never finished; False when there is simply nothing new."""
        newest = max(self._head(self.expected - 1), self._head(self.expected))
        if newest >= self.expected - 1 + self.capacity:
            # A quarter of the ring as a margin, or the writer would lap us again at once.
            resume = newest + 1 - self.capacity + max(1, self.capacity // 4)
        else:
            resume = self._ahead()
            if not resume:
                return False
            # What is whole here may have been written since we looked for the one before it, or by a signal handler
            # in the middle of that one: it has until the next call.
            if not (final or self._gap == self.expected):
                self._gap = self.expected
                return False
        self.lost += resume - self.expected
        self.expected = resume
        self._parts.clear()
        return True

    def _ahead(self) -> int:
        """The next whole record after one that is not; 0 if there is none yet."""
        after = self.expected + 1
        rows = marks.RECORD.iter_unpack(self._records(after, min(self.capacity - 1, _AHEAD)))
        return next((n for n, row in enumerate(rows, after) if _ends(row, n)), 0)

    def _decode(self, raw: bytes) -> Mark | TextMark | None:
        _, t, key, a, b, c, d, kind, _ = marks.RECORD.unpack(raw)
        if not kind & marks.TEXT_BIT:
            return Mark(t, kind, marks.unsigned(key), a, b, c, d)
        if kind & 0xFF != len(self._parts):
            self._parts.clear()
            if kind & 0xFF:
                return None
        self._parts.append(raw[24:_KIND_AT])
        if kind & marks.TEXT_MORE:
            return None
        # The writer cuts long strings by bytes: the last character may be half there.
        text = b"".join(self._parts).rstrip(b"\0").decode("utf-8", "ignore")
        self._parts.clear()
        return TextMark(t, kind >> 8 & 0xFF, marks.unsigned(key), text)

    def _records(self, first: int, count: int) -> bytes:
        """``count`` records from number ``first`` on, round the end of the file; fewer of a file cut short."""
        slot = first & (self.capacity - 1)
        straight = min(count, self.capacity - slot)
        found = self._bytes(HEADER_BYTES + slot * SIZE, straight * SIZE)
        if straight < count and len(found) == straight * SIZE:
            found += self._bytes(HEADER_BYTES, (count - straight) * SIZE)
        return found[: len(found) // SIZE * SIZE]

    def _head(self, number: int) -> int:
        """The sequence number that lies where record ``number`` has its place; 0 if it is none."""
        slot = number & (self.capacity - 1)
        head = int.from_bytes(self._bytes(HEADER_BYTES + slot * SIZE, 8), sys.byteorder)
        return head if head & (self.capacity - 1) == slot and head < 1 << 62 else 0

    def _bytes(self, at: int, count: int) -> bytes:
        try:
            return os.pread(self.descriptor, count, at)
        except OSError:
            return b""


def _ends(row: tuple[int, ...], number: int) -> bool:
    """Whether record ``number`` has both its ends."""
    return row[0] == number and row[8] == number & 0xFFFFFFFF


def open_ring(path: Path) -> Ring | None:
    """Open a ring for reading; None while it is being made, or when it is not a ring of ours."""
    try:
        # Opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    ring = Ring(path, 0, 0, "", (0, 0), 0, descriptor)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            return None
        head = os.pread(descriptor, HEADER.size, 0)
    except OSError:
        return None
    if len(head) < HEADER.size:
        return None
    magic, size, capacity, ring.pid, ring.thread, mono, wall, role = HEADER.unpack(head)
    power_of_two = 2 <= capacity <= MAX_CAPACITY and capacity & (capacity - 1) == 0
    if magic != MAGIC or size != SIZE or not power_of_two or HEADER_BYTES + capacity * SIZE != info.st_size:
        return None
    ring.role = role.rstrip(b"\0").decode("utf-8", "ignore")
    ring.anchor_ns, ring.capacity = (mono, wall), capacity
    return ring


def set_paused(directory: Path, paused: bool) -> int:
    """Write the pause byte of every ring in ``directory``; return how many there are."""
    count = 0
    for path in directory.glob("ring-*"):
        ring = open_ring(path)
        if ring is None:
            continue
        ring.close()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.pwrite(descriptor, bytes([paused]), PAUSED_AT)
            count += 1
        finally:
            os.close(descriptor)
    return count
