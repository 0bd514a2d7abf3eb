"""Percentiles and shares, in plain Python: the core is installed next to other people's engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

QUANTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def percentile(values: Sequence[float], q: float) -> float | None:
    """The ``q``-th percentile (0-100) by linear interpolation between ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def quantiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """p50, p95 and p99 of what is known."""
    known = [value for value in values if value is not None]
    return {name: percentile(known, q) for name, q in QUANTILES.items()}


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the largest; None of nothing."""
    return {**quantiles(values), "max": max(values, default=None)}


def inter_token(times: Sequence[float]) -> list[float]:
    """The gap before every token but the first. Tokens that come together share the time since the one before."""
    gaps: list[float] = []
    last = first = times[0] if times else 0.0
    together = 0
    for index, time in enumerate(times):
        together += 1
        if index + 1 < len(times) and times[index + 1] == time:
            continue
        if time == first:  # whatever came with the first token was not waited for
            gaps += [0.0] * (together - 1)
        else:
            gaps += [(time - last) / together] * together
        last, together = time, 0
    return gaps
