"""The fault bench without a server: the control file, whom a call concerns, and what a row is judged by."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace.model import RequestRecord, empty_stages
from tests.faults.measure import FAIL, LIMITS, PASS, UNCLEAR, Pair, Row, met, times
from tests.faults.modes import slope
from tests.faults.moved import ONCE, Moved, earlier
from tests.faults.plugin.stagetrace_faults import calls, control
from tests.faults.plugin.stagetrace_faults.control import Control, Fault
from tests.faults.plugin.stagetrace_faults.places import GAPS, PLACES, STAGES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "faults.json"


def test_what_is_written_holds_at_once(path: Path) -> None:
    seen = Control(str(path))
    assert seen.fault() is None
    numbers = [control.write(path, Fault("prefill", size, "slow-")) for size in (5.0, 20.0)]
    assert seen.fault() == Fault("prefill", 20.0, "slow-", number=numbers[1])
    control.write(path, Fault("decode", 5.0))
    assert seen.fault().place == "decode"
    control.write(path, None)
    assert seen.fault() is None
    assert sorted(os.listdir(path.parent)) == [path.name]


def test_a_file_that_says_nothing_is_said_once_and_delays_nobody(path: Path, capsys: pytest.CaptureFixture) -> None:
    path.write_text('{"place": "prefill"}')
    seen = Control(str(path))
    assert seen.fault() is None and seen.fault() is None
    assert capsys.readouterr().err.count("delay_ms") == 1


def test_a_delay_is_as_long_as_asked_and_noted(path: Path) -> None:
    seen = Control(str(path))
    number = control.write(path, Fault("sample", 3.0))
    seen.delay(seen.fault(), ["chatcmpl-slow-1-0a"], 2)
    (note,) = control.notes(path)
    assert (note.number, note.place, note.requests) == (number, "sample", ("chatcmpl-slow-1-0a",))
    assert note.ms >= 6.0


@pytest.mark.parametrize("fault", [Fault("decode", -1.0), Fault("decode", 1.0, grow="often")])
def test_no_such_delay(path: Path, fault: Fault) -> None:
    with pytest.raises(ValueError):
        control.write(path, fault)


def test_there_is_one_place_for_each_stage_and_the_rest_are_parts() -> None:
    assert len(STAGES) == 12 and len(GAPS) == 3
    for place in PLACES.values():
        assert place.name in (*STAGES, *GAPS) or place.name.partition(".")[0] == place.lands


def scheduled(**generated: int | None) -> Any:
    """A step of these requests; None for one that was not running before."""
    running = {name: n for name, n in generated.items() if n is not None}
    cached = SimpleNamespace(req_ids=list(running), num_output_tokens=list(running.values()))
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(generated, 1), scheduled_cached_reqs=cached)


def test_whose_step_it_is() -> None:
    step = calls.Step.of(scheduled(new=None, chunk=0, second=1, third=2))
    assert step.hit(further=False) == calls.Hit({"new": 0, "chunk": 0}, 4)
    assert step.hit(further=True) == calls.Hit({"third": 2}, 4), "its second token is made before the first is out"
    assert calls.Step.of(scheduled(second=1)).hit(further=False) is None


def test_a_step_is_delayed_once_at_each_place() -> None:
    calls.Now.step = calls.Step.of(scheduled(new=None))
    who = calls.in_step(further=False)
    hits = [who(calls.Call(place, None, (), {})) for place in ("prefill", "prefill", "sample")]
    assert [hit is not None for hit in hits] == [True, False, True]


def request(**took: float) -> RequestRecord:
    """A request of 12 ms, but for the stages that took as long as ``took`` says."""
    stages = empty_stages("measured")
    for stage in stages:
        stage.duration_ms = took.get(stage.key, 1.0)
    stages[3].attributes["wait_ms"] = took.get("wait", 0.5)
    stages[10].attributes["split_ms"] = {"forward": took.get("forward", 0.5)}
    return RequestRecord(
        "", None, "", "chat", None, "ok", None, None, 1, 0, 1, 0, None, None, None, None, None, {}, None, None,
        took.get("unattributed", 1.0), 0, 0, stages, gaps_ms={"dispatch": took.get("dispatch", 0.25)},
    )  # fmt: skip


def judged(name: str, injected: float, *delayed: dict[str, float]) -> Row:
    """A row of requests with these times beside the usual one; their client has seen all of it."""
    pairs = [(request(), request(**each)) for each in delayed]
    seen = [sum(times(after).values()) - sum(times(before).values()) for before, after in pairs]
    made = [Pair(before, after, injected, client) for (before, after), client in zip(pairs, seen, strict=True)]
    return Row(PLACES[name], injected, LIMITS, made)


@pytest.mark.parametrize(
    ("name", "took", "verdict"),
    [
        ("prefill", {"prefill": 21.0}, PASS),
        ("prefill", {"prefill": 22.9, "decode": 1.9}, PASS),
        ("prefill", {"prefill": 23.2}, FAIL),  # 2.2 ms more than injected
        ("decode", {"decode": 24.0, "forward": 20.1}, PASS),  # what followed from it is in the stage, too
        ("decode", {"decode": 24.0, "forward": 23.1}, FAIL),
        ("prefill", {"prefill": 1.0, "decode": 21.0}, FAIL),
        ("prefill", {"prefill": 21.0, "decode": 1.6, "lm_head": 0.5}, FAIL),  # 1.1 ms elsewhere, though it cancels out
        ("prefill", {"prefill": 21.0, "unattributed": 2.2}, FAIL),
        ("admission", {"admission": 21.0, "wait": 20.5}, PASS),
        ("admission", {"admission": 21.0}, FAIL),  # not where in the stage it was
        ("dispatch", {"unattributed": 21.0, "dispatch": 20.25}, PASS),
        ("dispatch", {"unattributed": 21.0}, FAIL),  # another gap
    ],
)
def test_a_row_is_judged_by_where_the_time_is(name: str, took: dict[str, float], verdict: str) -> None:
    assert judged(name, 20.0, *[took] * 5).verdict == verdict


def test_up_to_a_millisecond_is_noise() -> None:
    assert judged("sample", 5.0, *[{"sample": 6.9, "decode": 1.9}] * 5).verdict == PASS
    assert judged("sample", 5.0, *[{"sample": 7.1}] * 5).verdict == FAIL


def test_beyond_the_limit_but_not_surely_is_unclear() -> None:
    off = [{"prefill": 21.0 + error} for error in (0.5, 1.0, 2.5, 2.6, 3.0)]
    row = judged("prefill", 20.0, *off)
    assert row.site.value == pytest.approx(22.5)
    assert row.verdict == UNCLEAR


def test_a_delay_that_did_not_happen_proves_nothing() -> None:
    delays = {"chatcmpl-delayed-000002-0a": [5.0, 5.1], "delayed-000004": [5.0]}
    assert met(delays, "delayed-000002", "decode", 2) == pytest.approx(10.1)
    for name, due in (("delayed-000002", 1), ("delayed-000006", 1)):
        with pytest.raises(RuntimeError, match=name):
            met(delays, name, "decode", due)


def test_a_change_that_the_client_has_not_seen_has_not_landed() -> None:
    row = judged("prefill", 20.0, *[{"prefill": 21.0}] * 5)
    row.pairs = [replace(pair, client_ms=12.0) for pair in row.pairs]
    assert row.judged()[0] == (FAIL, "prefill")


def test_slope_of_a_line_with_an_outlier() -> None:
    assert slope([2.0, 3.0, 4.0, 90.0, 6.0, 7.0]) == pytest.approx(1.0)


def beside(control: dict[str, float], delayed: dict[str, float]) -> Moved:
    """Five pairs, delayed by 20 ms at ``prefill`` and, the controls, at ``embedding``."""
    pair = Pair(request(**control), request(**delayed), 20.0, 0.0)
    return Moved(PLACES["prefill"], 20.0, LIMITS, [pair] * 5, other=PLACES["embedding"])


def test_what_follows_from_any_wait_cancels_out_beside_a_control_that_waited() -> None:
    after = {"decode": 2.0, "detokenize": 1.8}  # more than 1 ms elsewhere, were the control not delayed
    assert beside({"embedding": 21.0, **after}, {"prefill": 21.0, **after}).verdict == PASS
    assert beside({"embedding": 21.0}, {"prefill": 21.0, **after}).verdict == FAIL


def test_a_delay_beside_a_delayed_control_is_in_the_one_and_not_in_the_other() -> None:
    assert beside({"embedding": 21.0}, {"prefill": 21.0, "embedding": 21.0}).judged()[1] == (FAIL, "embedding")
    assert beside({"embedding": 21.0}, {"lm_head": 21.0}).judged()[0] == (FAIL, "prefill")


def test_each_place_is_beside_one_that_the_same_request_can_be_delayed_at() -> None:
    assert earlier("http_receive") == "chat_template"
    assert earlier("prefill") == "embedding"
    assert earlier("teardown") == "result"  # it needs a further token, which `detokenize` may not have
    assert set(ONCE) == {*STAGES, *GAPS} - {"decode"}
