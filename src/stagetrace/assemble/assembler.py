"""Decides when a call is complete and hands its records on."""

from __future__ import annotations

from collections.abc import Callable

from .. import marks
from ..marks import Mark, TextMark
from ..model import RequestRecord, StepRecord
from .book import Book, Root
from .periods import Periods
from .record import record
from .stopwatch import Case

#: A call that has returned waits this long for the engine's last marks (a stop string frees the request later).
GRACE_NS = 1_500_000_000
#: Marks of different processes are read one after the other: let every ring be read once more.
SETTLE_NS = 150_000_000
#: Steps and output batches are kept this long even when no call refers to them yet.
KEEP_NS = 30_000_000_000


class Assembler:
    """Feed it marks; ask it for what is finished. ``alive`` says whether a process can still write."""

    def __init__(self, alive: Callable[[int], bool]) -> None:
        self.book = Book()
        self.periods = Periods(self.book)
        #: (monotonic, unix) of each process, for wall time.
        self.anchors: dict[int, tuple[int, int]] = {}
        self._alive = alive

    def take(self, mark: Mark | TextMark, pid: int) -> None:
        """Note a mark of process ``pid``."""
        self.book.take(mark, pid)

    def steps(self) -> list[StepRecord]:
        """Steps whose update has come in since the last call."""
        fresh = [self.book.steps[n] for n in self.book.fresh_steps if n in self.book.steps]
        self.book.fresh_steps.clear()
        for step in fresh:
            self.periods.note(step)
        return fresh

    def finished(self, now: int, closing: bool = False) -> list[RequestRecord]:
        """Records of every call that is complete (all of them when ``closing``), which are then forgotten."""
        done: list[RequestRecord] = []
        for root in list(self.book.roots.values()):
            gone = not self._alive(root.pid)
            if closing or self._settled(root, now, gone):
                done += self.records(root, dead=gone or closing)
                self.book.forget(root)
        return done

    def forget(self, now: int) -> None:
        """Drop steps and batches that no live call can refer to; for now and then, it looks at all of them."""
        oldest = min((root.started for root in self.book.roots.values()), default=now)
        self.book.forget_before(min(oldest, now - KEEP_NS))
        self.periods.forget()

    def in_flight(self) -> list[RequestRecord]:
        """Records of the calls that are still running, as far as they have come."""
        return [made for root in self.book.roots.values() for made in self.records(root, dead=False)]

    def records(self, root: Root, dead: bool) -> list[RequestRecord]:
        """One record per sequence of ``root``; one for the call itself if it never became a sequence."""
        known = [self.book.sequences.get(number) for number in root.sequences]
        cases = [Case.of(self.book, self.periods, root, s) for s in known if s is not None]
        anchor = self.anchors.get(root.pid, (0, 0))
        return [
            record(case, anchor, dead, self._alive)
            for case in cases or [Case.of(self.book, self.periods, root, None)]
        ]

    def _settled(self, root: Root, now: int, gone: bool) -> bool:
        if root.direct and root.end is None:
            self._end_direct(root)
        if root.end is None and not gone:
            return False
        if root.settled is None:
            late = root.end is not None and now - root.end.t > GRACE_NS
            if gone or late or all(self._ended(number) for number in root.sequences):
                root.settled = now
            return False
        return now - root.settled > SETTLE_NS

    def _ended(self, number: int) -> bool:
        sequence = self.book.sequences.get(number)
        if sequence is None or sequence.free is not None:
            return True
        return sequence.engine_pid is not None and not self._alive(sequence.engine_pid)

    def _end_direct(self, root: Root) -> None:
        """The caller's own code holds the request: it ends when the front end has processed its last output."""
        last = 0
        for number in root.sequences:
            sequence = self.book.sequences.get(number)
            if sequence is None or sequence.free is None:
                return
            ended = sequence.free.t
            batches = self.book.outputs.get(root.pid)
            processed = batches.after(ended) if batches and not sequence.aborted else None
            last = max(last, sequence.stopped or processed or ended)
        if last:
            root.end = Mark(last, marks.END, root.number, 0, 0, 0, 0)
