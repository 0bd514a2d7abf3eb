"""Ring files in, records out: one poll at a time, whoever owns the loop."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

from .. import session
from ..assemble import Assembler
from ..model import RequestRecord, RunRecord, StepRecord
from ..rings import Ring, open_ring

#: How often the records of running requests are renewed in the store, and liveness is looked at.
SNAPSHOT_NS = 1_000_000_000
#: A request must have run this long before it is worth a snapshot.
YOUNG_NS = 500_000_000

log = logging.getLogger("stagetrace")


class Sink(Protocol):
    """Where records go (the store; exporters later). Must not raise for what it can count instead."""

    def run(self, run: RunRecord) -> None: ...
    def requests(self, records: list[RequestRecord]) -> None: ...
    def steps(self, records: list[StepRecord]) -> None: ...
    def flush(self) -> None: ...


class Collector:
    """Reads the session ``directory`` into ``sinks``; :meth:`poll` whenever there is time, :meth:`close` at the end."""

    def __init__(self, directory: Path, sinks: list[Sink]) -> None:
        self.directory = directory
        self.sinks = sinks
        self.assembler = Assembler(self._alive)
        self.rings: dict[str, Ring] = {}
        self.requests = 0
        self.started_unix_ns = time.time_ns()
        self._dead: set[int] = set()
        self._snapshot_at = 0
        self._settings: dict[str, str] = {}
        self._flushed = ""

    def poll(self) -> int:
        """Read what is new; return the number of marks, so that the owner knows how busy it is."""
        self._discover()
        taken = sum(self._read(ring) for ring in list(self.rings.values()))
        self._hand_on(closing=False)
        return taken

    def writers(self) -> set[int]:
        """Processes that have written and still live."""
        return {ring.pid for ring in self.rings.values() if session.alive(ring.pid)}

    def lost(self) -> int:
        """Marks that were overwritten before they could be read, or refused by their writer."""
        return sum(ring.lost + ring.refused() for ring in self.rings.values())

    def close(self) -> None:
        """Read the rings to their end, settle every call, and write it all out."""
        self._discover()
        for ring in self.rings.values():
            self._read(ring)
        self._hand_on(closing=True)
        if self.lost():
            log.warning("stagetrace: %d marks were lost; some stages read not_observable", self.lost())

    def _alive(self, pid: int) -> bool:
        """As of the last look: a process that died may have marks we have not read yet."""
        return pid not in self._dead

    def _discover(self) -> None:
        for path in self.directory.glob("ring-*"):
            if path.name not in self.rings:
                ring = open_ring(path)
                if ring is not None:
                    self.rings[path.name] = ring
                    self.assembler.anchors.setdefault(ring.pid, ring.anchor_ns)

    def _read(self, ring: Ring) -> int:
        count = 0
        for mark in ring.read():
            self.assembler.take(mark, ring.pid)
            count += 1
        return count

    def _hand_on(self, closing: bool) -> None:
        now = time.monotonic_ns()
        snapshot = now - self._snapshot_at > SNAPSHOT_NS
        if snapshot or closing:
            self._snapshot_at = now
            self._bury()
            self.assembler.forget(now)
        steps = self.assembler.steps()
        done = self.assembler.finished(now, closing)
        self.requests += len(done)
        running = self._running(now) if snapshot and not closing else []
        self._run_changed()
        asked = self._flush_asked()
        snapshot = snapshot or asked is not None
        for sink in self.sinks:
            if steps:
                sink.steps(steps)
            if done or running:
                sink.requests([*running, *done])
            if snapshot or closing:
                sink.flush()
        if asked is not None:
            (self.directory / session.FLUSHED).write_text(asked)

    def _flush_asked(self) -> str | None:
        """The stamp of a `flush` request, once every call that had ended by then is written out."""
        try:
            stamp = (self.directory / session.FLUSH).read_text()
        except OSError:
            return None
        waiting = any(r.end and r.end.t <= int(stamp or 0) for r in self.assembler.book.roots.values())
        if not stamp or stamp == self._flushed or waiting:
            return None
        self._flushed = stamp
        return stamp

    def _bury(self) -> None:
        """Note which writers are gone, after reading their rings to the end."""
        for pid in {ring.pid for ring in self.rings.values()} - self._dead:
            if not session.alive(pid):
                for ring in self.rings.values():
                    if ring.pid == pid:
                        self._read(ring)
                self._dead.add(pid)

    def _running(self, now: int) -> list[RequestRecord]:
        old = [r for r in self.assembler.book.roots.values() if r.end is None and now - r.started > YOUNG_NS]
        return [record for root in old for record in self.assembler.records(root, dead=False)]

    def _run_changed(self) -> None:
        settings = self.assembler.book.settings
        if settings == self._settings:
            return
        self._settings = dict(settings)
        config = {key: int(v) if v.lstrip("-").isdigit() else v for key, v in settings.items()}
        engine, version = config.pop("engine", None), config.pop("engine_version", None)
        run = RunRecord(
            session=self.directory.name,
            engine=str(engine) if engine is not None else None,
            engine_version=str(version) if version is not None else None,
            model=str(config.pop("model", "")) or None,
            config=config,
            started_unix_ns=self.started_unix_ns,
        )
        for sink in self.sinks:
            sink.run(run)
