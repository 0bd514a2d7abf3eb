"""Cards' counters onto the stages of a request, and its share of their energy onto the request itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..assemble.book import Book, Sequence
from ..assemble.ending import extent_ms
from ..assemble.life import scheduled
from ..model import RequestRecord, StepRecord
from .energy import computing
from .history import History

Span = tuple[int, int]


class Join:
    """``cards_of`` says which cards an engine computes on: none where that is not known."""

    def __init__(
        self, book: Book, history: History, cards_of: Callable[[int | None], list[str]], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._off = False
        self._book = book
        self._history = history
        self._cards_of = cards_of
        #: Joules of steps whose end the samples have reached.
        self._known: dict[int, float | None] = {}

    def put(self, made: RequestRecord, started: int, sequence: Sequence | None) -> None:
        """Add to a record whose call began at ``started`` (monotonic ns); nothing where no card is sampled.

        A fault of ours costs the counters, said once, and not the record.
        """
        if not self._history.tracks or self._off:
            return
        try:
            self._put(made, started, sequence)
        except Exception as error:
            self._off = True
            self._say(f"GPU counters are not joined any more ({type(error).__name__}: {error}); recording goes on")

    def _put(self, made: RequestRecord, started: int, sequence: Sequence | None) -> None:
        cards = self._cards_of(made.engine)
        if not cards:
            return
        for row in made.stages:
            if row.start_ms is None or row.duration_ms is None:
                continue
            long = extent_ms(row, made.stages) if row.key == "prefill" else row.duration_ms
            start = started + round(row.start_ms * 1e6)
            row.attributes = {**row.attributes, "gpu": self._history.over((start, start + round(long * 1e6)), cards)}
        made.gpu = self._request(made, started, sequence, cards)

    def reached(self, time: int) -> bool:
        """Whether every card that still answers has been sampled at ``time`` or later."""
        return self._history.reached(time)

    def forget(self, before: int) -> None:
        """Drop what is older than ``before``, and the energy of steps the book has dropped."""
        self._history.forget(before)
        for number in [n for n in self._known if n not in self._book.steps]:
            del self._known[number]

    def _request(
        self, made: RequestRecord, started: int, sequence: Sequence | None, cards: list[str]
    ) -> dict[str, Any]:
        joules = self._joules(sequence, cards) if sequence is not None else None
        tokens = made.output_tokens
        window = (started, started + round((made.e2e_ms or 0.0) * 1e6))
        return {
            "cards": ",".join(card for card in cards if card in self._history.tracks) or None,
            "joules": joules,
            "joules_per_output_token": joules / tokens if joules is not None and tokens else None,
            **self._history.throttling(window, cards),
        }

    def _joules(self, sequence: Sequence, cards: list[str]) -> float | None:
        """Its share of every step it was in, by tokens; None where one of them is not known."""
        total, freed = 0.0, sequence.free.t if sequence.free else None
        steps = 0
        for step, tokens, _, _ in scheduled(self._book, sequence):
            if freed is not None and step.schedule_ns[1] > freed:
                break  # its LEAVE comes with the next step, which may not be read yet
            whole = self._of_step(step, cards)
            if whole is None:
                return None
            total += whole * tokens / max(step.tokens, 1)
            steps += 1
        return total if steps else None

    def _of_step(self, step: StepRecord, cards: list[str]) -> float | None:
        if step.step in self._known:
            return self._known[step.step]
        span = computing(step, self._book.steps.get(step.step - 1))
        if span is None:
            return 0.0 if step.update_ns is not None else None
        joules = self._history.joules(span, cards)
        if self._history.reached(span[1]):
            self._known[step.step] = joules
        return joules
