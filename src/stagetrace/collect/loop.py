"""Ring files in, records out: one poll at a time, whoever owns the loop."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .. import session
from ..assemble import Assembler
from ..assemble.floors import config_of
from ..exporting import Health, Sink
from ..floor.engine import ENV as GPU_ENV
from ..gpu.watch import Watch
from ..model import GpuSample, RequestRecord, RunRecord
from ..rings import Ring, open_ring
from .sink import NoStore, StoreSink

#: How often the records of running requests are renewed in the store, and liveness is looked at.
SNAPSHOT_NS = 1_000_000_000
#: A request must have run this long before it is worth a snapshot.
YOUNG_NS = 500_000_000

_NUMBER = re.compile("-?[0-9]{1,18}")
log = logging.getLogger("stagetrace")


class Collector:
    """Reads the session ``directory`` into ``sinks``; :meth:`poll` whenever there is time, :meth:`close` at the end."""

    def __init__(
        self, directory: Path, sinks: list[Sink], health: Health | None = None, gpu: Watch | None = None
    ) -> None:
        self.directory = directory
        self.sinks = sinks
        self.health = health or Health()
        #: None where this is no process of its own: engines' processes ask no driver.
        self.gpu = gpu
        self.assembler = Assembler(self._alive, os.environ.get(GPU_ENV))
        self.rings: dict[str, Ring] = {}
        self.requests = 0
        #: The store among the sinks, if there is one: it knows whether what it was given is kept.
        self.store = next((sink for sink in sinks if isinstance(sink, StoreSink | NoStore)), None)
        self.started_unix_ns = time.time_ns()
        self._dead: set[int] = set()
        #: What rings that are gone by now had lost or refused.
        self._lost = self._refused = 0
        self._snapshot_at = 0
        self._settings: dict[str, str] | None = None
        self._flushed = ""
        #: What was left in the session's files, by name.
        self._told = {session.HOOKS: "{}"}
        shares = [share for sink in sinks if (share := getattr(sink, "traces", None)) is not None]
        if shares:
            with suppress(OSError):  # full: the engine's own spans then stay the caller's children
                session.write(directory / session.TRACES, str(max(shares)))
        self._tell_store()

    def poll(self) -> int:
        """Read what is new; return the number of marks, so that the owner knows how busy it is."""
        # Before the rings: what was written ahead of it must be read ahead of the answer.
        asked = self._flush_asked()
        self._discover()
        taken = sum(self._read(ring) for ring in list(self.rings.values()))
        self._hand_on(closing=False, asked=asked, samples=self._sample(hurry=bool(asked)))
        return taken

    def writers(self) -> set[int]:
        """Processes that have a ring, or are just making one, and still live."""
        return set(session.writers(self.directory))

    def lost(self) -> int:
        """Marks that were overwritten before they could be read."""
        return self._lost + sum(ring.lost for ring in self.rings.values())

    def refused(self) -> int:
        """Threads that got no ring because their process had too many."""
        return self._refused + sum(ring.refused() for ring in self.rings.values())

    def close(self) -> None:
        """Read the rings to their end, settle every call, and write it all out; what still runs, as it is."""
        self._discover()
        for ring in self.rings.values():
            self._read(ring, final=True)
        self._hand_on(closing=True, samples=self.gpu.close() if self.gpu else [])
        for name in list(self.rings):
            self._put_away(name)
        if self._lost or self._refused:
            what = f"{self._lost} marks were lost, {self._refused} threads were not recorded"
            log.warning("stagetrace: %s; some stages read not_observable", what)

    def _alive(self, pid: int) -> bool:
        """As of the last look: a process that died may have marks we have not read yet."""
        return pid not in self._dead

    def _discover(self) -> None:
        for path in self.directory.glob("ring-*"):
            if path.name not in self.rings:
                ring = open_ring(path)
                if ring is not None:
                    self.rings[path.name] = ring
                    if ring.pid in self._dead:  # a late ring, or the process id was given out again
                        self._dead.discard(ring.pid)
                        self.assembler.anchors.pop(ring.pid, None)
                    self.assembler.anchors.setdefault(ring.pid, ring.anchor_ns)

    def _read(self, ring: Ring, final: bool = False) -> int:
        count = 0
        for mark in ring.read(final):
            self.assembler.take(mark, ring.pid)
            count += 1
        return count

    def owes(self, stamp_ns: int) -> bool:
        """Whether a call that had ended by then is still to be written out."""
        return any(root.end and root.end.t <= stamp_ns for root in self.assembler.book.roots.values())

    def _sample(self, hurry: bool) -> list[GpuSample]:
        """What the cards have said meanwhile."""
        if self.gpu is None:
            return []
        try:
            samples = self.gpu.poll(self.assembler.book)
        except Exception as error:  # a fault of ours must cost no more than the counters
            log.warning("stagetrace: GPU counters have ended (%s: %s)", type(error).__name__, error)
            self.gpu = self.assembler.gpu = None
            return []
        self.assembler.gpu = self.gpu.join
        if hurry:
            self.gpu.hurry()
        return samples

    def _hand_on(self, closing: bool, asked: str = "", samples: Sequence[GpuSample] = ()) -> None:
        now = time.monotonic_ns()
        snapshot = now - self._snapshot_at > SNAPSHOT_NS
        if snapshot or closing:
            self._snapshot_at = now
            self._bury()
            self._tell(session.HOOKS, self.assembler.book.hooks)
            if self.gpu:
                self._tell(session.GPU, self.gpu.state())
            self.assembler.forget(now)
            self._take_stock()
        steps = self.assembler.steps()
        done = self.assembler.finished(now, closing)
        self.requests += sum(record.sequence == 0 for record in done)  # the first of each request's answers
        running = self._running(now) if snapshot and not closing else []
        self._run_changed(bool(steps or done or running or samples))
        wanted = asked and not self.owes(int(asked))
        for sink in self.sinks:
            if steps:
                sink.steps(steps)
            if samples:
                sink.gpu(list(samples))
            if done or running:
                sink.requests([*running, *done])
            if snapshot or closing or wanted:
                sink.flush()
        self._tell_store()
        # What was to be kept and is not: a `flush` must not be told that it is.
        if wanted and not (self.store and self.store.fault):
            self._flushed = asked
            with suppress(OSError):  # a full tmpfs: who asked will not wait for ever
                session.write(self.directory / session.FLUSHED, asked)

    def _tell_store(self) -> None:
        if self.store:
            self._tell(session.STORE, {"file": self.store.file, "fault": self.store.fault})

    def _tell(self, name: str, what: object) -> None:
        """Leave in the session's file ``name`` what `doctor` and `status` want to know."""
        told = json.dumps(what)
        if told != self._told.get(name):
            self._told[name] = told
            with suppress(OSError):
                session.write(self.directory / name, told)

    def _flush_asked(self) -> str:
        """The stamp of a `flush` request that has not been answered yet; empty if there is none."""
        try:
            stamp = (self.directory / session.FLUSH).read_text()
        except OSError:
            return ""
        return stamp if stamp.isdecimal() and stamp != self._flushed else ""

    def _bury(self) -> None:
        """Note which writers are gone, after reading their rings to the end; those take up memory no longer."""
        for pid in {ring.pid for ring in self.rings.values()}:
            if session.alive(pid):
                continue
            for name, ring in list(self.rings.items()):
                if ring.pid == pid:
                    self._read(ring, final=True)
                    self._put_away(name)
                    with suppress(OSError):
                        ring.path.unlink()
            self._dead.add(pid)

    def _take_stock(self) -> None:
        """Bring up to date what exporters say of ourselves."""
        self.health.marks_dropped = self.lost()
        fates = [fate for hooks in self.assembler.book.hooks.values() for fate in hooks.items()]
        failing = Counter(hook for hook, state in fates if state.startswith(("failing", "removed")))
        self.health.hook_errors.update(failing - self.health.hook_errors)

    def _put_away(self, name: str) -> None:
        ring = self.rings.pop(name)
        self._lost += ring.lost
        self._refused += ring.refused()
        ring.close()

    def _running(self, now: int) -> list[RequestRecord]:
        old = [r for r in self.assembler.book.roots.values() if r.end is None and now - r.started > YOUNG_NS]
        return [record for root in old for record in self.assembler.running(root)]

    def _run_changed(self, needed: bool) -> None:
        """Say whose records these are: anew when more is known, and at all before the first of them.

        An engine that dies while it starts, or lives elsewhere, never tells its settings.
        """
        settings = self.assembler.book.settings
        if self.gpu and "gpu" not in settings and (names := self.gpu.names()):
            settings = {**settings, "gpu": ", ".join(sorted(set(names.values())))}
        if settings == self._settings or not (settings or needed):
            return
        self._settings = dict(settings)
        config = {key: int(v) if _NUMBER.fullmatch(v) else v for key, v in config_of(settings).items()}
        config |= self.assembler.floors.facts()
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
