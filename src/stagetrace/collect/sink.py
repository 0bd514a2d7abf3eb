"""The store as a sink: what goes wrong with it is said once and counted, never raised."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..model import GpuSample, RequestRecord, RunRecord, StepRecord
from ..store import StoreError, StoreWriter


def say(line: str) -> None:
    """One line on stderr, named as ours. Nobody reading it must not cost the server its exit code."""
    if sys.stderr is not None:  # else descriptor 2 may be any file
        with suppress(OSError):
            os.write(2, f"stagetrace: {line}\n".encode("utf-8", "replace"))


class StoreSink:
    """Hands records to a :class:`StoreWriter`; ``say`` prints one line to the person at the terminal."""

    def __init__(self, writer: StoreWriter, say: Callable[[str], None]) -> None:
        self.writer = writer
        self.file = str(writer.path)
        self._say = say
        self._ended: str | None = None

    @property
    def fault(self) -> str | None:
        """Why nothing is stored, in one line; None where it is."""
        return self._ended or self.writer.obstacle

    def run(self, run: RunRecord) -> None:
        """Store the engine's settings."""
        self._do(lambda: self.writer.write_run(run))

    def requests(self, records: list[RequestRecord]) -> None:
        """Store finished requests and snapshots of running ones."""
        self._do(lambda: self.writer.write_requests(records))

    def steps(self, records: list[StepRecord]) -> None:
        """Store engine steps."""
        self._do(lambda: self.writer.write_steps(records))

    def gpu(self, samples: list[GpuSample]) -> None:
        """Store what cards said."""
        self._do(lambda: self.writer.write_gpu(samples))

    def flush(self) -> None:
        """Commit, and pass on what the store has to say."""
        self._do(self.writer.commit)
        for line in self.writer.notices():
            self._say(line)

    def close(self) -> None:
        """Commit and let go of the file."""
        self.flush()
        self._do(self.writer.close)
        if self.writer.lost_requests:
            self._say(f"{self.writer.lost_requests} requests could not be stored")

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except StoreError as error:
            self._ended = str(error)
            self._say(f"{error}; serving goes on, storing has ended")


@dataclass
class NoStore:
    """In the place of a store that could not be opened: keeps nothing, and can say why."""

    file: str
    fault: str

    def run(self, run: RunRecord) -> None: ...
    def requests(self, records: list[RequestRecord]) -> None: ...
    def steps(self, records: list[StepRecord]) -> None: ...
    def gpu(self, samples: list[GpuSample]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
