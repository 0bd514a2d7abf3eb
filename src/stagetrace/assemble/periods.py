"""Where an engine's time went between two of its updates: the partition that every request in the batch shares."""

from __future__ import annotations

from collections import deque
from statistics import median

from ..model import StepRecord
from .book import Book, Span

#: In order of precedence: where two overlap, the first one has the time.
LABELS = ("forward", "lm_head", "sample", "prepare", "update", "schedule", "dispatch")
Split = dict[str, int]


class Periods:
    """Splits of periods, computed once per step. A period ends with its step's update and starts with the last one's."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._splits: dict[int, Split] = {}
        self._plain: dict[int, deque[int]] = {}

    def bounds(self, step: StepRecord) -> Span | None:
        """(end of the previous step's update, end of this one's); None while either is unknown."""
        before = self._book.steps.get(step.step - 1)
        if before is None or before.update_ns is None or step.update_ns is None:
            return None
        return before.update_ns[1], step.update_ns[1]

    def split(self, step: StepRecord, window: Span) -> Split:
        """Nanoseconds per label, ``stalled`` and ``other``, of the part of the step's period inside ``window``."""
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
        """Remember what a step without prefill costs: the yardstick for those with it."""
        if not step.prefill_tokens and step.forward_ns:
            costs = self._plain.setdefault(step.engine, deque(maxlen=64))
            costs.append(step.forward_ns[1] - step.forward_ns[0])

    def _sweep(self, step: StepRecord, low: int, high: int) -> Split:
        spans: list[tuple[int, int, int]] = []
        for number in (step.step - 1, step.step, step.step + 1):
            near = self._book.steps.get(number)
            if near is not None:
                found = _intervals(near, self._book.steps.get(number + 1))
                spans += [(max(a, low), min(b, high), rank) for rank, a, b in found if a < high and b > low]
        out = dict.fromkeys(LABELS, 0)
        covered = 0
        cuts = sorted({edge for a, b, _ in spans for edge in (a, b)})
        for left, right in zip(cuts, cuts[1:], strict=False):
            rank = min((r for a, b, r in spans if a <= left and b >= right), default=None)
            if rank is not None:
                out[LABELS[rank]] += right - left
                covered += right - left
        out["other"] = high - low - covered
        out["stalled"] = 0
        if step.prefill_tokens and out["forward"]:
            out["stalled"] = self._stalled(step, out["forward"])
            out["forward"] -= out["stalled"]
        return out

    def _stalled(self, step: StepRecord, forward: int) -> int:
        """What of a mixed step's forward is due to prefill: beyond the usual decode step, else by tokens."""
        usual = self._plain.get(step.engine)
        if usual:
            return max(0, forward - int(median(usual)))
        return forward * step.prefill_tokens // max(step.tokens, 1)


def _intervals(step: StepRecord, following: StepRecord | None) -> list[tuple[int, int, int]]:
    """(rank in LABELS, start, end) of everything known about one step, up to where the next one is composed."""
    found: list[tuple[str, int, int]] = [("schedule", *step.schedule_ns)]
    for label, span in (("forward", step.forward_ns), ("lm_head", step.lm_head_ns), ("sample", step.sample_ns)):
        if span:
            found.append((label, *span))
    if step.update_ns:
        found.append(("update", *step.update_ns))
        if following:
            # Handing results on and taking new requests in is the engine's bookkeeping too.
            found.append(("update", step.update_ns[1], following.schedule_ns[0]))
    found += _worker(step)
    return [(LABELS.index(label), a, b) for label, a, b in found if b > a]


def _worker(step: StepRecord) -> list[tuple[str, int, int]]:
    """The hand-overs between engine and worker, and what the worker does to get ready."""
    if not step.execute_ns:
        return []
    found = [("dispatch", step.schedule_ns[1], step.execute_ns[0])]
    if step.forward_ns:
        found.append(("prepare", step.execute_ns[0], step.forward_ns[0]))
    modelled = step.lm_head_ns or step.forward_ns
    if modelled:
        found.append(("dispatch", modelled[1], step.execute_ns[1]))
    if step.sample_call_ns:
        found.append(("dispatch", step.execute_ns[1], step.sample_call_ns[0]))
        if step.sample_ns:
            found.append(("prepare", step.sample_call_ns[0], step.sample_ns[0]))
            found.append(("dispatch", step.sample_ns[1], step.sample_call_ns[1]))
        if step.update_ns:
            found.append(("dispatch", step.sample_call_ns[1], step.update_ns[0]))
    return found
