"""Where an engine's time went between two of its updates: the partition that every request in the batch shares."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from ..model import StepRecord
from .book import Book, Span

#: In order of precedence: where two overlap, the first one has the time.
LABELS = ("forward", "lm_head", "sample", "prepare", "update", "schedule", "dispatch")
Split = dict[str, int]
_FORWARD = LABELS.index("forward")
_ENGINE = frozenset((LABELS.index("schedule"), LABELS.index("update")))
_YARDSTICKS = 64


class Periods:
    """Splits of periods, computed once per step. A period goes from the last step's update to the end of its own."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._splits: dict[int, Split] = {}
        #: Forwards of the latest steps without prefill, by engine and step.
        self._plain: dict[int, dict[int, int]] = {}

    def bounds(self, step: StepRecord) -> Span | None:
        """(end of the previous step's update, end of this one's); None while either is unknown."""
        before = self._book.steps.get(step.step - 1)
        if before is None or before.update_ns is None or step.update_ns is None:
            return None
        return before.update_ns[1], step.update_ns[1]

    def split(self, step: StepRecord, window: Span) -> Split:
        """Nanoseconds per label, ``stalled`` and ``other``, of the part of the step's period inside ``window``.

        ``overlapped`` comes with them, and is part of ``forward``: there the engine composed or booked other steps.
        """
        bounds = self.bounds(step)
        if bounds is None:
            return {}
        low, high = max(bounds[0], window[0]), min(bounds[1], window[1])
        if low >= high:
            return {}
        if (low, high) != bounds:
            return self._sweep(step, low, high)
        known = self._splits.get(step.step)
        if known is None:
            known = self._splits[step.step] = self._sweep(step, low, high)
        return known

    def forget(self) -> None:
        """Drop the splits of steps the book has dropped."""
        for number in [n for n in self._splits if n not in self._book.steps]:
            del self._splits[number]

    def note(self, step: StepRecord) -> None:
        """Take up a step that is new or has changed; one without prefill is the yardstick for those with it."""
        for number in (step.step - 1, step.step, step.step + 1):
            self._splits.pop(number, None)
        if not step.prefill_tokens and step.forward_ns:
            costs = self._plain.setdefault(step.engine, {})
            costs[step.step] = step.forward_ns[1] - step.forward_ns[0]
            if len(costs) > _YARDSTICKS:
                del costs[next(iter(costs))]

    def _sweep(self, step: StepRecord, low: int, high: int) -> Split:
        spans: list[tuple[int, int, int]] = []
        for number in (step.step - 1, step.step, step.step + 1):
            near = self._book.steps.get(number)
            if near is not None:
                found = _intervals(near, self._composed_after(near))
                spans += [(max(a, low), min(b, high), rank) for rank, a, b in found if a < high and b > low]
        out = dict.fromkeys(LABELS, 0)
        covered = overlapped = 0
        cuts = sorted({edge for a, b, _ in spans for edge in (a, b)})
        for left, right in pairwise(cuts):
            ranks = [r for a, b, r in spans if a <= left and b >= right]
            if ranks:
                out[LABELS[min(ranks)]] += right - left
                covered += right - left
                if _FORWARD in ranks and not _ENGINE.isdisjoint(ranks):
                    overlapped += right - left
        out.update(other=high - low - covered, stalled=0, overlapped=overlapped)
        if step.prefill_tokens and out["forward"]:
            out["stalled"] = self._stalled(step, out["forward"])
            out["forward"] -= out["stalled"]
        return out

    def _composed_after(self, step: StepRecord) -> int | None:
        """When the engine next composed a step after this one's update; some were composed before it."""
        if step.update_ns is None:
            return None
        later = (self._book.steps.get(step.step + ahead) for ahead in (1, 2))
        return next((s.schedule_ns[0] for s in later if s and s.schedule_ns[0] >= step.update_ns[1]), None)

    def _stalled(self, step: StepRecord, forward: int) -> int:
        """What of a mixed step's forward is due to prefill: beyond the usual decode step, else by tokens."""
        usual = self._plain.get(step.engine)
        if usual:
            return max(0, forward - int(median(usual.values())))
        return forward * step.prefill_tokens // max(step.tokens, 1)


def _intervals(step: StepRecord, composing: int | None) -> list[tuple[int, int, int]]:
    """(rank in LABELS, start, end) of everything known about one step, up to where another one is composed."""
    found: list[tuple[str, int, int]] = [("schedule", *step.schedule_ns)]
    if step.update_ns:
        found.append(("update", *step.update_ns))
        if composing:
            # Handing results on and taking new requests in is the engine's bookkeeping too.
            found.append(("update", step.update_ns[1], composing))
    if step.execute_ns:
        found.append(("dispatch", step.schedule_ns[1], step.execute_ns[0]))
        back = (step.sample_call_ns or step.execute_ns)[1]
        if step.update_ns:
            found.append(("dispatch", back, step.update_ns[0]))
        found += _worker(step, step.execute_ns)
    return [(LABELS.index(label), a, b) for label, a, b in found if b > a]


def _worker(step: StepRecord, execute: Span) -> list[tuple[str, int, int]]:
    """What the worker computes, what it does to get ready, and the hand-overs in between."""
    found: list[tuple[str, int, int]] = []
    if step.forward_ns:
        found += [("prepare", execute[0], step.forward_ns[0]), ("forward", *step.forward_ns)]
        found.append(("dispatch", step.forward_ns[1], execute[1]))
    if step.lm_head_ns:
        found.append(("lm_head", *step.lm_head_ns))
    if step.sample_ns:
        found.append(("sample", *step.sample_ns))
    if step.sample_call_ns:
        found.append(("dispatch", execute[1], step.sample_call_ns[0]))
        if step.sample_ns:
            found.append(("prepare", step.sample_call_ns[0], step.sample_ns[0]))
            found.append(("dispatch", step.sample_ns[1], step.sample_call_ns[1]))
    return found
