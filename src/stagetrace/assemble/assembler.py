"""Decides when a call is complete and hands its records on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import marks
from ..marks import Mark, TextMark
from ..model import RequestRecord, StepRecord
from .book import Book, Root, Sequence
from .case import CUT_SHORT, Case, own
from .floors import Floors
from .identity import name_of
from .periods import Periods
from .record import record

if TYPE_CHECKING:
    from ..gpu.join import Join

#: A call that has returned waits this long for the engine's last marks (a stop string frees the request later).
GRACE_NS = 1_500_000_000
#: Marks of different processes are read one after the other: let every ring be read once more.
SETTLE_NS = 150_000_000
#: A call that nothing has been heard of for this long, though the engine is not working for it, has lost its end.
LOST_NS = 600_000_000_000
#: Steps and output batches are kept this long even when no call refers to them yet.
KEEP_NS = 30_000_000_000
#: How long a call that is complete waits for the cards' samples to reach its end.
SAMPLE_NS = 2_000_000_000


class Assembler:
    """Feed it marks; ask it for what is finished. ``alive`` says whether a process can still write.

    ``against`` names the device that stages are held against, where it is not to be the one a worker reports.
    """

    def __init__(self, alive: Callable[[int], bool], against: str | None = None) -> None:
        self.book = Book()
        self.floors = Floors(self.book, against)
        self.periods = Periods(self.book)
        #: (monotonic, unix) of each process, for wall time.
        self.anchors: dict[int, tuple[int, int]] = {}
        #: Adds the cards' counters to records; None where no card is sampled.
        self.gpu: Join | None = None
        self._alive = alive

    def take(self, mark: Mark | TextMark, pid: int) -> None:
        """Note a mark of process ``pid``."""
        self.book.take(mark, pid)

    def steps(self) -> list[StepRecord]:
        """Steps that are complete, or have become more complete, since the last call."""
        fresh = [self.book.steps[n] for n in dict.fromkeys(self.book.fresh_steps) if n in self.book.steps]
        self.book.fresh_steps.clear()
        for step in fresh:
            self.periods.note(step)
        return fresh

    def finished(self, now: int, closing: bool = False) -> list[RequestRecord]:
        """Records of every call that is complete (all of them when ``closing``), which are then forgotten.

        A call that outlives the recording, since its process lives on, is in flight.
        """
        done: list[RequestRecord] = []
        for root in list(self.book.roots.values()):
            gone = not self._alive(root.pid) or self._lost(root, now)
            if closing or self._settled(root, now, gone):
                done += self.records(root, dead=gone, over=True)
                self.book.forget(root, name_of(root))
        return done

    def forget(self, now: int) -> None:
        """Drop steps and batches that no live call can refer to; for now and then, it looks at all of them."""
        oldest = min((root.started for root in self.book.roots.values()), default=now)
        self.book.forget_before(min(oldest, now - KEEP_NS))
        self.periods.forget()
        if self.gpu:
            self.gpu.forget(min(oldest, now - KEEP_NS))

    def in_flight(self) -> list[RequestRecord]:
        """Records of the calls that are still running, as far as they have come."""
        return [made for root in self.book.roots.values() for made in self.running(root)]

    def running(self, root: Root) -> list[RequestRecord]:
        """Records of a call that still runs: however its engine has ended, it has no end before its own."""
        found = self.records(root, dead=False)
        for each in found if root.end is None else ():
            each.status, each.error_type = "in_flight", None
        return found

    def records(self, root: Root, dead: bool, over: bool = False) -> list[RequestRecord]:
        """One record per sequence of ``root``; one for the call itself if it never became a sequence.

        Only what is ``over`` has the cards' counters: to look at them again and again for everybody would take long.
        """
        cases = [Case.of(self.book, self.periods, root, sequence, dead) for sequence in root.sequences or (None,)]
        anchor = self.anchors.get(root.pid, (0, 0))
        made = [record(case, anchor, self._alive, self.floors) for case in cases]
        if self.gpu and over:
            for each, case in zip(made, cases, strict=True):
                self.gpu.put(each, root.started, case.sequence)
        return made

    def _settled(self, root: Root, now: int, gone: bool) -> bool:
        if self._carries_on(root, now):
            root.direct, root.end = True, None
        if root.direct and root.end is None:
            self._end_direct(root, now)
            gone = gone or (root.end is None and any(self._engine_died(s) for s in root.sequences))
        if root.end is None and not gone:
            return False
        if root.settled is None:
            late = root.end is not None and now - root.end.t > GRACE_NS
            if gone or late or all(s.free is not None or self._engine_died(s) for s in root.sequences):
                root.settled = now
            return False
        return now - root.settled > SETTLE_NS and (now - root.settled > SAMPLE_NS or self._sampled(root))

    def _sampled(self, root: Root) -> bool:
        """Whether what the cards did for a call is known up to its end."""
        ends = [m.t for m in (root.end, *(s.free for s in root.sequences)) if m is not None]
        return self.gpu is None or self.gpu.reached(max(ends, default=0))

    def _carries_on(self, root: Root, now: int) -> bool:
        """Whether the call was answered before the engine was done with it: from then on it is nobody's HTTP call.

        Responses in the background are made so.
        """
        end = root.end
        if (
            end is None
            or end.a
            or root.background is None
            or root.disconnect is not None
            or (root.status and root.status.a >= 400)
        ):
            return False
        left = [s for s in root.sequences if s.stopped is None and s.aborted is None and not self._engine_died(s)]
        if now - end.t > GRACE_NS and any(_in_engine(s) for s in left):
            return True
        return any(s.free is not None and s.free.a not in CUT_SHORT and s.free.t > end.t for s in left)

    def _engine_died(self, sequence: Sequence) -> bool:
        return sequence.free is None and sequence.engine_pid is not None and not self._alive(sequence.engine_pid)

    def _lost(self, root: Root, now: int) -> bool:
        """Whether its last marks were overwritten before they could be read: else it would be kept for ever."""
        if root.end is not None or any(_in_engine(s) for s in root.sequences):
            return False
        return now - max(root.heard, *(s.heard for s in root.sequences), 0) > LOST_NS

    def _end_direct(self, root: Root, now: int) -> None:
        """The caller's own code holds the request: it ends when the front end has processed its last output."""
        ends = [self._last_output(root, own(sequence), now) for sequence in root.sequences]
        known = [end for end in ends if end is not None]
        if known and len(known) == len(ends):
            root.end = Mark(max(known), marks.END, root.number, 0, 0, 0, 0)

    def _last_output(self, root: Root, sequence: Sequence, now: int) -> int | None:
        """When the caller had the last of it, or had given it up; None while that is open."""
        free = sequence.free
        if free is None:  # the engine may never have had it, or be gone
            given_up = sequence.aborted
            return given_up if given_up is not None and now - given_up > GRACE_NS else None
        silent = free.b < 0 and not free.a  # it came in pieces, and the caller has closed it: no output says so
        if sequence.stopped is not None or free.a in CUT_SHORT or silent:
            return sequence.stopped or free.t
        batches = self.book.outputs.get(root.pid)
        processed = batches.after(free.t) if batches else None
        # That mark may not be read yet.
        return processed if processed is not None or now - free.t < GRACE_NS else free.t


def _in_engine(sequence: Sequence) -> bool:
    """Whether the engine works for it, or it waits there: then it may well be silent."""
    left = sequence.joins and sequence.leaves and sequence.leaves[-1] > sequence.joins[-1][0]
    return sequence.enqueued is not None and sequence.free is None and not left
