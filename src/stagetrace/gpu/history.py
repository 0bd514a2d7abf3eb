"""What each card has said over time, and what that is over a window of time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from ..model import GpuSample
from .nvml import STATE, Reading
from .throttle import reasons

#: Of a stage, mean and maximum of these. Those of the second line only where a card has them at all.
COUNTERS = (
    "utilization", "memory_bandwidth_utilization", "memory_used_bytes", "power_w", "sm_clock_mhz", "memory_clock_mhz",
    "temperature_c",
)  # fmt: skip
EXTRA = ("sm_active", "sm_occupancy", "tensor_active", "dram_active")
#: What several cards have together; of everything else it is the mean.
SUMMED = frozenset(("memory_used_bytes", "power_w"))
#: Of a window, so much has to be covered by samples; a longer pause between two is a hole.
COVERED = 0.9
HOLE = 2.5
_UNKNOWN = -math.inf
Span = tuple[int, int]


class Over(NamedTuple):
    """A counter over a window: its mean and maximum there, and how much of the window it was known for."""

    mean: float
    most: float
    covered: float


class Series:
    """A counter over time. Each value stands for the time since the one before: drivers look back, too."""

    def __init__(self) -> None:
        self.times: list[int] = []
        #: What each value stands for, ns; values, least where unknown; and, up to each, sums of time known and of area.
        self._spans: list[int] = []
        self._values: list[float] = []
        self._known: list[int] = []
        self._area: list[float] = []

    def add(self, time: int, value: float | None, period: int) -> None:
        """Append; what is not newer is not taken. ``period`` is the usual time between two."""
        gap = time - self.times[-1] if self.times else period
        if gap <= 0 and self.times:
            return
        span = gap if gap <= HOLE * period else period
        self.times.append(time)
        self._spans.append(span)
        self._values.append(_UNKNOWN if value is None else value)
        self._known.append((self._known[-1] if self._known else 0) + (0 if value is None else span))
        self._area.append((self._area[-1] if self._area else 0.0) + (0.0 if value is None else value * span))

    def over(self, window: Span) -> Over | None:
        """Of ``window``; None where nothing is known of any part of it."""
        low, high = window
        first, last = bisect_right(self.times, low), min(bisect_left(self.times, high), len(self.times) - 1)
        if last >= first and self.times[last] - self._spans[last] >= high:
            last -= 1
        if last < first:
            return None
        known, area = self._known[last], self._area[last]
        if first:
            known, area = known - self._known[first - 1], area - self._area[first - 1]
        # What of the first and the last one lies outside.
        for at, beyond in (
            (first, low - (self.times[first] - self._spans[first])), (last, self.times[last] - high)
        ):  # fmt: skip
            if beyond > 0 and self._values[at] != _UNKNOWN:
                known, area = known - beyond, area - beyond * self._values[at]
        most = max(self._values[first : last + 1])
        return None if known <= 0 or most == _UNKNOWN else Over(min(area / known, most), most, known / (high - low))

    def drop(self, before: int) -> None:
        """Forget what no window from ``before`` on can need."""
        at = max(bisect_left(self.times, before) - 1, 0)
        for each in (self.times, self._spans, self._values, self._known, self._area):
            del each[:at]


class Track:
    """One card."""

    def __init__(self, sample: GpuSample) -> None:
        self.card = sample.card
        self.name = sample.name
        self.samples: list[GpuSample] = []
        self.times: list[int] = []
        #: Up to each sample, the joules, and how many before it did not know theirs.
        self._total: list[float] = []
        self._blind: list[int] = []
        #: By counter, and what its values are usually apart where that is not the time between two samples: some are
        #: asked for more rarely, and the driver may keep the power in finer steps.
        self._series: dict[str, Series] = {}
        self._steps: dict[str, int] = {}
        self._kept = Series()
        self.gone = False

    def add(self, reading: Reading, period: int) -> None:
        """Note a reading; ``period`` is the time between two as it is at present."""
        sample = reading.sample
        if self.times and sample.t_ns <= self.times[-1]:
            return
        self._blind.append((self._blind[-1] if self._blind else 0) + (sample.energy_j is None))
        self._total.append((self._total[-1] if self._total else 0.0) + (sample.energy_j or 0.0))
        self.times.append(sample.t_ns)
        self.samples.append(sample)
        for counter in (*COUNTERS, *EXTRA):
            if reading.whole or counter not in STATE:
                self._note(counter, sample, period)
        if len(reading.power) > 2:
            self._steps["power_w"] = int(median(b[0] - a[0] for a, b in pairwise(reading.power)))
            self._series["power_w"] = self._kept
        for time, watts in reading.power:
            self._kept.add(time, watts, self._steps.get("power_w", period))

    def finest(self, period: int) -> int:
        """The shortest time that any of its counters can resolve."""
        return min(period, self._steps.get("power_w", period))

    def series(self, counter: str, period: int) -> tuple[Series, int]:
        """The finest there is of a counter, and the usual time between two of its values."""
        return self._series.get(counter) or Series(), self._steps.get(counter, period)

    def _note(self, counter: str, sample: GpuSample, period: int) -> None:
        series = self._series.setdefault(counter, Series())
        if series is self._kept:
            return
        if counter in STATE and series.times:
            self._steps[counter] = min(sample.t_ns - series.times[-1], 2 * period)  # more is a pause
        series.add(sample.t_ns, getattr(sample, counter), self._steps.get(counter, period))

    def joules(self, window: Span) -> float | None:
        """Energy used in ``window``: within a sampling period it is spread evenly. None where it is not known."""
        if len(self.times) < 2 or window[0] < self.times[0] or window[1] > self.times[-1]:
            return None
        first, last = bisect_right(self.times, window[0]) - 1, bisect_left(self.times, window[1])
        if self._blind[last] > self._blind[first]:
            return None
        return self._at(window[1]) - self._at(window[0])

    def _at(self, time: int) -> float:
        """Joules up to ``time``, which lies between the first and the last sample."""
        at = bisect_right(self.times, time)
        if at >= len(self.times):
            return self._total[-1]
        since, until = self.times[at - 1], self.times[at]
        share = (time - since) / (until - since)
        return self._total[at - 1] + share * (self._total[at] - self._total[at - 1])

    def drop(self, before: int) -> None:
        """Forget what no window from ``before`` on can need."""
        at = max(bisect_left(self.times, before) - 1, 0)
        del self.times[:at], self.samples[:at], self._total[:at], self._blind[:at]
        for series in (*self._series.values(), self._kept):
            series.drop(before)


class History:
    """All cards. ``period_ns`` is the time between two samples as it is at present."""

    def __init__(self) -> None:
        self.tracks: dict[str, Track] = {}
        self.period_ns = 0

    def add(self, readings: Iterable[Reading]) -> None:
        """Note what the sampler has read."""
        for reading in readings:
            sample = reading.sample
            self.tracks.setdefault(sample.card, Track(sample)).add(reading, self.period_ns)

    def reached(self, time: int) -> bool:
        """Whether every card that still answers has been asked at ``time`` or later."""
        return all(track.gone or track.times[-1] >= time for track in self.tracks.values())

    def forget(self, before: int) -> None:
        """Drop what no window from ``before`` on can need."""
        for track in self.tracks.values():
            track.drop(before)

    def over(self, window: Span, cards: Iterable[str] | None = None) -> dict[str, Any]:
        """Attributes of an interval: ``window`` says how far they can be trusted.

        ``sampled``; ``stale``: samples cover less than nine tenths of it; ``shorter_than_sample``; ``none``. Only the
        first two come with values, and those are null where a card does not say.
        """
        tracks = self._of(cards)
        if not tracks:
            return {"window": "none"}
        if window[1] - window[0] < min(track.finest(self.period_ns) for track in tracks):
            return {"window": "shorter_than_sample"}
        known: dict[str, list[Over]] = {}
        for counter in (*COUNTERS, *EXTRA):
            found = [self._one(track, counter, window) for track in tracks]
            known[counter] = [each for each in found if each is not None]
        covered = max((min(o.covered for o in overs) for overs in known.values() if overs), default=0.0)
        if not covered:
            return {"window": "none"}
        made: dict[str, Any] = {"window": "sampled" if covered >= COVERED else "stale"}
        made["cards"] = ",".join(track.card for track in tracks)
        made["energy_j"] = self.joules(window, cards)
        made |= {counter: _together(counter, known[counter], len(tracks)) for counter in COUNTERS}
        made |= {counter: _together(counter, known[counter], len(tracks)) for counter in EXTRA if known[counter]}
        return made | self.throttling(window, cards)

    def joules(self, window: Span, cards: Iterable[str] | None = None) -> float | None:
        """Energy all of ``cards`` used in ``window``; None where that of one of them is not known."""
        found = [track.joules(window) for track in self._of(cards)]
        known = [each for each in found if each is not None]
        return sum(known) if known and len(known) == len(found) else None

    def throttling(self, window: Span, cards: Iterable[str] | None = None) -> dict[str, Any]:
        """Whether, and why, any of ``cards`` was slowed down in ``window``; null where no sample lies in it."""
        bits: int | None = None
        for track in self._of(cards):
            for sample in track.samples[bisect_left(track.times, window[0]) : bisect_right(track.times, window[1])]:
                if sample.throttle is not None:
                    bits = (bits or 0) | sample.throttle
        if bits is None:
            return {"throttled": None, "throttle_reasons": None}
        names = reasons(bits)
        return {"throttled": bool(names), "throttle_reasons": ",".join(names) or None}

    def _of(self, cards: Iterable[str] | None) -> list[Track]:
        wanted = self.tracks if cards is None else cards
        return [self.tracks[card] for card in wanted if card in self.tracks]

    def _one(self, track: Track, counter: str, window: Span) -> Over | None:
        series, period = track.series(counter, self.period_ns)
        return series.over(window) if window[1] - window[0] >= period else None


def _together(counter: str, overs: list[Over], cards: int) -> dict[str, float] | None:
    """Of several cards, one pair of figures; None unless all of them are known."""
    if len(overs) < cards:
        return None
    scale = 1.0 if counter in SUMMED else 1 / cards
    most = sum(o.most for o in overs) if counter in SUMMED else max(o.most for o in overs)
    return {"mean": sum(o.mean for o in overs) * scale, "max": most}
