"""What each card has said over time, and what that is over a window of time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
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
Span = tuple[int, int]


class Over(NamedTuple):
    """A counter over a window: its mean and maximum there, and how much of the window it was known for."""

    mean: float
    most: float
    covered: float


@dataclass
class Series:
    """A counter over time. Each value stands for the time since the one before: drivers look back, too."""

    times: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, time: int, value: float | None) -> None:
        """Append; what is not newer is not taken."""
        if not self.times or time > self.times[-1]:
            self.times.append(time)
            self.values.append(value)

    def over(self, window: Span, period: int) -> Over | None:
        """Of ``window``; None where nothing is known of any part of it. ``period`` is the usual time between two."""
        low, high = window
        area = weight = 0.0
        most: float | None = None
        for index in range(bisect_right(self.times, low), min(bisect_left(self.times, high) + 1, len(self.times))):
            end, value = self.times[index], self.values[index]
            since = self.times[index - 1] if index and end - self.times[index - 1] <= HOLE * period else end - period
            part = min(end, high) - max(since, low)
            if value is not None and part > 0:
                area, weight = area + value * part, weight + part
                most = value if most is None else max(most, value)
        return None if most is None else Over(area / weight, most, weight / (high - low))

    def drop(self, before: int) -> None:
        """Forget what no window from ``before`` on can need."""
        at = max(bisect_left(self.times, before) - 1, 0)
        del self.times[:at], self.values[:at]


class Track:
    """One card."""

    def __init__(self, sample: GpuSample) -> None:
        self.card = sample.card
        self.name = sample.name
        self.samples: list[GpuSample] = []
        self.times: list[int] = []
        #: Joules up to each sample, and those before which they are not known.
        self._total: list[float] = []
        self._unknown: list[int] = []
        #: By counter, and what its values are usually apart where that is not the time between two samples: some are
        #: asked for more rarely, and the driver may keep the power in finer steps.
        self._series: dict[str, Series] = {}
        self._steps: dict[str, int] = {}
        self._kept = Series()
        self.gone = False

    def add(self, reading: Reading) -> None:
        """Note a reading."""
        sample = reading.sample
        if self.times and sample.t_ns <= self.times[-1]:
            return
        if sample.energy_j is None:
            self._unknown.append(sample.t_ns)
        self._total.append((self._total[-1] if self._total else 0.0) + (sample.energy_j or 0.0))
        self.times.append(sample.t_ns)
        self.samples.append(sample)
        for counter in (*COUNTERS, *EXTRA):
            if reading.whole or counter not in STATE:
                self._note(counter, sample)
        for time, watts in reading.power:
            self._kept.add(time, watts)
        if len(reading.power) > 2:
            self._steps["power_w"] = int(median(b[0] - a[0] for a, b in pairwise(reading.power)))
            self._series["power_w"] = self._kept

    def series(self, counter: str, period: int) -> tuple[Series, int]:
        """The finest there is of a counter, and the usual time between two of its values."""
        return self._series.get(counter) or Series(), self._steps.get(counter, period)

    def _note(self, counter: str, sample: GpuSample) -> None:
        series = self._series.setdefault(counter, Series())
        if series is self._kept:
            return
        if counter in STATE and series.times:
            self._steps[counter] = sample.t_ns - series.times[-1]
        series.add(sample.t_ns, getattr(sample, counter))

    def joules(self, window: Span) -> float | None:
        """Energy used in ``window``: within a sampling period it is spread evenly. None where it is not known."""
        if len(self.times) < 2 or window[0] < self.times[0] or window[1] > self.times[-1]:
            return None
        if any(window[0] < time and self._before(time) < window[1] for time in self._unknown):
            return None
        return self._at(window[1]) - self._at(window[0])

    def _before(self, time: int) -> int:
        at = bisect_left(self.times, time)
        return self.times[at - 1] if at else time

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
        del self.times[:at], self.samples[:at], self._total[:at]
        self._unknown = [time for time in self._unknown if time > before]
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
            self.tracks.setdefault(sample.card, Track(sample)).add(reading)

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
        if window[1] - window[0] < min(self._shortest(track) for track in tracks):
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

    def _shortest(self, track: Track) -> int:
        """The finest time that any counter of the card can resolve."""
        return min(track.series(counter, self.period_ns)[1] for counter in COUNTERS)

    def _one(self, track: Track, counter: str, window: Span) -> Over | None:
        series, period = track.series(counter, self.period_ns)
        return series.over(window, period) if window[1] - window[0] >= period else None


def _together(counter: str, overs: list[Over], cards: int) -> dict[str, float] | None:
    """Of several cards, one pair of figures; None unless all of them are known."""
    if len(overs) < cards:
        return None
    scale = 1.0 if counter in SUMMED else 1 / cards
    most = sum(o.most for o in overs) if counter in SUMMED else max(o.most for o in overs)
    return {"mean": sum(o.mean for o in overs) * scale, "max": most}
