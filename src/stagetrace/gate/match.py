"""Are two sides comparable? And if so: the same prompts of all runs in the same columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from ..faults import Fault
from .measures import BY_KEY, MEASURES
from .runs import ASKED, MOST_FAILED, SETTINGS, Run

if TYPE_CHECKING:
    from .estimate import Array

#: Fields that are results in part: different only if further apart than this share.
_LOOSE = {"kv_blocks": 0.10, "output_tokens": 0.05, "cached_tokens": 0.05}
#: Named where they differ, and never refused: an upgrade is what a gate is for.
_NAMED_ONLY = ("engine_version",)
#: What two servers under test may differ in on purpose: all but what is asked of them, and of which model and card.
ALWAYS_EQUAL = ("model", "device", "gpu", *ASKED)
#: All that is compared.
FIELDS = tuple(sorted({*SETTINGS, *ASKED}))
#: A baseline keeps the time a run began to a millisecond, and each of its times to four digits.
_SAME_START_NS, _SAME_TIME = 2_000_000, 2e-3
#: Of all prompts, so many must be in every run. A few fail in each, and not the same ones: over ten runs that adds up.
_COMMON = 0.5


@dataclass(frozen=True)
class Sides:
    """Two sides that may be compared.

    ``differ``: in words, the field first, what they do not have in common; ``failed``: runs in which some
    requests were not answered.
    """

    baseline: Sequence[Run]
    current: Sequence[Run]
    differ: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """All runs, the baseline's first."""
        return [*self.baseline, *self.current]


def allowed(fields: Collection[str], where: str = "--allow") -> tuple[str, ...]:
    """The fields that may differ, as ``where`` says; Fault for one that there is not."""
    strange = sorted(set(fields) - set(FIELDS))
    if strange:
        raise Fault(f"{where} {strange[0]}: no such field; there are: {', '.join(FIELDS)}")
    return tuple(fields)


def match(
    baseline: Sequence[Run], current: Sequence[Run], allow: Collection[str] = (), *, settings: bool = True
) -> Sides:
    """Check that only the servers' speed can differ; Fault, naming the field, if not.

    ``settings`` False: the servers' own settings differ on purpose.
    """
    each_once([*baseline, *current])
    for side in (baseline, current):
        if how := unlike(side, allow):
            raise Fault(f"{how}, on the same side: give runs of one server and one load (or --allow what differs)")
    fields = _differ(baseline[0], current[0])
    refused = [
        name for name in fields
        if name not in (*allow, *_NAMED_ONLY) and (settings or name in ALWAYS_EQUAL)
    ]  # fmt: skip
    if refused:
        named = "; ".join(_said(name, baseline[0], current[0]) for name in refused)
        allowing = " ".join(f"--allow {name}" for name in refused)
        raise Fault(f"not comparable: {named} of the baseline ({allowing} to compare all the same)")
    failed = [
        f"{run.name}: {run.failed} of {len(run.requests) + run.failed} requests not answered, left out"
        for run in (*baseline, *current)
        if run.failed
    ]
    sides = Sides(baseline, current, [_changed(name, baseline[0], current[0]) for name in fields], failed)
    _stages_missing(sides)
    return sides


def each_once(runs: Sequence[Run]) -> None:
    """Fault where a run is there twice: it would count as two that vary by nothing."""
    in_time = sorted(runs, key=lambda run: run.started_unix_ns)
    for one, other in pairwise(in_time):
        if other.started_unix_ns - one.started_unix_ns < _SAME_START_NS and _same_times(one, other):
            where = f"the same run as {one.name}" if one.name != other.name else "given twice"
            raise Fault(f"{other.name}: {where}; give each run once, and on one side only")


def _same_times(one: Run, other: Run) -> bool:
    return one.requests.keys() == other.requests.keys() and all(
        abs(ms - other.requests[key].ms.get(name, -1.0)) <= _SAME_TIME * ms
        for key, request in one.requests.items()
        for name, ms in request.ms.items()
    )


def unlike(runs: Sequence[Run], allow: Collection[str] = ()) -> str | None:
    """In words, how one of these runs differs from the first in what all of one side must have in common."""
    for run in runs[1:]:
        for name in _differ(runs[0], run):
            if name not in allow:
                return f"{run.name}: {_said(name, runs[0], run)} of {runs[0].name}"
    return None


def _differ(one: Run, other: Run) -> list[str]:
    names = sorted(one.fingerprint.keys() | other.fingerprint.keys())
    differ = [name for name in names if not _same(name, one.fingerprint.get(name), other.fingerprint.get(name))]
    return [name for name in differ if name != "prompt_mix" or not _same_prompts(one, other)]


def _same_prompts(one: Run, other: Run) -> bool:
    """Whether both were asked the same, though a few of each were not answered."""
    common = one.requests.keys() & other.requests.keys()
    fewest = (1 - 2 * MOST_FAILED) * max(len(one.requests), len(other.requests))
    equal = all(one.requests[key].prompt_tokens == other.requests[key].prompt_tokens for key in common)
    return equal and len(common) >= fewest


def _same(name: str, one: object, other: object) -> bool:
    if name in _LOOSE and isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= _LOOSE[name] * max(abs(one), abs(other), 1)
    return one == other


def _said(name: str, one: Run, other: Run) -> str:
    return f"{name} {_value(other.fingerprint.get(name))} against {_value(one.fingerprint.get(name))}"


def _changed(name: str, one: Run, other: Run) -> str:
    return f"{name} {_value(one.fingerprint.get(name))} → {_value(other.fingerprint.get(name))}"


def _value(value: object) -> str:
    return "unknown" if value is None else str(value)


def _stages_missing(sides: Sides) -> None:
    """A stage that one run has and another has not is no stage to be silent about."""
    for run in sides.runs:
        for other in sides.runs:
            for stage, state in run.without.items():
                if stage not in other.without:
                    raise Fault(
                        f"{run.name}: stage {stage} has no time ({state}), but has one in {other.name}; "
                        "compare runs that both have it"
                    )


def columns(sides: Sides) -> dict[str, tuple[list[str], Array]]:
    """Measure → its prompts and their times in ms, runs × prompts: those that every run has."""
    import numpy as np  # not at the top: `stagetrace baseline` does without

    runs = sides.runs
    every = set().union(*(run.requests for run in runs))
    common = sorted(set(every).intersection(*(run.requests for run in runs)))
    if len(common) < _COMMON * len(every) or len(common) < 2:
        raise Fault(f"only {len(common)} of {len(every)} prompts are in every run; send the same load to all of them")
    found = {}
    for measure in MEASURES:
        keys = [key for key in common if all(measure.key in run.requests[key].ms for run in runs)]
        some = [key for key in common if any(measure.key in run.requests[key].ms for run in runs)]
        if len(keys) < _COMMON * len(some):
            blind = min(runs, key=lambda run: sum(measure.key in request.ms for request in run.requests.values()))
            raise Fault(
                f"{BY_KEY[measure.key].title}: known of {len(keys)} of {len(some)} prompts in every run, "
                f"fewest in {blind.name}: leave it out, or record it again"
            )
        if len(keys) >= 2:
            found[measure.key] = (keys, np.array([[run.requests[k].ms[measure.key] for k in keys] for run in runs]))
    if "e2e_ms" not in found:
        blind = next((run for run in runs if all("e2e_ms" not in r.ms for r in run.requests.values())), runs[0])
        raise Fault(f"{blind.name}: no request has an end-to-end time (e2e_ms); record that run again")
    return found
