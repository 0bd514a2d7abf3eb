"""What several unit tests need: crafted ring files, small engines to hook, processes with deadlines."""

from __future__ import annotations

import importlib
import itertools
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from stagetrace import marks
from stagetrace.recorder import HEADER, HEADER_BYTES, MAGIC
from stagetrace.rings import Ring, open_ring

#: Long enough for the slowest machine; nothing waits for it unless it fails.
DEADLINE_S = 60.0
_names = itertools.count()


def wait_until(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"still not after {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.01)


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a Python of its own and return what it printed; what it ends with is the test's to check."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**plain_environment(), **environment}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """``process``, which is killed at the end if it still runs."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that ``process`` prints."""
    assert process.stdout
    return process.stdout.readline().strip()


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("STAGETRACE")}


# ---------------------------------------------------------------- rings by hand


def header(capacity: int = 8, magic: bytes = MAGIC, size: int = marks.RECORD_SIZE, pid: int = 0) -> bytes:
    return HEADER.pack(magic, size, capacity, pid or os.getpid(), 1, 2, 3, b"role").ljust(HEADER_BYTES, b"\0")


def record(number: int, payload: int = 0) -> bytes:
    """Record ``number`` as the writer leaves it; ``payload`` is in each of its four numbers."""
    return marks.RECORD.pack(number, number, number, payload, payload, payload, payload, 1, number & 0xFFFFFFFF)


def craft(path: Path, records: Sequence[bytes] = (), capacity: int = 8) -> Path:
    """A ring file whose slots 1, 2, ... hold ``records``; the others are empty."""
    body = bytearray(capacity * marks.RECORD_SIZE)
    for slot, data in enumerate(records, 1):
        at = slot % capacity * marks.RECORD_SIZE
        body[at : at + marks.RECORD_SIZE] = data
    path.write_bytes(header(capacity) + bytes(body))
    return path


def put(path: Path, number: int, data: bytes, capacity: int = 8, at: int = 0) -> None:
    """Write ``data`` where record ``number`` has its place, from its byte ``at`` on."""
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + number % capacity * marks.RECORD_SIZE + at)
        file.write(data)


def opened(path: Path) -> Ring:
    ring = open_ring(path)
    assert ring is not None, f"{path} is a ring and was refused"
    return ring


def rings(directory: Path) -> list[Ring]:
    return [opened(path) for path in sorted(directory.glob("ring-*"))]


def keys(ring: Ring, final: bool = False) -> list[int]:
    """The keys of the marks that can be read now."""
    return [mark.key for mark in ring.read(final)]


def bad_pack(call: Callable[[], object]) -> None:
    try:
        call()
    except struct.error:
        return
    raise AssertionError("a number too large for its field was packed")


# ---------------------------------------------------------------- engines to hook


class Engine:
    """A package made of ``sources`` (module → source) on ``sys.path``, under a name nobody used before."""

    def __init__(self, directory: Path, **sources: str) -> None:
        self.name = f"engine_of_a_test_{next(_names)}"
        self.directory = directory
        package = directory / self.name
        package.mkdir()
        (package / "__init__.py").touch()
        for module, source in sources.items():
            (package / f"{module}.py").write_text(textwrap.dedent(source).replace("PACKAGE", self.name))
        importlib.invalidate_caches()

    def target(self, path: str) -> str:
        """``module:Class.method`` with the package's name in front."""
        return f"{self.name}.{path}"

    def load(self, module: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{module}")
