"""What a team asks of its gate: ``.stagetrace.toml``, and what the command line adds."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..faults import Fault
from .decide import Effect
from .match import allowed
from .measures import BY_KEY, MEASURES, Measure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(".stagetrace.toml")
#: A part of a timer is of interest from this share of the timer on, however small it is itself.
LEAST_OF_TIMER = 0.0025
RELATIVE = 0.05
_UNITS_MS = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}
_TIME = r"(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>us|µs|ms|s)"
_BUDGET = re.compile(rf"\s*(?P<name>[a-z_0-9]+?)_p(?P<q>\d{{1,3}}(?:\.\d+)?)\s*<=\s*{_TIME}\s*")
_EFFECT = re.compile(rf"\s*(?:(?P<percent>\d+(?:\.\d+)?)\s*%)?\s*,?\s*(?:{_TIME})?\s*")
#: What people call the timers.
NAMES = {**{measure.key: measure for measure in MEASURES}, **{
    key.removesuffix("_ms"): BY_KEY[key] for key in ("ttft_ms", "itl_ms", "queue_ms", "e2e_ms")
}}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """No more than ``most_ms`` at percentile ``q`` of a measure."""

    text: str
    measure: Measure
    q: float
    most_ms: float


@dataclass(frozen=True)
class Wishes:
    """Effects of interest, budgets, and fields that may differ."""

    relative: float = RELATIVE
    effects: Mapping[str, Effect] = field(default_factory=dict)
    budgets: tuple[Budget, ...] = ()
    allow: tuple[str, ...] = ()

    def effect(self, measure: Measure, timer_ms: float | None) -> Effect:
        """The smallest slowdown of interest of ``measure``, part of a timer of ``timer_ms`` (None: a timer itself)."""
        own = self.effects.get(measure.key)
        return own or Effect(self.relative, max(measure.least_ms, LEAST_OF_TIMER * (timer_ms or 0.0)))


def read_wishes(path: Path | None) -> Wishes:
    """Read the ``[gate]`` table of ``path``, or of ``.stagetrace.toml`` where there is one; Fault for what is wrong."""
    chosen = path or FILE
    try:
        document = tomllib.loads(chosen.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path is None:
            return Wishes()
        raise Fault(f"--config {path}: there is no such file") from None
    except OSError as error:
        raise Fault(f"--config {chosen}: {error.strerror}; name a file") from None
    except ValueError as error:
        raise Fault(f"{chosen}: no TOML: {error}") from None
    try:
        if strange := sorted(document.keys() - {"gate"}):
            raise Fault(f"there is no {strange[0]}; everything is under [gate]")
        return _wishes(document.get("gate", {}))
    except Fault as fault:
        raise Fault(f"{chosen}: {fault}") from None


def _wishes(table: Any) -> Wishes:
    if not isinstance(table, dict):
        raise Fault("gate is a table: [gate]")
    unknown = sorted(table.keys() - {"effect", "effects", "budgets", "allow"})
    if unknown:
        raise Fault(f"[gate] has no {unknown[0]}; there are: allow, budgets, effect, effects")
    whole = parse_effect(str(table.get("effect", f"{RELATIVE:.0%}")))
    if whole.absolute_ms or not whole.relative:
        raise Fault(f'effect = "{table.get("effect")}": for all stages a percentage, such as "5%"')
    own = table.get("effects", {})
    if not isinstance(own, dict):
        raise Fault("effects is a table: [gate.effects]")
    effects = {_measure(name).key: parse_effect(str(text)) for name, text in own.items()}
    budgets = tuple(parse_budget(str(text)) for text in _list(table, "budgets"))
    return Wishes(whole.relative, effects, budgets, allowed([str(name) for name in _list(table, "allow")], "allow"))


def _list(table: dict[str, Any], name: str) -> list[Any]:
    value = table.get(name, [])
    if not isinstance(value, list):
        raise Fault(f"{name} is a list of strings")
    return value


def _measure(name: str) -> Measure:
    if name not in NAMES:
        raise Fault(f"{name}: no timer or stage; there are: {', '.join(sorted(NAMES))}")
    return NAMES[name]


def parse_budget(text: str) -> Budget:
    """Read ``ttft_p95 <= 200ms``; Fault if it is anything else."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise Fault(
            f'budget "{text}": write it as ttft_p95 <= 200ms: a name, _p and a percentile, <=, a time and its unit'
        )
    if not 0 < float(match["q"]) < 100:
        raise Fault(f'budget "{text}": a percentile is above 0 and below 100')
    if not float(match["value"]):
        raise Fault(f'budget "{text}": a limit is more than 0')
    return Budget(text.strip(), _measure(match["name"]), float(match["q"]), _ms(match))


def parse_effect(text: str) -> Effect:
    """Read ``5%``, ``2ms`` or ``5%, 2ms``; Fault if it is anything else."""
    match = _EFFECT.fullmatch(text)
    if match is None or not text.strip():
        raise Fault(f'effect "{text}": write it as 5%, as 2ms or as "5%, 2ms"')
    relative = float(match["percent"]) / 100 if match["percent"] else 0.0
    return Effect(relative, _ms(match) if match["value"] else 0.0)


def _ms(match: re.Match[str]) -> float:
    return float(match["value"]) * _UNITS_MS[match["unit"]]
