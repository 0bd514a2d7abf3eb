"""How far a request's stages are from what the hardware could do: the floor of the work that was done in each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..floor.engine import Yardstick, is_piece, model_config, yardstick
from ..floor.rows import document_prefill_flop
from ..floor.work import Work, decode_pass, embedding, lm_head, prefill, sample
from ..model import StageRecord
from .book import Book
from .case import Case
from .life import Turn


class Floors:
    """The yardstick of a book's engine, made anew when its settings change. ``named`` is the device if not its own."""

    def __init__(self, book: Book, named: str | None) -> None:
        self._book = book
        self._named = named
        self._settings: dict[str, str] | None = None
        self._found: Yardstick | str = ""

    @property
    def found(self) -> Yardstick | str:
        """The yardstick, or why there is none."""
        if self._settings != self._book.settings:
            self._settings = dict(self._book.settings)
            self._found = yardstick(self._settings, self._named)
        return self._found

    def facts(self) -> dict[str, Any]:
        """What goes with a run: the model's config, the device its floors are of, or why it has none."""
        found, config = self.found, model_config(self._book.settings)
        said = {"floor_missing": found} if isinstance(found, str) else {"floor_gpu": found.gpu}
        return said | ({"model_config": config} if config else {})

    def add(self, case: Case, rows: Iterable[StageRecord]) -> None:
        """Put into the rows of stages that run on the device what they cost at least, and how far from it they were.

        Unknown stays None: for a stage that was cut short, since nobody knows how much of its work was done.
        """
        found = self.found
        if isinstance(found, str):
            return
        for row in rows:
            works = _WORKS.get(row.key)
            if works is None or row.state not in ("measured", "estimated", "not_observable") or _cut(row):
                continue
            parts = works(case, found)
            if parts:
                row.attributes = {**row.attributes, **_held_against(row, parts, found), **_own(row, case, found, parts)}


def config_of(settings: dict[str, str]) -> dict[str, str]:
    """An engine's settings without the pieces of its model's config."""
    return {key: value for key, value in settings.items() if not is_piece(key)}


def _cut(row: StageRecord) -> bool:
    return bool(row.attributes.get("interrupted"))


def _held_against(row: StageRecord, parts: list[Work], found: Yardstick) -> dict[str, Any]:
    """One part for each forward: each takes as long as the slower of computing and moving."""
    floor = sum(map(found.rates.ms, parts))
    took = row.duration_ms
    flop, moved = sum(part.flop for part in parts), sum(part.bytes for part in parts)
    facts: dict[str, Any] = {"floor_ms": floor}
    if took:
        facts |= {
            "over_floor": took / floor, "achieved_tflop_per_s": flop / took / 1e9,
            "achieved_gb_per_s": moved / took / 1e6,
        }  # fmt: skip
    return facts


def _own(row: StageRecord, case: Case, found: Yardstick, parts: list[Work]) -> dict[str, Any]:
    """What else two of them say: the request's own FLOP by the document's formula; the passes that were counted."""
    if row.key == "prefill":
        return {"flop": sum(document_prefill_flop(found.model, turn.tokens, turn.computed) for turn in case.chunks)}
    if row.key == "decode":
        return {"bytes_read": round(sum(part.bytes for part in parts)), "floor_steps": len(parts)}
    return {}


def _embedding(case: Case, found: Yardstick) -> list[Work]:
    return [embedding(found.model, turn.step.tokens) for turn in case.chunks]


def _prefill(case: Case, found: Yardstick) -> list[Work]:
    """Whoever else is in a forward is computed in it, too."""
    if case.first is None:
        return []
    return [_forward(turn, found) for turn in case.chunks]


def _forward(turn: Turn, found: Yardstick) -> Work:
    return prefill(found.model, turn.tokens, turn.computed, turn.step.tokens - turn.tokens)


def _head(case: Case, found: Yardstick) -> list[Work]:
    return [lm_head(found.model, case.first.step.batch_size)] if case.first else []


def _sample(case: Case, found: Yardstick) -> list[Work]:
    return [sample(found.model, case.first.step.batch_size)] if case.first else []


def _decode(case: Case, found: Yardstick) -> list[Work]:
    return [_pass(turn, found) for turn in _inside(case)]


def _inside(case: Case) -> list[Turn]:
    """The passes that stage 11 has from beginning to end: the first ones may run before the first text is sent."""
    start, end = case.first_text, case.decoded
    if start is None or end is None or case.first is None:
        return []
    return [
        turn
        for turn in case.turns
        if turn.step.step > case.first.step.step
        and (turn.step.forward_ns or turn.step.schedule_ns)[0] >= start
        and turn.step.update_ns is not None
        and turn.step.update_ns[0] <= end
    ]


def _pass(turn: Turn, found: Yardstick) -> Work:
    if turn.redo:  # what an eviction has thrown away is computed as a prompt is
        return _forward(turn, found)
    step = turn.step
    mates = step.tokens - turn.tokens
    return decode_pass(found.model, turn.computed + turn.tokens, turn.tokens, mates, step.batch_size)


_WORKS = {"embedding": _embedding, "prefill": _prefill, "lm_head": _head, "sample": _sample, "decode": _decode}
