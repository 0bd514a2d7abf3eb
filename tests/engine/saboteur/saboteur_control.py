"""What a test tells the processes of a running server to go wrong with: a few bytes that all of them have mapped."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from zlib import crc32

#: Rises with every change, so that processes notice; the hook (by checksum of its name), which of its functions raises,
#: what of the engine's own raises, and how far the wall clock is off, in ns.
_LAYOUT = struct.Struct("<IIBBxxq")
#: Functions of a hook.
ENTER, LEAVE, FAIL = 1, 2, 3
#: What the engine does wrong by itself: its model raises, or is slow, or the decoding of a new request raises.
MODEL, SLOW, ARRIVAL = 1, 2, 3
#: How much longer each forward of a slow model takes.
SLOW_S = 0.03


class Control:
    """One mapping of the file; every process has its own."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.exists():
            self.path.write_bytes(bytes(_LAYOUT.size))
        with self.path.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _LAYOUT.size)

    @property
    def epoch(self) -> int:
        return int(_LAYOUT.unpack_from(self._map)[0])

    @property
    def clock_ns(self) -> int:
        return int(_LAYOUT.unpack_from(self._map)[4])

    @property
    def engine(self) -> int:
        return int(_LAYOUT.unpack_from(self._map)[3])

    def hits(self, hook: int, part: int) -> bool:
        """Whether this function of this hook is to raise."""
        found = _LAYOUT.unpack_from(self._map)
        return (found[1], found[2]) == (hook, part)

    def order(self, hook: str = "", part: int = 0, engine: int = 0, clock_ns: int = 0) -> None:
        """Go wrong in this way from now on, and in no other; called without anything, in none."""
        self._map[:] = _LAYOUT.pack(self.epoch + 1, number(hook) if hook else 0, part, engine, clock_ns)


def number(hook: str) -> int:
    """A hook's name in four bytes."""
    return crc32(hook.encode())
