"""Numbers that several processes share, and that outlive whichever of them is killed."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_NUMBER = struct.Struct("=Q")


class Tally:
    """Unsigned 64-bit numbers in the file at ``path``, by name; 0 at first. One process writes a number."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path = path
        self._places = {name: index * _NUMBER.size for index, name in enumerate(names)}
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def __getitem__(self, name: str) -> int:
        return int(_NUMBER.unpack_from(self._map, self._places[name])[0])

    def __setitem__(self, name: str, value: int) -> None:
        _NUMBER.pack_into(self._map, self._places[name], value)
