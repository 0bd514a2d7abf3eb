"""GPU counters on a real server's spans: the card is a stub of the driver's library, everything else is real."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagetrace import load
from stagetrace.numbers import numbers
from tests.engine.conftest import Live, Starter
from tests.engine.serving import ClientResult, run_many
from tests.invariants import end_of, violations
from tests.nvml.stub import Card, Points, Script, extremes, integral
from tests.unit.helpers import wait_until

HZ = 4.0
PERIOD_S = 1 / HZ
LIBRARY = "libnvidia-ml"
REQUESTS = 104
#: Up and down for longer than the test takes, faster than a request and slower than a sample.
POWER: Points = [(t * 1.5, 120.0 + 500.0 * ((t * 7) % 11) / 10) for t in range(300)]
UTIL: Points = [(t * 2.0, float((t * 37) % 101)) for t in range(250)]


@pytest.fixture(scope="module")
def script() -> Script:
    return Script([Card(0, power=POWER, util=UTIL, curves={"throttle": [(0, 0.0), (1e6, 0.0)]})])


@pytest.fixture(scope="module")
def live(starter: Starter, script: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    variables = script.write(tmp_path_factory.mktemp("card"))
    # The engine has no GPU, and so no driver either; the collector sees the stub's.
    yield from starter.start("plain", traced=True, without=("LD_LIBRARY_PATH",), STAGETRACE_GPU_HZ=str(HZ), **variables)


@pytest.fixture(scope="module")
def answered(live: Live) -> list[ClientResult]:
    run_many(live.port, [live.body(50, 5, seed=90)], 1)
    bodies = [live.body(20 + 60 * (n % 3), 60 + 20 * (n % 7), seed=n % 5) for n in range(REQUESTS)]
    return run_many(live.port, bodies, 8)


@pytest.fixture(scope="module")
def records(live: Live, answered: list[ClientResult]) -> list[Any]:
    return live.records(answered)


def start_s(record: Any, script: Script, anchor: tuple[int, int]) -> float:
    """When a request began, on the script's clock."""
    return script.seconds(anchor[0] + record.start_unix_ns - anchor[1])


@pytest.fixture(scope="module")
def anchor() -> tuple[int, int]:
    from stagetrace.clock import anchor

    return anchor()


def test_every_long_stage_carries_the_cards_counters(
    records: list[Any], script: Script, anchor: tuple[int, int]
) -> None:
    """Each value lies between the smallest and the largest that the card had, a sampling period around it included."""
    long = 0
    for record in records:
        assert violations(record) == []
        for row in record.stages:
            if row.duration_ms is None:
                continue
            found, took_ms = row.attributes["gpu"], end_of(row, record) - row.start_ms
            if took_ms < PERIOD_S * 1e3:
                assert found == {"window": "shorter_than_sample"}, (row.key, took_ms, found)
                continue
            long += 1
            assert found["window"] == "sampled", found
            a = start_s(record, script, anchor) + row.start_ms / 1e3
            b = a + took_ms / 1e3
            # The sampler may be late by as much as the machine is busy: what it says is of that moment.
            low, high = extremes(POWER, a - 2 * PERIOD_S, b + 2 * PERIOD_S)
            assert low - 1 <= found["power_w"]["mean"] <= found["power_w"]["max"] <= high + 1
            low, high = extremes(UTIL, a - 2 * PERIOD_S, b + 2 * PERIOD_S)
            assert low - 1 <= 100 * found["utilization"]["mean"] <= 100 * found["utilization"]["max"] <= high + 1
            # Exact at the samples; between two, energy is spread evenly: at either end off by less than a period of
            # the difference in power there.
            swings = [extremes(POWER, t - 2 * PERIOD_S, t + 2 * PERIOD_S) for t in (a, b)]
            room = sum(high - low for low, high in swings) * PERIOD_S + 0.5
            assert abs(found["energy_j"] - integral(POWER, a, b)) <= room
            assert found["throttled"] is False
            # These are asked for every other time: a stage of less than that has none of them.
            slowly = (found["temperature_c"], found["memory_used_bytes"], found["sm_clock_mhz"])
            if took_ms > 3 * PERIOD_S * 1e3 or any(slowly):
                assert slowly == tuple(pytest.approx({"mean": value, "max": value}) for value in (55, 60e9, 1980))
    assert len(records) >= 100 and long >= 50, f"{long} stages of {len(records)} requests are longer than a sample"


def test_joules_of_requests_and_idle_are_the_cards(live: Live, records: list[Any], script: Script) -> None:
    trace = load(live.store)  # once: the card goes on being sampled
    document = numbers(trace)
    gpu = document["gpu"]
    assert document["context"]["gpu"] == script.cards[0].name
    first, last = (script.seconds(trace.gpu[i].t_ns) for i in (0, -1))
    true = integral(POWER, first, last)
    assert gpu["energy_j"] == pytest.approx(true, rel=0.02)
    assert gpu["requests_j"] + gpu["idle_j"] == pytest.approx(true, rel=0.02)
    assert 0 < gpu["idle_j"] < true and 0 < gpu["requests_j"] < true
    for record in records:
        assert record.gpu["joules"] > 0
        assert record.gpu["joules_per_output_token"] == pytest.approx(record.gpu["joules"] / record.output_tokens)


def test_idle_energy_belongs_to_no_request(live: Live, records: list[Any]) -> None:
    """After seconds of silence the requests' joules are what they were, and the card's have grown."""

    def of(trace: Any) -> float:
        return sum(r.gpu["joules"] for r in trace.requests)

    before = load(live.store)
    time.sleep(3)
    run_many(live.port, [live.body(20, 5, seed=3)], 1)
    time.sleep(2)
    after = load(live.store)
    assert sum(s.energy_j or 0 for s in after.gpu) - sum(s.energy_j or 0 for s in before.gpu) > 3 * 100
    (short,) = [r for r in after.requests if r.span_id not in {old.span_id for old in before.requests}]
    assert of(after) - of(before) == pytest.approx(short.gpu["joules"])
    assert short.gpu["joules"] <= 650 * short.e2e_ms / 1e3


def test_only_the_collector_has_the_drivers_library(live: Live, records: list[Any]) -> None:
    holders = {
        pid: command
        for pid, command in live.server.processes().items()
        if LIBRARY in Path(f"/proc/{pid}/maps").read_text()
    }
    assert list(holders) == [live.server.pid], holders
    inside = live.look_inside()
    assert {"API", "EngineCore", "Worker"} <= inside.keys()
    assert not [module for seen in inside.values() for module in seen["modules"] if module.startswith("stagetrace.gpu")]


# ---------------------------------------------------------------- cards and drivers that fail


def test_each_failure_leaves_the_server_and_the_other_counters_unharmed(
    starter: Starter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A card falls off the bus under load, one hides its energy, one may not be asked for its heat, one is slow."""
    folder = tmp_path_factory.mktemp("failing")
    script = Script([
        Card(0, power=POWER),
        Card(1, more=["lives 20"]),
        Card(2, more=["fail nvmlDeviceGetTotalEnergyConsumption 3 0"]),
        Card(3, more=["fail nvmlDeviceGetTemperature 4 0", "slow nvmlDeviceGetMemoryInfo 30000"]),
    ])  # fmt: skip
    serve = starter.start(
        "plain", traced=True, without=("LD_LIBRARY_PATH",), STAGETRACE_GPU_HZ=str(HZ), **script.write(folder)
    )
    live = next(serve)
    try:
        answered = run_many(live.port, [live.body(40, 80, seed=n % 4) for n in range(24)], 4)
        gone = script.cards[1].id
        wait_until(lambda: any(s.card == gone and s.power_w is None for s in load(live.store).gpu), "a card is lost")
        # Of more than a second: several looks at the cards lie in it, however busy the machine is.
        answered += run_many(live.port, [live.body(40, 400, seed=5)], 1)
        records = live.records(answered)
        log = live.server.log.read_text(errors="replace")
        assert {r.status for r in records} == {"ok"} and [v for r in records for v in violations(r)] == []
        by_card: dict[str, list[Any]] = {}
        for sample in load(live.store).gpu:
            by_card.setdefault(sample.card, []).append(sample)
    finally:
        serve.close()
    healthy, lost, dark, cold = (by_card[card.id] for card in script.cards)
    assert lost[-1].power_w is None and lost[-1].energy_j is None and len(lost) == 21
    assert lost[-2].power_w == 100.0
    assert len(healthy) > len(lost) and all(s.power_w is not None for s in healthy)
    assert all(s.energy_j == pytest.approx(100.0 * s.period_ns / 1e9, rel=0.05) for s in dark[1:]), "power by time"
    assert {s.temperature_c for s in cold} == {None} and {s.power_w for s in cold} == {100.0}
    for card, words in zip(
        script.cards[1:], ("does not answer any more", "not supported", "no permission"), strict=True
    ):
        lines = [line for line in log.splitlines() if line.startswith("stagetrace:") and card.id in line]
        assert len(lines) == 1 and words in lines[0], lines
    # What one of them does not know of a time, they do not know together.
    assert records[-1].gpu["joules"] is None and records[-1].gpu["throttled"] is False


def test_without_a_driver_everything_else_is_as_ever(starter: Starter) -> None:
    serve = starter.start("plain", traced=True, STAGETRACE_GPU_UUIDS="GPU-none")
    live = next(serve)
    try:
        (record,) = live.records(run_many(live.port, [live.body(40, 80)], 1))
        log = live.server.log.read_text(errors="replace")
    finally:
        serve.close()
    assert record.status == "ok" and record.gpu is None
    assert not [row.key for row in record.stages if "gpu" in row.attributes]
    said = [line for line in log.splitlines() if line.startswith("stagetrace:") and "GPU" in line]
    assert said == ["stagetrace: no GPU counters: there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)"]
