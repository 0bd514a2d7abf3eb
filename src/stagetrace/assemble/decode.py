"""Stage 11 by what the engine did meanwhile."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..model import StepRecord
from .book import Book, Sequence, Span
from .case import Case
from .identity import name_in
from .periods import LABELS

#: The parts of `split_ms`; they add up to the stage.
PARTS = (*LABELS, "stalled", "preempted", "other")
#: So many of those whose prefill it waited for are named.
CULPRITS = 5


@dataclass
class Split:
    """A window of time by its parts, ns, and who had ``stalled`` it: (a sequence, ns, tokens) by its call.

    ``overlapped`` is the engine's own work under cover of a forward, and no part.
    """

    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    overlapped: int = 0
    blame: dict[int | None, tuple[Sequence, int, int]] = field(default_factory=dict)
    #: Whose clock the worker's parts are by: the device's where it has timed all of them. None where nobody's is known.
    source: str | None = None

    def ms(self) -> dict[str, float]:
        """The parts in ms."""
        return {label: spent / 1e6 for label, spent in self.parts.items()}

    def culprits(self, book: Book) -> list[dict[str, Any]]:
        """Whose prefill it waited for, the longest first, and how many tokens of theirs were computed meanwhile."""
        worst = heapq.nlargest(CULPRITS, self.blame.values(), key=lambda one: one[1])
        named = [(name_in(book, sequence), spent, tokens) for sequence, spent, tokens in worst]
        return [{**name._asdict(), "tokens": tokens, "ms": spent / 1e6} for name, spent, tokens in named if name]


def split(case: Case, window: Span, first: int | None = None) -> Split:
    """The parts of ``window``, from step ``first`` on (from the one after the first token's unless given).

    It goes by the periods of the steps. Where the sequence was in the step, each label has its time. The whole period
    is ``preempted`` from an eviction to the end of the recomputation, and ``stalled`` where the step passed it over.
    """
    total = Split()
    for step in _steps(case, window, first):
        parts = case.periods.split(step, window)
        if not parts:
            continue
        total.overlapped += parts["overlapped"]
        if step.forward_ns and total.source != "host_clock":
            total.source = "cuda_event" if step.device_timed else "host_clock"
        turn = case.by_step.get(step.step)
        whole = None
        if turn is None:
            whole = "preempted" if _evicted(case, step) else "stalled"
        elif turn.redo:
            whole = "preempted"
        before = total.parts["stalled"]
        for label in PARTS:
            total.parts[whole or label] += parts.get(label, 0)
        if total.parts["stalled"] > before:
            _blame(case, step, total, total.parts["stalled"] - before)
    total.parts["other"] += window[1] - window[0] - sum(total.parts.values())
    return total


def _blame(case: Case, step: StepRecord, total: Split, stalled: int) -> None:
    """Share what ``step`` stalled among those whose prompts it computed, by their tokens.

    The sequence itself is never among them: what it computes again after its first token is ``preempted``.
    """
    for sequence, tokens in case.book.prefills.get(step.step, ()):
        _, spent, computed = total.blame.get(sequence.root, (sequence, 0, 0))
        share = stalled * tokens // step.prefill_tokens
        total.blame[sequence.root] = sequence, spent + share, computed + tokens


def _steps(case: Case, window: Span, first: int | None) -> Iterator[StepRecord]:
    """The steps whose periods may reach into ``window``."""
    if not case.turns:
        return
    start = (case.first or case.turns[0]).step
    for number in range(first or start.step + 1, case.book.last_step.get(start.engine, 0) + 1):
        step = case.book.steps.get(number)
        if step is None:
            continue
        bounds = case.periods.bounds(step)
        if bounds is not None and bounds[0] >= window[1]:
            return
        yield step


def _evicted(case: Case, step: StepRecord) -> bool:
    """Whether an eviction came after the last step that had the sequence in it."""
    evictions = [t for t in case.sequence.preempted if t <= step.schedule_ns[1]] if case.sequence else []
    last = next((turn.step for turn in reversed(case.turns) if turn.step.step < step.step), None)
    return bool(evictions) and (last is None or evictions[-1] > last.schedule_ns[1])
