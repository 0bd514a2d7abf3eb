"""Samples over windows of time, and whose energy it was: on an engine of marks, with cards whose truth is known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from stagetrace import marks
from stagetrace.assemble import Assembler
from stagetrace.assemble.book import Book
from stagetrace.gpu import sampler as sampling
from stagetrace.gpu.account import account
from stagetrace.gpu.energy import intervals
from stagetrace.gpu.history import History
from stagetrace.gpu.join import Join
from stagetrace.gpu.nvml import Reading
from stagetrace.gpu.watch import CARDS_ENV, HZ_ENV, Watch
from stagetrace.marks import Mark, TextMark
from stagetrace.model import GpuSample, RequestRecord
from stagetrace.store import Trace
from tests.invariants import check_all
from tests.unit.helpers import wait_until
from tests.unit.scripted import MS, US, WORKER, Ask, Script
from tests.unit.stored import card_sample

S = 1_000 * MS
#: Of the samples below.
PERIOD = 20 * MS


def readings(card: str = "GPU-0", until: int = 2 * S, period: int = PERIOD, **values: Any) -> list[Reading]:
    """A card at 200 W, or as ``values`` say (a function of the time where they are one)."""
    made = []
    for t in range(-S, until, period):
        now = {name: value(t) if callable(value) else value for name, value in values.items()}
        energy = 200.0 * period / 1e9 if t > -S else None
        sample = card_sample(card=card, t_ns=t, period_ns=period, power_w=200.0, energy_j=energy, throttle=0)
        for name, value in now.items():
            setattr(sample, name, value)
        made.append(Reading(sample, []))
    return made


def history(*cards: Iterable[Reading], period: int = PERIOD) -> History:
    made = History()
    made.period_ns = period
    for each in cards:
        made.add(each)
    return made


# ---------------------------------------------------------------- windows


def test_a_window_has_mean_maximum_and_energy() -> None:
    seen = history(readings(utilization=lambda t: t / S if t > 0 else 0.0))
    found = seen.over((200 * MS, 600 * MS))
    assert found["window"] == "sampled" and found["cards"] == "GPU-0"
    # Each value stands for the time before it: on a straight line, half a period too much.
    assert found["utilization"]["mean"] == pytest.approx(0.4 + 0.01)
    assert found["utilization"]["max"] == pytest.approx(0.6)
    assert found["energy_j"] == pytest.approx(200 * 0.4)
    assert found["power_w"] == {"mean": pytest.approx(200.0), "max": 200.0}
    assert found["throttled"] is False and found["throttle_reasons"] is None


@pytest.mark.parametrize(("length", "window"), [(PERIOD - US, "shorter_than_sample"), (PERIOD, "sampled")])
def test_a_window_shorter_than_a_sample_says_so_and_nothing_else(length: int, window: str) -> None:
    found = history(readings()).over((MS, MS + length))
    assert found["window"] == window and (len(found) == 1) == (window != "sampled")


def test_where_the_driver_keeps_finer_ones_a_shorter_window_has_those() -> None:
    fine = [(t, 300.0 + t / S) for t in range(0, S, 2 * MS)]
    made = readings()
    made[60] = made[60]._replace(power=fine)
    found = history(made).over((100 * MS, 110 * MS))
    assert found["power_w"]["mean"] == pytest.approx(300.106) and found["window"] == "sampled"
    assert found["utilization"] is None, "not in so short a time"
    assert history(made).over((100 * MS, 101 * MS)) == {"window": "shorter_than_sample"}


def test_what_is_asked_for_more_rarely_is_not_taken_for_newer_than_it_is() -> None:
    made = [each._replace(whole=index % 2 == 0) for index, each in enumerate(readings())]
    seen = history(made)
    found = seen.over((MS, MS + PERIOD + MS))
    assert found["power_w"] and found["utilization"] and found["memory_used_bytes"] is None
    assert seen.over((MS, MS + 2 * PERIOD))["memory_used_bytes"] == {"mean": 60e9, "max": 60_000_000_000}


def test_what_a_card_does_not_say_is_null() -> None:
    found = history(readings(power_w=None, energy_j=None, throttle=None, sm_active=None)).over((0, 100 * MS))
    assert (found["power_w"], found["energy_j"], found["throttled"]) == (None, None, None)
    assert found["utilization"] and found["window"] == "sampled" and "sm_active" not in found
    assert found["dram_active"] == {"mean": pytest.approx(0.6), "max": 0.6}


def test_samples_that_end_early_are_stale_and_a_card_that_never_spoke_is_none() -> None:
    seen = history(readings(until=500 * MS))
    found = seen.over((300 * MS, 900 * MS))
    assert found["window"] == "stale" and found["energy_j"] is None, "of a part of it nothing is known"
    assert found["power_w"]["mean"] == 200.0
    assert seen.over((700 * MS, 900 * MS)) == {"window": "none"}
    assert History().over((0, S)) == {"window": "none"}


def test_a_pause_between_samples_is_a_hole() -> None:
    kept = [each for each in readings() if not 200 * MS < each.sample.t_ns < 800 * MS]
    assert history(kept).over((100 * MS, 900 * MS))["window"] == "stale"


def test_several_cards_add_up_what_adds_up() -> None:
    two = history(readings(utilization=0.4), readings("GPU-1", utilization=0.8, throttle=0x44, power_w=300.0))
    found = two.over((0, 100 * MS))
    assert found["utilization"] == {"mean": pytest.approx(0.6), "max": 0.8}
    assert found["power_w"] == {"mean": pytest.approx(500.0), "max": 500.0}
    assert found["energy_j"] == pytest.approx(2 * 20.0)
    assert found["memory_used_bytes"]["max"] == 120e9 and found["cards"] == "GPU-0,GPU-1"
    assert found["throttled"] and found["throttle_reasons"] == "sw_power_cap,hw_thermal_slowdown"
    assert two.over((0, 100 * MS), ["GPU-0"])["throttled"] is False
    assert history(readings(), readings("GPU-1", power_w=None)).over((0, S))["power_w"] is None


def test_what_is_old_is_forgotten_and_what_is_needed_is_not() -> None:
    seen = history(readings())
    before = seen.over((S, S + 200 * MS))
    seen.forget(S)
    track = seen.tracks["GPU-0"]
    assert len(track.samples) <= S / PERIOD + 2
    assert seen.over((S, S + 200 * MS)) == {**before, "energy_j": pytest.approx(before["energy_j"])}


# ---------------------------------------------------------------- stages and requests


def joined(script: Script, seen: History, cards: Sequence[str] = ("GPU-0",)) -> tuple[Assembler, list[RequestRecord]]:
    assembler = script.assembler()
    assembler.gpu = Join(assembler.book, seen, lambda engine: list(cards), print)
    for mark, pid in script.read():
        assembler.take(mark, pid)
    return assembler, script.settle(assembler)


#: Every way a request can go, under both kinds of scheduling.
ASKS = (
    Ask(output=12), Ask(at=MS, prompt=150, output=30), Ask(at=2 * MS, output=20, stop_at=6, stop_lag=3),
    Ask(at=3 * MS, output=40, evict=(5,), out=3), Ask(at=5 * MS, n=2, output=9), Ask(at=4 * MS, refuse="body"),
    Ask(at=6 * MS, output=60, abort_at=90 * MS), Ask(at=7 * MS, kind="embedding"), Ask(at=700 * MS, output=8),
)  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_joules_of_requests_and_idle_are_the_cards(depth: int, drafts: int) -> None:
    script = Script(depth=depth, slots=4, drafts=drafts).run(*ASKS)
    seen = history(readings(until=6 * S))
    assembler, records = joined(script, seen)
    check_all(records)
    steps = list(assembler.book.steps.values())
    working = sum(seen.joules(span) or 0.0 for _, span in intervals(steps))
    shares = [r.gpu["joules"] for r in records if r.gpu and r.gpu["joules"] is not None]
    assert sum(shares) == pytest.approx(working, rel=1e-9)
    assert len(shares) == sum(1 for r in records if r.engine is not None)
    busy_ns = sum(b - a for _, (a, b) in intervals(steps))
    assert 0 < working == pytest.approx(200.0 * busy_ns / 1e9)
    whole = seen.joules((0, 5 * S)) or 0.0
    assert whole == pytest.approx(1000.0) and working < whole / 2, "the rest was idle, and nobody's"


def test_a_steps_energy_is_shared_by_tokens() -> None:
    script = Script(budget=64).run(Ask(prompt=40, output=1), Ask(prompt=10, output=1))
    assembler, (long, short) = joined(script, history(readings()))
    assert [step.tokens for step in assembler.book.steps.values() if step.tokens] == [50]
    assert long.gpu and short.gpu
    assert long.gpu["joules"] == pytest.approx(4 * short.gpu["joules"])
    assert long.gpu["joules_per_output_token"] == long.gpu["joules"]


def test_intervals_of_steps_do_not_overlap_where_they_are_composed_ahead() -> None:
    assembler, _ = joined(Script(depth=2, slots=4).run(*ASKS), history(readings()))
    spans = [span for _, span in intervals(assembler.book.steps.values())]
    assert spans == sorted(spans) and all(a[1] <= b[0] for a, b in pairwise(spans))


def test_each_stage_with_times_has_its_window() -> None:
    seen = history(readings())
    _, records = joined(Script().run(Ask(prompt=150, output=30)), seen)
    (record,) = records
    for row in record.stages:
        assert ("gpu" in row.attributes) == (row.duration_ms is not None)
    start = (record.stage("decode").start_ms or 0) * 1e6
    window = (round(start), round(start + (record.stage("decode").duration_ms or 0) * 1e6))
    assert record.stage("decode").attributes["gpu"] == seen.over(window)
    assert record.stage("tokenize").attributes["gpu"] == {"window": "shorter_than_sample"}


def test_a_prefill_in_pieces_is_looked_at_as_a_whole() -> None:
    _, records = joined(Script(budget=16).run(Ask(prompt=150)), history(readings()))
    row = records[0].stage("prefill")
    spent = (row.duration_ms or 0) + row.attributes["gaps_ms"] + (records[0].stage("embedding").duration_ms or 0)
    assert row.attributes["gpu"]["energy_j"] == pytest.approx(200.0 * spent / 1e3)


def test_without_a_card_records_are_as_ever() -> None:
    for seen, cards in ((History(), ["GPU-0"]), (history(readings()), [])):
        _, (record,) = joined(Script().run(Ask()), seen, cards)
        assert record.gpu is None and not [row for row in record.stages if "gpu" in row.attributes]


def test_what_is_not_known_of_a_request_is_null() -> None:
    _, (record,) = joined(Script().run(Ask()), history(readings(energy_j=None)))
    assert record.gpu is not None
    assert record.gpu["joules"] is None and record.gpu["joules_per_output_token"] is None
    assert record.gpu["throttled"] is False and record.gpu["cards"] == "GPU-0"


def test_a_call_waits_for_the_samples_up_to_its_end_but_not_for_ever() -> None:
    script = Script().run(Ask(output=30))
    late = max(written[0] for written in script.written) + 2 * S
    for until, waits in ((S // 100, 2), (10 * S, 0)):
        assembler = script.assembler()
        seen = history(readings(until=until))
        assembler.gpu = Join(assembler.book, seen, lambda engine: ["GPU-0"], print)
        for mark, pid in script.read():
            assembler.take(mark, pid)
        assembler.steps()
        assert not assembler.finished(late)
        assert len(assembler.finished(late + 200 * MS)) == (0 if waits else 1)
        if waits:
            (record,) = assembler.finished(late + 3 * S)
            assert record.gpu and record.gpu["joules"] is None
            assert record.stage("decode").attributes["gpu"] == {"window": "none"}
    seen.tracks["GPU-0"].gone = True
    assert seen.reached(1 << 62), "a card that is lost is not waited for"


def test_a_fault_of_ours_costs_the_counters_and_no_record() -> None:
    said: list[str] = []

    def faulty(engine: int | None) -> list[str]:
        raise ZeroDivisionError("a fault")

    script = Script().run(Ask(), Ask(at=MS))
    assembler = script.assembler()
    assembler.gpu = Join(assembler.book, history(readings()), faulty, said.append)
    for mark, pid in script.read():
        assembler.take(mark, pid)
    records = script.settle(assembler)
    check_all(records)
    assert len(records) == 2 and [r.gpu for r in records] == [None, None]
    assert said == ["GPU counters are not joined any more (ZeroDivisionError: a fault); recording goes on"]


# ---------------------------------------------------------------- which cards, and whose


class FakeCard:
    """A card that always says the same."""

    def __init__(self, ident: str) -> None:
        self.id, self.name = ident, "A card"

    def read(self) -> Reading:
        return Reading(card_sample(card=self.id, t_ns=time.monotonic_ns()), [])

    def faults(self) -> list[str]:
        return []


class FakeDriver:
    def card(self, ident: str) -> FakeCard:
        return FakeCard(ident)

    def close(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "Driver", FakeDriver)


def book(*reports: str, engines: dict[int, int] | None = None) -> Book:
    """With what workers of processes 50, 51, ... have said, and engines by the process that reports its steps."""
    made = Book()
    for pid, text in enumerate(reports, 50):
        made.take(TextMark(1, marks.GPU, 0, text), pid)
    for engine, pid in (engines or {}).items():
        made.take(Mark(2, marks.EXECUTE, engine << 32, 1, 2, 0, 0), pid)
    made.settings["engine"] = "paper"
    return made


def watched(of: Book, **environment: str) -> tuple[Watch, list[str], list[GpuSample]]:
    said: list[str] = []
    watch, samples = Watch(said.append, environment), []

    def all_there() -> bool:
        samples.extend(watch.poll(of))
        return bool(samples)

    wait_until(all_there, "a sample")
    samples.extend(watch.close())
    return watch, said, samples


def cards_of(watch: Watch, of: Book, engine: int) -> list[str]:
    return watch._cards_of(of, engine)


def test_several_ranks_and_engines_have_their_own_cards(fake: None) -> None:
    reports = [f"{engine} {rank} GPU-{engine}{rank} A card" for engine in (0, 1) for rank in (0, 1)]
    of = book(*reports, "half a", engines={700: 50, 701: 52})
    watch, said, samples = watched(of)
    assert {s.card for s in samples} == {"GPU-00", "GPU-01", "GPU-10", "GPU-11"} and not said
    assert cards_of(watch, of, 700) == ["GPU-00", "GPU-01"] and cards_of(watch, of, 701) == ["GPU-10", "GPU-11"]
    assert watch.names()["GPU-10"] == "A card"


def test_cards_that_a_person_names_are_the_only_engines(fake: None) -> None:
    of = book()
    of.last_step[700] = 1
    watch, said, _ = watched(of, **{CARDS_ENV: " GPU-a , GPU-b,"})
    assert cards_of(watch, of, 700) == ["GPU-a", "GPU-b"] and not said
    of.last_step[701] = 1
    assert cards_of(watch, of, 700) == [], "whose they are cannot be said"


def test_nothing_is_loaded_before_there_is_an_engine_and_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(sampling, "Driver", never)
    said: list[str] = []
    for of, environment in ((Book(), {CARDS_ENV: "GPU-a"}), (book(), {}), (book("0 0 GPU-a x"), {HZ_ENV: "0"})):
        watch = Watch(said.append, environment)
        assert watch.poll(of) == [] and watch.close() == []
    assert said == []


def test_a_worker_that_cannot_name_its_card_is_said_once() -> None:
    said: list[str] = []
    script = Script(device="launches").run(Ask())
    assembler = script.assembler()
    for mark, pid in script.read():
        assembler.take(mark, pid)
    assembler.take(TextMark(1, marks.GPU, 0, "0 0 - A card"), WORKER)
    watch = Watch(said.append, {})
    assert watch.poll(assembler.book) == watch.poll(assembler.book) == []
    assert said == [f"no GPU counters: no worker has said which card is its own; name it: {CARDS_ENV}=GPU-..."]


@pytest.mark.parametrize("text", ["5", "-1", "0.5", "fast", "nan"])
def test_a_rate_that_is_none_is_said(text: str) -> None:
    said: list[str] = []
    assert Watch(said.append, {HZ_ENV: text})._hz == 2.0
    assert said == [f"{HZ_ENV}={text}: give a number from 1 to 4, or 0 for never; 2 is used"]
    assert Watch(said.append, {HZ_ENV: "1.5"})._hz == 1.5 and len(said) == 1


def test_a_driver_that_hangs_is_said_once_and_takes_its_values_away(fake: None) -> None:
    of = book("0 0 GPU-a A card")
    watch, said, _ = watched(of)
    assert watch._sampler is not None
    watch._sampler.asked_at = 1.0  # hours ago
    (silent,) = watch.poll(of)
    assert silent == GpuSample("GPU-a", silent.t_ns, name="A card")
    assert watch.poll(of) == [] and len(said) == 1 and "has not answered for 10 s" in said[0]


def test_the_account_of_a_store() -> None:
    script = Script(slots=4).run(*ASKS)
    made = readings(until=6 * S)
    assembler, records = joined(script, history(made))
    trace = Trace(records, list(assembler.book.steps.values()), gpu=[each.sample for each in made])
    found = account(trace)
    assert found and found["energy_j"] == pytest.approx(200.0 * 7, rel=0.01)
    assert found["requests_j"] == pytest.approx(found["computing_j"])
    assert found["idle_j"] + found["requests_j"] == pytest.approx(found["energy_j"])
    assert found["cards"][0]["power_w"]["p50"] == 200.0 and found["throttled_requests"] == 0
    assert account(Trace(records, trace.steps)) is None


def test_several_engines_have_each_the_energy_of_its_own_cards() -> None:
    """Two at work at once, on a card each: what one card used is not the other engine's, too."""
    script = Script(slots=4).run(*ASKS)
    made = readings(until=6 * S)
    assembler, records = joined(script, history(made))
    steps = list(assembler.book.steps.values())
    ours = records[0].engine
    assert ours is not None

    def traced(other: str | None) -> Trace:
        twins = [replace(step, engine=ours + 1) for step in steps]
        theirs = [replace(r, engine=ours + 1, gpu={**(r.gpu or {}), "cards": other}) for r in records]
        samples = [each.sample for each in made]
        return Trace(
            [*records, *theirs], [*steps, *twins], gpu=[*samples, *(replace(s, card="GPU-b") for s in samples)]
        )

    found, alone = account(traced("GPU-b")), account(Trace(records, steps, gpu=[each.sample for each in made]))
    assert found and alone
    assert found["computing_j"] == pytest.approx(2 * alone["computing_j"]) == pytest.approx(found["requests_j"])
    assert found["idle_j"] == pytest.approx(2 * alone["idle_j"])
    for unknown in (None, made[0].sample.card):
        told = account(traced(unknown))
        assert told and told["computing_j"] is told["idle_j"] is None, "nobody knows whose card is whose, or they share"


def test_throttling_that_no_sample_tells_of_is_unknown() -> None:
    made = readings(until=6 * S)
    assembler, records = joined(Script(slots=4).run(*ASKS), history(made))
    for record in records:
        record.gpu = {**(record.gpu or {}), "throttled": None}
    found = account(Trace(records, list(assembler.book.steps.values()), gpu=[each.sample for each in made]))
    assert found and found["throttled_requests"] is None
