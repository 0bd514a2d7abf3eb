"""What the gate reads: baselines, and the wishes of ``.stagetrace.toml``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stagetrace.commands.gate import spread
from stagetrace.faults import Fault
from stagetrace.gate import output
from stagetrace.gate.baseline import read_runs, render, write_baseline
from stagetrace.gate.compare import compare
from stagetrace.gate.decide import FAIL, INCONCLUSIVE, PASS, USUAL_RUNS, Effect, kept
from stagetrace.gate.match import Sides
from stagetrace.gate.runs import Run
from stagetrace.gate.settings import Wishes, parse_budget, parse_effect, read_wishes
from stagetrace.model import RunRecord
from stagetrace.store import StoreWriter
from tests.unit.simulated import runs_of
from tests.unit.stored import request
from tests.unit.test_gate import CONFIG, QUIET, store

# ---------------------------------------------------------------- the baseline file


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    runs, _ = runs_of(3, 2, QUIET, prompts=4)
    path = tmp_path / "base.json"
    write_baseline(runs, path)
    again = read_runs(path)
    assert render(again) == path.read_text() == render(list(reversed(runs))), "whichever order they came in"
    for run, read in zip(runs, again, strict=True):
        assert (read.started_unix_ns, read.fingerprint) == (run.started_unix_ns, run.fingerprint)
        for key, each in run.requests.items():
            assert read.requests[key].ms == pytest.approx(dict(each.ms), rel=1e-3)
    assert "r0-0" not in path.read_text(), "no client's or server's id"
    assert max(len(line) for line in path.read_text().splitlines()) < 600
    (tmp_path / "other.json").write_text('{"mine": 1}')
    with pytest.raises(Fault, match="not overwritten"):
        write_baseline(runs, tmp_path / "other.json")


def test_loads_of_other_clients_are_paired_by_their_lengths(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a.db") as writer:
        writer.write_run(RunRecord("session", "paper", "1", "tiny", dict(CONFIG)))
        writer.write_requests([request(n, external_id=None, prompt_tokens=10 + n % 2) for n in range(6)])
    (run,) = read_runs(tmp_path / "a.db")
    assert sorted(run.requests) == [f"{10 + n % 2}+3#000{1 + n // 2}" for n in (0, 2, 4, 1, 3, 5)]
    assert run.fingerprint["concurrency"] is not None


@pytest.mark.parametrize(("apart_ms", "concurrency"), [(100, 1), (25, 2), (10, 4)])
def test_how_many_were_at_work_is_counted_where_the_client_does_not_say(
    tmp_path: Path, apart_ms: int, concurrency: int
) -> None:
    """Requests of 40 ms, one after the other."""
    started = 1_700_000_000_000_000_000
    with StoreWriter(tmp_path / "a.db") as writer:
        writer.write_run(RunRecord("session", "paper", "1", "tiny", dict(CONFIG)))
        writer.write_requests(
            [
                request(n, external_id=None, start_unix_ns=started + n * apart_ms * 1_000_000, e2e_ms=39.9)
                for n in range(20)
            ]
        )
    assert read_runs(tmp_path / "a.db")[0].fingerprint["concurrency"] == concurrency


def test_several_loads_in_one_store_are_several_runs(tmp_path: Path) -> None:
    runs, _ = runs_of(3, 2, QUIET, prompts=3)
    path = store(tmp_path / "both.db", runs[0])
    later = [
        request(100 + n, external_id=f"load-c1-abcdef01-{n:06d}", start_unix_ns=runs[1].started_unix_ns + n)
        for n in range(3)
    ]
    with StoreWriter(path) as writer:
        writer.write_run(RunRecord("session", "paper", "1.0", "tiny", dict(CONFIG), runs[0].started_unix_ns))
        writer.write_requests(later)
    found = read_runs(path)
    assert [len(run.requests) for run in found] == [3, 3]
    assert found[1].name.endswith("(abcdef01)")


# ---------------------------------------------------------------- wishes


def test_budgets() -> None:
    before, after = runs_of(3, 5, QUIET)
    sides = Sides(before, after)

    def verdict(text: str) -> str:
        return compare(sides, Wishes(budgets=(parse_budget(text),))).budgets[0].verdict

    assert verdict("ttft_p95 <= 10s") == PASS
    assert verdict("ttft_p95 <= 1ms") == FAIL
    assert compare(sides, Wishes(budgets=(parse_budget("prefill_p50 <= 1us"),))).verdict == FAIL
    few = Sides(before[:1], after[:1])
    assert compare(few, Wishes(budgets=(parse_budget("itl_p99 <= 1us"),))).budgets[0].verdict == INCONCLUSIVE
    row = compare(sides, Wishes(budgets=(parse_budget("itl_p99 <= 1us"),))).budgets[0]
    assert output.budget_words(replace(row, seen_ms=math.nan)) == "itl_p99 <= 1us: not seen in any run"
    unseen = Sides(*([_without_itl(run) for run in side] for side in (before, after)))
    report = compare(unseen, Wishes(budgets=(parse_budget("itl_p99 <= 1us"),)))
    assert (report.budgets[0].verdict, report.runs_needed) == (INCONCLUSIVE, None)  # no further runs would tell


def _without_itl(run: Run) -> Run:
    def without(ms: Mapping[str, float]) -> dict[str, float]:
        return {key: value for key, value in ms.items() if key != "itl_ms"}

    return replace(run, requests={key: replace(r, ms=without(r.ms)) for key, r in run.requests.items()})


def of_runs(*percentiles: float) -> np.ndarray:
    return np.array(percentiles)


def test_a_budget_is_kept_or_broken_only_if_that_is_sure() -> None:
    assert kept(of_runs(90, 91, 92, 91, 90), 100.0, 1) == (PASS, None)
    assert kept(of_runs(110, 111, 112, 111, 110), 100.0, 1) == (FAIL, None)
    assert kept(of_runs(95, 96), 100.0, 1) == (INCONCLUSIVE, USUAL_RUNS)  # below, and nothing known of the next run
    verdict, needed = kept(of_runs(80, 95, 110, 85, 100), 100.0, 1)
    assert verdict == INCONCLUSIVE and needed is not None and 5 < needed < 100
    assert kept(of_runs(99, 100, 101, 100, 100), 100.0, 1) == (INCONCLUSIVE, None)  # at the limit no number tells


def test_a_budget_broken_by_far_is_broken_however_few_and_noisy_the_runs() -> None:
    assert kept(of_runs(45, 59, 75), 1.0, 1) == (FAIL, None)
    assert kept(of_runs(0, 0, 0.001), 1.0, 1) == (PASS, None)


def test_more_budgets_do_not_make_more_false_alarms() -> None:
    seen = of_runs(101.0, 103.0, 106.0, 104.0, 105.0)
    assert kept(seen, 98.0, 1)[0] == FAIL
    assert kept(seen, 98.0, 20)[0] == INCONCLUSIVE


def test_a_budget_that_is_undecided_asks_for_runs() -> None:
    before, after = runs_of(3, 5, QUIET)
    runs = [[r.ms["e2e_ms"] for r in run.requests.values()] for run in after]
    middle = float(np.mean([np.percentile(each, 95) for each in runs])) + 0.5 * float(
        np.std([np.percentile(each, 95) for each in runs])
    )
    report = compare(Sides(before, after), Wishes(budgets=(parse_budget(f"e2e_p95 <= {middle:.3f}ms"),)))
    assert [row.verdict for row in report.budgets] == [INCONCLUSIVE]
    assert report.verdict == INCONCLUSIVE and (report.runs_needed or 0) > 5


def test_the_file_of_wishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_wishes(None) == Wishes()
    path = tmp_path / ".stagetrace.toml"
    path.write_text(
        '[gate]\neffect = "10%"\nbudgets = ["ttft_p95 <= 0.2 s"]\nallow = ["gpu"]\n'
        '[gate.effects]\nadmission = "20ms"\nitl = "3%, 0.1ms"\n'
    )
    wishes = read_wishes(None)
    assert wishes.effects == {"admission": Effect(0.0, 20.0), "itl_ms": Effect(0.03, 0.1)}
    assert (wishes.relative, wishes.allow, wishes.budgets[0].most_ms) == (0.10, ("gpu",), 200.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gate", ".stagetrace.toml: "),
        ("gate = 1", "gate is a table"),
        ("[gate]\nbudget = []", "[gate] has no budget; there are: allow, budgets, effect, effects"),
        ('[gate]\nbudgets = ["ttft < 3"]', 'budget "ttft < 3": write it as ttft_p95 <= 200ms'),
        ('[gate]\nbudgets = ["speed_p95 <= 3ms"]', "speed: no timer or stage; there are: "),
        ('[gate]\nbudgets = "x"', "budgets is a list"),
        ('[gate]\neffect = "fast"', 'effect "fast": write it as'),
        ('[gate]\neffect = "5ms"', "for all stages a percentage"),
        ("[gate]\neffects = 5", "effects is a table: [gate.effects]"),
        ('[gate.effects]\nwarp = "5%"', "warp: no timer or stage"),
    ],
)
def test_wishes_that_cannot_be_read(text: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".stagetrace.toml").write_text(text)
    with pytest.raises(Fault) as caught:
        read_wishes(None)
    assert named in str(caught.value)
    with pytest.raises(Fault, match=r"--config gone.toml: there is no such file"):
        read_wishes(Path("gone.toml"))


def test_effects() -> None:
    assert parse_effect("5%") == Effect(0.05, 0.0)
    assert parse_effect("1.5 ms") == Effect(0.0, 1.5)


def test_options_that_take_several_words() -> None:
    assert spread(["--baseline", "a", "b", "--explain", "--current", "c", "d"]) == [
        "--baseline", "a", "--baseline", "b", "--explain", "--current", "c", "--current", "d",
    ]  # fmt: skip
    assert spread(["--current"]) == ["--current"]
