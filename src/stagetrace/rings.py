"""The reader's side of the rings: bounds-checked, tolerant of torn, lost and foreign bytes."""

from __future__ import annotations

import mmap
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import marks
from .marks import Mark, TextMark
from .recorder import HEADER, HEADER_BYTES, MAGIC, PAUSED_AT, REFUSED_AT

SIZE = marks.RECORD_SIZE
_KIND_AT = 56
MAX_CAPACITY = 1 << 22


@dataclass
class Ring:
    """An open ring. ``lost`` counts marks overwritten before they were read."""

    path: Path
    pid: int
    thread: int
    role: str
    anchor_ns: tuple[int, int]
    capacity: int
    buffer: mmap.mmap
    expected: int = 1
    lost: int = 0
    _parts: list[bytes] = field(default_factory=list)

    def refused(self) -> int:
        """Marks the writer refused because its process had too many threads."""
        return int.from_bytes(self.buffer[REFUSED_AT : REFUSED_AT + 8], sys.byteorder)

    def read(self) -> Iterator[Mark | TextMark]:
        """Yield what has been written since the last call, in order, never a torn record."""
        while True:
            slot = self.expected & (self.capacity - 1)
            low = HEADER_BYTES + slot * SIZE
            high = HEADER_BYTES + min(self.capacity, slot + 4096) * SIZE
            # Three looks: a record is whole if its end was there before, and its head still is after, the copy used.
            before, body, after = self.buffer[low:high], self.buffer[low:high], self.buffer[low:high]
            taken = 0
            for index, row in enumerate(marks.RECORD.iter_unpack(body)):
                if row[0] != self.expected or row[8] != self.expected & 0xFFFFFFFF:
                    break
                if not _whole(before, after, index, row[0]):
                    break
                self.expected += 1
                taken += 1
                decoded = self._decode(row, body[index * SIZE : (index + 1) * SIZE])
                if decoded is not None:
                    yield decoded
            if taken < (high - low) // SIZE and not self._lapped():
                return

    def _lapped(self) -> bool:
        """Step over what the writer has overwritten; False when there is simply nothing new."""
        at = HEADER_BYTES + (self.expected & (self.capacity - 1)) * SIZE
        head = int.from_bytes(self.buffer[at : at + 8], sys.byteorder)
        if head <= self.expected or head > 1 << 62:
            return False
        # A quarter of the ring as a margin, or the writer would lap us again at once.
        resume = head - self.capacity + 1 + self.capacity // 4
        resume = max(resume, self.expected + 1)
        self.lost += resume - self.expected
        self.expected = resume
        self._parts.clear()
        return True

    def _decode(self, row: tuple[int, ...], raw: bytes) -> Mark | TextMark | None:
        kind = row[7]
        if not kind & marks.TEXT_BIT:
            return Mark(row[1], kind, marks.unsigned(row[2]), *row[3:7])
        if kind & 0xFF != len(self._parts):
            self._parts.clear()
            if kind & 0xFF:
                return None
        self._parts.append(raw[24:_KIND_AT])
        if kind & marks.TEXT_MORE:
            return None
        text = b"".join(self._parts).rstrip(b"\0").decode("utf-8", "replace")
        self._parts.clear()
        return TextMark(row[1], kind >> 8 & 0xFF, marks.unsigned(row[2]), text)


def _whole(before: bytes, after: bytes, index: int, sequence: int) -> bool:
    at = index * SIZE
    tail = int.from_bytes(before[at + 60 : at + 64], sys.byteorder)
    head = int.from_bytes(after[at : at + 8], sys.byteorder)
    return tail == sequence & 0xFFFFFFFF and head == sequence


def open_ring(path: Path) -> Ring | None:
    """Open a ring for reading; None while it is being made, or when it is not a ring of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_size < HEADER_BYTES + SIZE:
            return None
        buffer = mmap.mmap(descriptor, info.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    magic, size, capacity, pid, thread, mono, wall, role = HEADER.unpack_from(buffer, 0)
    whole = HEADER_BYTES + capacity * SIZE == info.st_size
    power_of_two = 0 < capacity <= MAX_CAPACITY and capacity & (capacity - 1) == 0
    if magic != MAGIC or size != SIZE or not power_of_two or not whole:
        buffer.close()
        return None
    name = role.rstrip(b"\0").decode("utf-8", "replace")
    return Ring(path, pid, thread, name, (mono, wall), capacity, buffer)


def set_paused(directory: Path, paused: bool) -> int:
    """Write the pause byte of every ring in ``directory``; return how many there are."""
    count = 0
    for path in directory.glob("ring-*"):
        try:
            with open(path, "r+b") as file:
                if file.read(len(MAGIC)) == MAGIC:
                    file.seek(PAUSED_AT)
                    file.write(bytes([paused]))
                    count += 1
        except OSError:
            continue
    return count
