"""The gate's promises, kept over hundreds of simulated comparisons. Seeded: what is seen here is seen everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from scipy.stats import nct, t, ttest_ind

from stagetrace.gate.decide import (
    BETA,
    FAIL,
    FALSE_ALARMS,
    FEWEST_RUNS,
    INCONCLUSIVE,
    PASS,
    USUAL_RUNS,
    Effect,
    Judged,
    Outcome,
    _detectable,
    decide,
    overall,
)  # fmt: skip
from stagetrace.gate.estimate import Estimate, estimate, interleaved
from tests.calibrate.draws import draw, draw_as_asked, in_a_row, noise
from tests.calibrate.paced import Paced, page
from tests.unit.simulated import Noise, abba, compared, judged, runs_of, times

#: Of runs, their requests' part included, this comes to a coefficient of variation of just under 2 %.
QUIET = Noise(0.0165)
NOISY = Noise(0.04)
STAGES = ("admission", "tokenize", "prefill", "detokenize", "decode")


def verdict(outcomes: Mapping[str, Outcome]) -> str:
    return overall([outcome.verdict for outcome in outcomes.values()])


def culprit(estimates: Mapping[str, Judged], outcomes: Mapping[str, Outcome]) -> str | None:
    """The stage that a report would name: of those that fail, the one that grew by the most ms."""
    grown = {
        key: each.base_ms * np.expm1(each.estimate.change)
        for key, each in estimates.items()
        if outcomes[key].verdict == FAIL and each.share is not None
    }
    return max(grown, key=lambda key: grown[key], default=None)


def test_the_noise_is_what_it_is_said_to_be() -> None:
    rng = np.random.default_rng(1)
    seen = [compared(rng, 5, QUIET)[0]["prefill"].estimate.noise for _ in range(60)]
    assert 0.018 < np.sqrt(np.mean(np.square(np.array(seen, dtype=float)))) <= 0.02


def test_no_change_hardly_ever_fails() -> None:
    """Whatever the noise: where it is larger, fewer comparisons pass, and no more fail."""
    rng = np.random.default_rng(2)
    found = {
        noise.run: Counter(verdict(compared(rng, 5, noise)[1]) for _ in range(250))
        for noise in (QUIET, NOISY, Noise(0.10, drift=0.10))
    }
    assert sum(each[FAIL] for each in found.values()) <= FALSE_ALARMS * 750, found
    assert found[QUIET.run][FAIL] == 0 and found[QUIET.run][PASS] >= 0.75 * 250, found
    assert found[NOISY.run][PASS] < 0.25 * 250 and found[0.10][PASS] < 0.05 * 250, found


def test_ten_percent_more_is_caught_and_named() -> None:
    """With five runs a side that vary by 2 %, in a stage that is a twentieth of its timer or more."""
    rng = np.random.default_rng(3)
    named: Counter[str] = Counter()
    for stage in STAGES * 60:
        estimates, outcomes = compared(rng, 5, QUIET, {stage: 0.10})
        share = estimates[stage].share
        assert share is not None and share >= 0.05
        named[stage] += verdict(outcomes) == FAIL and culprit(estimates, outcomes) == stage
    assert sum(named.values()) >= 0.95 * 300, named
    assert min(named.values()) >= 0.9 * 60, named


@pytest.mark.parametrize("slower", [{}, {"prefill": 0.10}], ids=["no change", "+10 %"])
def test_too_few_runs_are_inconclusive_and_the_number_said_would_do(slower: dict[str, float]) -> None:
    rng = np.random.default_rng(4)
    found: Counter[str] = Counter()
    later: Counter[str] = Counter()
    for _ in range(60):
        _, outcomes = compared(rng, 5, NOISY, slower)
        found[verdict(outcomes)] += 1
        if verdict(outcomes) != INCONCLUSIVE:
            continue
        needed = [each.runs_needed for each in outcomes.values() if each.verdict == INCONCLUSIVE]
        assert all(n is not None and n > 5 for n in needed), needed
        most = max(n for n in needed if n is not None)
        later[verdict(compared(rng, most, NOISY, slower)[1])] += 1
    assert found[INCONCLUSIVE] >= 30
    right, wrong = (FAIL, PASS) if slower else (PASS, FAIL)
    assert found[wrong] <= BETA * 60
    assert later[right] >= 0.9 * sum(later.values()) and not later[wrong], later


@pytest.mark.parametrize("stage", ["prefill", "decode", "ttft_ms", "teardown"])
def test_faster_never_fails(stage: str) -> None:
    rng = np.random.default_rng(5)
    assert FAIL not in {verdict(compared(rng, 5, QUIET, {stage: -0.4})[1]) for _ in range(50)}


@pytest.mark.parametrize("stage", ["kv_allocate", "sample"])
def test_a_tenth_of_a_millisecond_that_doubles_is_no_news(stage: str) -> None:
    rng = np.random.default_rng(6)
    found = Counter(compared(rng, 5, QUIET, {stage: 0.95})[1][stage].verdict for _ in range(50))
    assert found == {PASS: 50}


def test_a_small_stage_that_grows_many_times_over_fails() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        estimates, outcomes = compared(rng, 5, QUIET, {"kv_allocate": 30.0})
        assert culprit(estimates, outcomes) == "kv_allocate"


def test_drift_is_no_noise_where_the_sides_are_interleaved() -> None:
    rng = np.random.default_rng(8)
    steady, drifting = (
        np.mean([compared(rng, 5, Noise(0.01, drift=d))[0]["prefill"].estimate.error or 0 for _ in range(30)])
        for d in (0.0, 0.3)
    )
    assert drifting < 1.2 * steady
    current = abba(5)
    assert interleaved(current, np.arange(10.0)) is not None
    assert interleaved(np.sort(current), np.arange(10.0)) is None, "one side after the other: drift is the side itself"


def test_outliers_do_not_move_a_run() -> None:
    rng = np.random.default_rng(9)
    current = abba(5)
    found = times(rng, current, Noise(0.005, 0.0, 0.01), {})
    found["prefill"][current, :3] *= 20  # three of fifty requests
    assert judged(found, current)["prefill"].estimate.change < 0.03


@pytest.mark.parametrize("runs", [1, 2])
def test_fewer_than_three_runs_a_side_have_no_verdict(runs: int) -> None:
    rng = np.random.default_rng(10)
    _, outcomes = compared(rng, runs, Noise(0.001, 0.0), {"prefill": 5.0})
    assert runs < FEWEST_RUNS
    assert {(o.verdict, o.runs_needed, o.detectable) for o in outcomes.values()} == {(INCONCLUSIVE, USUAL_RUNS, None)}


def test_the_same_input_has_the_same_verdict() -> None:
    current = abba(5)
    found = times(np.random.default_rng(11), current, QUIET, {})
    first, second = (estimate(found["prefill"], current, np.arange(10.0)) for _ in range(2))
    assert first == second


def test_the_error_is_that_of_a_t_test_on_runs() -> None:
    """Requests without noise of their own: what is left are the runs, and those have a formula."""
    runs = np.array([100.0, 102.0, 99.0, 110.0, 111.0, 108.0])
    current = np.array([False] * 3 + [True] * 3)
    found = estimate(np.repeat(runs[:, None], 20, axis=1), current, None)
    logs = np.log(runs)
    pooled = (np.var(logs[:3], ddof=1) + np.var(logs[3:], ddof=1)) / 2
    assert found.change == pytest.approx(logs[3:].mean() - logs[:3].mean())
    assert found.error == pytest.approx(np.sqrt(pooled * 2 / 3), rel=0.1)
    assert found.df == 4


def test_many_quiet_runs_do_not_vouch_for_a_few_noisy_ones() -> None:
    """Sides of unequal size: Welch's error and degrees of freedom, as scipy has them."""
    rng = np.random.default_rng(12)
    logs = np.concatenate([rng.normal(0, 0.01, 20), rng.normal(0, 0.06, 4)])
    current = np.array([False] * 20 + [True] * 4)
    found = estimate(np.exp(np.repeat(logs[:, None], 20, axis=1)), current, None)
    welch = ttest_ind(logs[current], logs[~current], equal_var=False)
    assert found.error == pytest.approx(found.change / welch.statistic, rel=0.01)
    assert found.df == int(welch.df) == 3


def test_the_runs_needed_are_planned_for_sides_of_equal_size() -> None:
    """Of a comparison of 20 against 4 runs only the trend's degree of freedom is lost in the next one."""

    def needed(df: int, runs: tuple[int, int], error: float) -> int | None:
        judged = Judged(Estimate(0.0, error, df, 0.05, runs), 100.0, None, Effect(0.05, 0.0))
        return decide({"ttft_ms": judged})["ttft_ms"].runs_needed

    few, many = needed(6, (4, 4), 0.06 * 0.5**0.5), needed(6, (20, 4), 0.06 * 0.3**0.5)
    assert few is not None and few == many


@pytest.mark.parametrize(("df", "level"), [(3, 7e-4), (7, 7e-4), (8, 7e-5), (30, 7e-4)])
def test_what_would_have_been_caught_is_fail_in_19_of_20(df: int, level: float) -> None:
    """Of a slowdown of that size at that noise, by the noncentral t: the one that is least is not far off."""
    judged = Judged(Estimate(0.0, 0.02, df, 0.03, (5, 5)), 100.0, None, Effect(0.05, 0.0))
    caught = 1 - nct.cdf(t.isf(level, df), df, _detectable(judged, level) / 0.02)
    assert 0.95 <= caught <= 0.965


def test_what_would_have_been_caught_is_a_number_however_little_is_known() -> None:
    for df, level in ((1, 1e-4), (1, 1e-12), (2, 1e-15)):
        judged = Judged(Estimate(0.0, 0.5, df, 0.3, (4, 3)), 100.0, None, Effect(0.05, 0.0))
        assert np.isfinite(np.expm1(_detectable(judged, level)))


def test_a_small_share_of_the_budget_goes_to_small_stages() -> None:
    """Weighted Holm: the p-value that is enough depends on the share, and grows when others are rejected."""

    def one(share: float | None, change: float) -> Judged:
        return Judged(Estimate(change, 0.01, 8, 0.015, (5, 5)), 100.0, share, Effect(0.05, 0.0))

    # t = 6: p is 0.00016, enough for a whole share, not for a hundredth of one.
    found = decide(
        {"large": one(0.5, 0.06), "small": one(0.0005, 0.06), **{f"none {n}": one(0.5, 0.0) for n in range(3)}}
    )
    assert [found[key].verdict for key in ("large", "small", "none 1")] == [FAIL, INCONCLUSIVE, PASS]


def test_nothing_judged_is_no_pass() -> None:
    assert overall([]) == INCONCLUSIVE


# ---------------------------------------------------------------- what `make calibrate` draws


def test_comparisons_drawn_from_runs() -> None:
    before, after = runs_of(12, 8, Noise(0.01, 0.01, 0.02), prompts=12)
    pool = [*before, *after]
    rng = np.random.default_rng(12)
    same = draw(pool, 5, 20, rng)
    slower = draw(pool, 5, 20, rng, "prefill", 0.25)
    assert same.verdicts[FAIL] == 0 and same.comparisons == 20
    assert (slower.verdicts[FAIL], slower.named) == (20, 20)
    assert 0.005 < noise(pool)["prefill"][1] < 0.06
    with pytest.raises(ValueError, match="16 runs are too few"):
        draw(pool, 9, 1, rng)


def test_the_runs_that_are_asked_for_decide() -> None:
    """Planned for nine of ten, on runs that vary by too much for five a side to tell."""
    before, after = runs_of(3, 30, Noise(0.04), prompts=20)
    rng = np.random.default_rng(3)
    first = draw([*before, *after], 5, 40, rng, "prefill", 0.10)
    again = draw_as_asked([*before, *after], first, 20, rng)
    assert first.verdicts[INCONCLUSIVE] == len(first.needed) > 20 and min(first.needed) > 5
    assert again.comparisons == 20 and again.verdicts[INCONCLUSIVE] <= 4 and again.named == again.verdicts[FAIL] > 14


@pytest.mark.parametrize(("more", "kept"), [(0.25, True), (0.0, False)])
def test_the_page_of_steady_paces(more: float, kept: bool) -> None:
    """What is quiet and slower has to be found, and the page says whether it was."""
    before, slower = runs_of(12, 8, Noise(0.004, 0.004, 0.02), {"prefill": more}, prompts=40)
    lines, good = page([Paced("prefill", before, before[1:] + before[:1], slower)], 20)
    assert good is kept and f"| {20 * kept} of {20 * kept} |" in lines[-1]
    assert lines[-1].endswith(f"| {4 * kept} of 4 |")


def test_runs_in_a_row() -> None:
    before, after = runs_of(12, 8, Noise(0.01, 0.01, 0.02), {"prefill": 0.25}, prompts=12)
    found = in_a_row(before, after, 5, "prefill")
    assert (found.comparisons, found.named, len(found.noise)) == (4, 4, 4)
    assert all(0 < spread < 0.1 and verdict == FAIL for spread, verdict in found.noise)
    assert in_a_row(before, before[::-1], 8, "prefill").comparisons == 1
