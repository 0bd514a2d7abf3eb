"""What is to be delayed, by how much and for whom: a file that the engine's processes look at before every delay."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

#: Names the control file. Beside it, each process writes down how long its delays really were.
ENV = "STAGETRACE_FAULTS"
GROWTHS = (None, "batch", "position")


@dataclass(frozen=True)
class Fault:
    """A delay of ``delay_ms`` at ``place``, for requests whose ``x-request-id`` contains ``only`` (all, if empty).

    ``grow``: the delay is multiplied by the number of requests in the step's batch (``batch``), or by the number of
    tokens the request has generated so far (``position``).
    """

    place: str
    delay_ms: float
    only: str = ""
    grow: str | None = None
    #: Tells one writing of the file from the next; in the notes of what was delayed.
    number: int = 0


@dataclass(frozen=True)
class Delay:
    """One delay that happened: ``requests`` are the engine's ids, or the client's in the API server."""

    number: int
    place: str
    requests: tuple[str, ...]
    start_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """How long it really was."""
        return (self.end_ns - self.start_ns) / 1e6


def write(path: Path, fault: Fault | None) -> int:
    """Switch to ``fault`` (None: no delay) at once for every process; returns the number its notes will carry."""
    if fault is not None and (fault.grow not in GROWTHS or fault.delay_ms < 0):
        raise ValueError(f"no such delay: {fault}")
    number = time.monotonic_ns()
    document = None if fault is None else {**asdict(fault), "number": number}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document))
    os.replace(part, path)
    return number


def notes(path: Path) -> Iterator[Delay]:
    """Every delay noted so far beside the control file ``path``."""
    for file in sorted(path.parent.glob(f"{path.name}.delays-*")):
        for line in file.read_text().splitlines():
            number, place, start, end, *requests = line.split(" ")
            yield Delay(int(number), place, tuple(requests), int(start), int(end))


class Control:
    """The file as one process sees it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._fault: Fault | None = None
        self._notes: tuple[int, int] | None = None

    def fault(self) -> Fault | None:
        """What holds now. The file is replaced as a whole, so one look at its entry tells whether it is another."""
        try:
            found = os.stat(self._path)
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                document = json.loads(Path(self._path).read_text())
                self._fault = None if document is None else Fault(**document)
                self._stamp = stamp
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            print(f"stagetrace_faults: {self._path}: {error}", file=sys.stderr, flush=True)
            self._fault, self._stamp = None, stamp
        return self._fault

    def delay(self, fault: Fault, requests: list[str], factor: int) -> None:
        """Be busy for that long, and note how long it was: whoever gets no CPU at its end has waited longer.

        Busy, as what makes a stage slow is, and yielding: a process that sleeps finds its caches cold, and that slows
        down what comes after it, which is not the delay that was asked for.
        """
        start = end = time.monotonic_ns()
        until = start + int(fault.delay_ms * factor * 1e6)
        while end < until:
            os.sched_yield()
            end = time.monotonic_ns()
        # The note is in the stage too, and not in what it says: so it is short.
        os.write(self._file(), f"{fault.number} {fault.place} {start} {end} {' '.join(requests)}\n".encode())

    def _file(self) -> int:
        pid = os.getpid()
        if self._notes is None or self._notes[0] != pid:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._notes = pid, os.open(f"{self._path}.delays-{pid}", flags, 0o600)
        return self._notes[1]
