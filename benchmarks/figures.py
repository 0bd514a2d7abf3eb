"""What a row hands over: figures with their spread, their limit and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .stats import Spread

PASS, UNCLEAR, OVER = "PASS", "unclear", "over"


@dataclass(frozen=True)
class Figure:
    """One measured value. ``about`` says what it was made of.

    Units: ``ratio``, ``fraction`` (a ratio shown as 1/n), ``%``, ``µs``, ``ms``, ``s``, ``/s``, ``MB``,
    ``MB/min``, ``count``.
    """

    name: str
    unit: str
    spread: Spread
    limit: float | None = None
    about: str = ""

    @property
    def verdict(self) -> str:
        """PASS up to the limit; ``over`` only when even the low end of the median's 95 % interval is above it."""
        if self.limit is None:
            return ""
        if self.spread.value <= self.limit:
            return PASS
        return OVER if self.spread.low > self.limit else UNCLEAR

    def text(self, value: float) -> str:
        """``value`` in this figure's unit."""
        if self.unit == "ratio":
            return f"{value:.3f} ×" if value < 10 else f"{value:.1f} ×"
        if self.unit == "fraction":
            return f"1/{1 / value:.1f}" if value > 0 else "0"
        if self.unit == "/s":
            return f"{value:,.0f} /s"
        if self.unit == "count":
            return f"{value:,.0f}"
        return f"{value:.2f} {self.unit}"

    def as_json(self) -> dict[str, Any]:
        """For ``--json``, and on the way from the row's process."""
        return {**asdict(self), "verdict": self.verdict}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Figure:
        """The inverse of :meth:`as_json`."""
        fields = {key: document[key] for key in ("name", "unit", "limit", "about")}
        return cls(spread=Spread(**document["spread"]), **fields)


@dataclass
class Outcome:
    """Everything a row found out; ``notes`` are sentences without which its figures mislead."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, spread: Spread, limit: float | None = None, about: str = "") -> None:
        """Append one figure."""
        self.figures.append(Figure(name, unit, spread, limit, about))


class Progress:
    """Tells whoever waits how far a row is. ``show(done, total, text)`` is the only thing that happens."""

    def __init__(self, show: Callable[[int, int, str], None]) -> None:
        self._show = show
        self._total = 1
        self._done = 0
        self._text = ""

    def of(self, total: int) -> None:
        """How many ticks there are going to be."""
        self._total = total

    def tick(self) -> None:
        """One more is done."""
        self._done += 1
        self._show(self._done, self._total, self._text)

    def say(self, text: str) -> None:
        """What is being done now."""
        self._text = text
        self._show(self._done, self._total, text)


@dataclass(frozen=True)
class Options:
    """What the command line says about how long to measure."""

    servers: int = 2
    #: Of load, in the row `endpoints`.
    minutes: float = 10.0
    #: Names of :data:`benchmarks.endpoints.KINDS`; none: the row's own choice.
    endpoints: tuple[str, ...] = ()
