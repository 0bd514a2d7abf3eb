"""One part of a run: what it checked, what it measured, and how that came out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class NotHere(Exception):
    """The part cannot be run on this machine, and why not."""


@dataclass
class Check:
    """A figure and the limit it is held to; ``ok`` is that it does not exceed it."""

    what: str
    value: float
    limit: float
    unit: str
    ok: bool


@dataclass
class Part:
    """``state``: ``passed``, ``failed``, ``not_run``, or ``rehearsed``, which says nothing of any GPU."""

    name: str
    rehearsal: bool
    #: When the run is to be over (``time.monotonic``).
    until: float
    state: str = "not_run"
    reason: str | None = None
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def hold(self, what: str, value: float, limit: float, unit: str) -> None:
        """Note that ``value`` is to be at most ``limit``."""
        self.checks.append(Check(what, round(value, 6), round(limit, 6), unit, value <= limit))

    def done(self) -> None:
        """It has run to its end."""
        broken = [check for check in self.checks if not check.ok]
        if self.rehearsal:
            self.state = "rehearsed"
        else:
            self.state = "failed" if broken else "passed"
        self.reason = "; ".join(f"{c.what}: {c.value:g} {c.unit}, at most {c.limit:g}" for c in broken) or None

    def document(self) -> dict[str, Any]:
        """As in the JSON."""
        return {
            "name": self.name, "state": self.state, "reason": self.reason, "seconds": round(self.seconds, 3),
            "checks": [asdict(check) for check in self.checks], "figures": self.figures,
        }  # fmt: skip

    def words(self) -> str:
        """One line for a person."""
        held = f" ({sum(c.ok for c in self.checks)} of {len(self.checks)} checks hold)" if self.checks else ""
        return f"{self.state:>9}  {self.name}{held}{': ' + self.reason if self.reason else ''}"
