"""The statistics behind `make bench`; what it measures is not repeated here."""

from __future__ import annotations

import pytest

from benchmarks.figures import OVER, PASS, UNCLEAR, Figure
from benchmarks.row_endpoints import Sample, dropped, growth
from benchmarks.stats import Spread, differences, interleave, interval, median, quantile, ratios


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([7], 0.9, 7), ([3, 1, 2], 0.5, 2), ([4, 1, 3, 2], 0.5, 2.5), ([0, 10], 0.1, 1), ([1, 2], 1, 2), ([1, 2], 0, 1)],
)
def test_quantile(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == pytest.approx(expected)


def test_the_interval_of_the_median_narrows_with_the_rounds() -> None:
    few, many = [float(n) for n in range(11)], [n / 100 for n in range(1001)]
    assert interval([5.0]) == (5.0, 5.0)
    assert interval(few) == (2.0, 8.0)
    low, high = interval(many)
    assert low < median(many) < high and high - low < 1
    assert interval(list(reversed(many))) == (low, high)


def test_arms_take_turns_and_swap_their_order() -> None:
    calls: list[str] = []

    def arm(name: str, value: float) -> float:
        calls.append(name)
        return value + len(calls)

    found = interleave((lambda: arm("a", 0), lambda: arm("b", 100)), 3, lambda: calls.append("|"))
    assert "".join(calls) == "ab|ba|ab|"
    assert found == [[1, 5, 7], [102, 104, 108]]


def test_one_ratio_and_one_difference_a_round() -> None:
    assert ratios([2, 9], [1, 3]) == [2, 3]
    assert differences([2, 9], [1, 3]) == [1, 6]
    with pytest.raises(ValueError, match=r"longer|shorter"):
        ratios([1, 2], [1])


def test_the_bounds_of_a_difference_are_the_widest() -> None:
    assert Spread(5, 4, 6, 4.5, 5.5).minus(Spread(2, 1, 3, 1.5, 2.5)) == Spread(3, 1, 5, 2, 4)


@pytest.mark.parametrize(
    ("value", "low", "limit", "verdict"),
    [(1, 0.9, None, ""), (1, 0.9, 1, PASS), (1.1, 0.9, 1, UNCLEAR), (1.1, 1, 1, UNCLEAR), (1.1, 1.01, 1, OVER)],
)
def test_a_limit_is_exceeded_only_when_that_is_sure(value: float, low: float, limit: float, verdict: str) -> None:
    figure = Figure("x", "%", Spread(value, low, value, low, value), limit)
    assert figure.verdict == verdict
    assert Figure.from_json(figure.as_json()) == figure


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [("fraction", 0.04, "1/25.0"), ("ratio", 1.25, "1.250 ×"), ("/s", 12345.6, "12,346 /s"), ("µs", -0.5, "-0.50 µs")],
)
def test_values_are_shown_in_their_unit(unit: str, value: float, text: str) -> None:
    assert Figure("x", unit, Spread.of([value])).text(value) == text


def test_what_a_collector_says_it_dropped() -> None:
    said = "stagetrace: recording (session s)\nstagetrace: 30 spans were not exported (queue_full 13, refused 17)\n"
    assert dropped(said) == {"queue_full": 13, "refused": 17}
    assert dropped("stagetrace: recording (session s)\n") == {}
    with pytest.raises(RuntimeError, match="do not add up"):
        dropped(said.replace("30", "31"))


@pytest.mark.parametrize(("per_minute", "expected"), [(0.0, 0.0), (6.0, 6.0)])
def test_growth_is_that_of_the_second_half(per_minute: float, expected: float) -> None:
    """Ten minutes, a sample each 5 s: whatever the first half did is no matter."""
    times = [5.0 * n for n in range(1, 121)]
    samples = [Sample(t, 500.0 if t < 300 else 100.0 + per_minute * t / 60, 1, 0) for t in times]
    assert growth(samples, 10.0) == pytest.approx([expected] * 10)
