"""Cards read through the real bindings from a stub of the driver's library: each thing that can be wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace.gpu.nvml import Card as DriverCard
from stagetrace.model import GpuSample
from tests.nvml.stub import Card, Script, integral, library, uuid
from tests.unit.helpers import DEADLINE_S, plain_environment
from tests.unit.scripted import MS

#: Samples the cards in the environment until each that still answers has said so much, and prints what it got.
CODE = """
import json, os, sys, time
from dataclasses import asdict
from stagetrace.gpu.sampler import Sampler

said, rounds = [], int(sys.argv[1])
sampler = Sampler(4.0, said.append)
sampler.want(os.environ["STAGETRACE_GPU_UUIDS"].split(","))
sampler.start()
until = time.monotonic() + 60
def enough():
    counts = [sum(r.sample.card == card for r in list(sampler.readings)) for card in list(sampler.cards)]
    nothing = said and not counts and not sampler._wanted
    return sampler.over or nothing or (counts and min(counts) >= rounds)
while not enough() and time.monotonic() < until:
    time.sleep(0.01)
interval = sampler.interval_s
sampler.stop(10)
print(json.dumps({"samples": [asdict(r.sample) for r in sampler.readings], "ids": sampler.ids, "interval_s": interval,
                  "points": [[r.sample.card, r.power] for r in sampler.readings], "said": said, "over": sampler.over}))
"""


@dataclass
class Seen:
    """What a sampler made of a script."""

    said: list[str]
    ids: dict[str, str]
    interval_s: float
    over: bool
    calls: dict[str, int]
    samples: dict[str, list[GpuSample]] = field(default_factory=lambda: defaultdict(list))
    points: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def lines(self, about: str) -> list[str]:
        return [line for line in self.said if about in line]


class FakeNvml(SimpleNamespace):
    """A driver that supports nothing but what it is given."""

    class NVMLError(Exception):
        value = 3

    def __getattr__(self, name: str) -> Any:
        def unsupported(*_: object) -> None:
            raise self.NVMLError

        return unsupported


def sample(folder: Path, script: Script, rounds: int = 5, **environment: str) -> Seen:
    folder.mkdir(exist_ok=True)
    variables = {**plain_environment(), **script.write(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(rounds)], env=variables, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    calls = script.calls(folder) if (folder / "calls.txt").exists() else {}
    seen = Seen(found["said"], found["ids"], found["interval_s"], found["over"], calls)
    for each in found["samples"]:
        seen.samples[each["card"]].append(GpuSample(**each))
    for card, points in found["points"]:
        seen.points[card] += [(time, watts) for time, watts in points]
    return seen


HEALTHY, NO_ENERGY, NO_PERMISSION, MOODY, LOST, WRAPS, KEEPS, OLD = (uuid(number) for number in range(8))
SLICE = "MIG-77777777-0000-1111-2222-333344445555"
RISING = [(0, 100.0), (30, 700.0)]


@pytest.fixture(scope="module")
def script() -> Script:
    """One machine with everything in it."""
    return Script([
        Card(0, power=RISING, curves={"throttle": [(0, 0x4)], "gpm2": [(0, 77.0)], "gpm10": [(0, 44.0)]}, more=["gpm"]),
        Card(1, power=RISING, more=["fail nvmlDeviceGetTotalEnergyConsumption 3 0"]),
        Card(2, more=["fail nvmlDeviceGetTemperature 4 0", "fail nvmlDeviceGetClockInfo 4 0"]),
        Card(3, more=["fail nvmlDeviceGetMemoryInfo 999 0"]),
        Card(4, more=["lives 3"]),
        Card(5, power=[(0, 200.0)], more=["begin 199900", "wrap 200000"]),
        Card(6, power=RISING, more=["keeps power 20"]),
        Card(7, more=["fail nvmlDeviceGetUtilizationRates 3 0", f"mig {SLICE} 3 0", "at memused 0 5e9"]),
    ])  # fmt: skip


@pytest.fixture(scope="module")
def seen(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    names = [card.id for card in script.cards[:7]] + [SLICE, "MIG-" + uuid(7) + "/3/0", uuid(7), "GPU-none"]
    return sample(tmp_path_factory.mktemp("all"), script, STAGETRACE_GPU_UUIDS=",".join(names))


def test_a_card_says_everything_in_our_units(seen: Seen, script: Script) -> None:
    first, *rest = seen.samples[HEALTHY]
    assert first.energy_j is None and first.period_ns == 0, "used since when?"
    for each in rest:
        assert (each.name, each.utilization, each.memory_bandwidth_utilization) == (script.cards[0].name, 0.5, 0.3)
        assert (each.memory_used_bytes, each.memory_total_bytes) == (60_000_000_000, 80_000_000_000)
        assert (each.sm_clock_mhz, each.memory_clock_mhz, each.temperature_c, each.throttle) == (1980, 2619, 55, 4)
        # Means since the last time they were looked at, of which there has to be one.
        assert (each.sm_active, each.dram_active, each.tensor_active) in ((0.77, 0.44, 0.0), (None, None, None))
        end = script.seconds(each.t_ns)
        assert each.energy_j == pytest.approx(integral(RISING, end - each.period_ns / 1e9, end), rel=0.03, abs=2.0)
    assert rest[-1].sm_active == 0.77 and not seen.lines(HEALTHY)


def test_energy_without_a_counter_is_power_by_time(seen: Seen, script: Script) -> None:
    rest = seen.samples[NO_ENERGY][1:]
    for each in rest:
        end = script.seconds(each.t_ns)
        assert each.energy_j == pytest.approx(integral(RISING, end - each.period_ns / 1e9, end), rel=0.03, abs=2.0)
    assert len(seen.lines(NO_ENERGY)) == 1 and "energy_j: not supported" in seen.lines(NO_ENERGY)[0]


def test_what_is_not_permitted_is_null_and_said_once(seen: Seen) -> None:
    assert {(s.temperature_c, s.sm_clock_mhz, s.memory_clock_mhz) for s in seen.samples[NO_PERMISSION]} == {
        (None, None, None)
    }
    (line,) = seen.lines(NO_PERMISSION)
    assert "sm_clock_mhz, memory_clock_mhz, temperature_c: no permission" in line
    assert all(s.power_w == 100.0 for s in seen.samples[NO_PERMISSION]), "the other counters are unharmed"


def test_what_failed_may_work_the_next_time(seen: Seen) -> None:
    assert all(s.memory_used_bytes is None for s in seen.samples[MOODY])
    (line,) = seen.lines(MOODY)
    assert "memory_used_bytes: unknown error" in line


def test_a_card_that_falls_off_the_bus_says_nothing_from_then_on(seen: Seen) -> None:
    *before, last = seen.samples[LOST]
    assert before and all(s.power_w == 100.0 for s in before)
    assert last == GpuSample(LOST, last.t_ns, name=last.name), "null, never 0"
    (line,) = seen.lines(LOST)
    assert "does not answer any more" in line
    assert len(seen.samples[HEALTHY]) >= 5, "the others are sampled on"


def test_a_counter_that_begins_anew_is_not_counted_backwards(seen: Seen) -> None:
    for each in seen.samples[WRAPS][1:]:
        assert each.energy_j == pytest.approx(200.0 * each.period_ns / 1e9, rel=0.02, abs=2.0)


def test_what_the_driver_keeps_comes_with_its_times(seen: Seen, script: Script) -> None:
    points = seen.points[KEEPS]
    times = [time for time, _ in points]
    assert times == sorted(set(times)), "each once"
    assert len(points) > 5 * len(seen.samples[KEEPS]) / 2
    for time, watts in points:
        if script.seconds(time) >= 0:
            assert watts == pytest.approx(100 + 20 * script.seconds(time), abs=0.5)


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_what_the_driver_keeps_when_the_wall_clock_is_set(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    """The driver stamps what it keeps once, with the wall clock's time of that moment."""
    kept: list[SimpleNamespace] = []

    def samples(handle: object, kind: int, since_us: int) -> tuple[int, list[SimpleNamespace]]:
        return 1, [each for each in kept if each.timeStamp > since_us]

    def pass_time() -> None:
        for _ in range(10):
            clock["now"] += 20 * MS
            watts = SimpleNamespace(uiVal=clock["now"] // MS)
            kept.append(SimpleNamespace(timeStamp=(clock["now"] + clock["wall"]) // 1000, sampleValue=watts))

    clock = {"now": 7_000 * MS, "wall": 10**18}
    monkeypatch.setattr("stagetrace.gpu.nvml.anchor", lambda: (clock["now"], clock["now"] + clock["wall"]))
    monkeypatch.setattr("stagetrace.gpu.nvml._STATE_NS", 0)
    card = DriverCard(
        FakeNvml(nvmlDeviceGetSamples=samples, nvmlDeviceGetUUID=lambda _: "GPU-1", nvmlDeviceGetName=lambda _: "card"),
        object(),
    )
    points: list[tuple[int, float]] = []
    for jump in (0, 0, jump_s, 0):
        pass_time()
        clock["wall"] += jump * 10**9
        points += card.read().power
    assert [time for time, _ in points] == sorted({time for time, _ in points})
    assert all(watts * 1e3 == time / MS for time, watts in points), "each at its own time"
    assert len(points) == 40 - 10, "those of before the clock was set are not known any more"


def test_a_slice_has_memory_of_its_own_and_shares_the_rest(seen: Seen) -> None:
    for each in seen.samples[SLICE]:
        assert (each.memory_used_bytes, each.temperature_c, each.sm_clock_mhz) == (5_000_000_000, 55, 1980)
        assert (each.power_w, each.energy_j, each.utilization) == (None, None, None), "they are all slices' together"
    (line,) = seen.lines(SLICE)
    assert "of the whole card only" in line
    assert seen.ids["MIG-" + uuid(7) + "/3/0"] == SLICE, "by the older form of its name, too; sampled once"
    times = [s.t_ns for s in seen.samples[SLICE]]
    assert len(times) <= len(seen.samples[HEALTHY]) + 1


def test_a_name_that_is_no_cards_is_said_and_nothing_more(seen: Seen) -> None:
    (line,) = seen.lines("GPU-none")
    assert line.startswith("no counters of GPU GPU-none: not found") and "nvidia-smi -L" in line


def test_no_call_is_made_in_vain_and_none_is_dear(seen: Seen) -> None:
    rounds = len(seen.samples[HEALTHY])
    # Four times a second, but what changes slowly every other time.
    assert seen.calls["nvmlDeviceGetUtilizationRates"] >= 6 * rounds
    assert seen.calls["nvmlDeviceGetTemperature"] <= 9 * (rounds + 3) / 2
    assert seen.calls["nvmlGpmQueryDeviceSupport"] == 9, "once for each card"
    # One card keeps its power: it is asked for the number and then for the values. The others are asked once.
    assert seen.calls["nvmlDeviceGetSamples"] <= (rounds + 3) + 8
    assert not [call for call in seen.calls if "Process" in call]


@pytest.mark.parametrize(
    ("name", "card"),
    [("0", 0), ("1", 1), (uuid(1)[:12], 1), ("PCI-00000000:3C:00.0", 1), ("PCI-00000000:3c:00.0", 1)],
)
def test_names_of_a_card(tmp_path: Path, name: str, card: int) -> None:
    seen = sample(tmp_path, Script([Card(0), Card(1)]), 1, STAGETRACE_GPU_UUIDS=name)
    assert seen.ids == {name: uuid(card)} and list(seen.samples) == [uuid(card)]
    assert not seen.lines("no counters")  # that it is slow may be said: the machine may be busy


def test_half_a_name_that_two_cards_have_names_none(tmp_path: Path) -> None:
    seen = sample(tmp_path, Script([Card(0), Card(1)]), 1, STAGETRACE_GPU_UUIDS="GPU-0000")
    assert not seen.samples
    assert seen.said == ["no counters of GPU GPU-0000: several cards are called so; give more of the name"]


@pytest.mark.parametrize(
    ("init", "why"),
    [(9, "the NVIDIA driver is not loaded"), (4, "no permission to use the NVIDIA driver"), (999, "cannot be used")],
)
def test_a_driver_that_cannot_be_used_is_said_once(tmp_path: Path, init: int, why: str) -> None:
    seen = sample(tmp_path, Script([Card()], init=init))
    (line,) = seen.said
    assert line.startswith("no GPU counters: ") and why in line
    assert seen.over and not seen.samples


def test_without_a_driver(tmp_path: Path) -> None:
    seen = sample(tmp_path, Script([Card()]), LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
    assert library().exists()
    assert seen.said == ["no GPU counters: there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)"]


def test_without_the_bindings(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')\n")
    seen = sample(tmp_path, Script([Card()]), PYTHONPATH=str(tmp_path))
    assert seen.said == ["no GPU counters: nvidia-ml-py is not installed here: pip install 'stagetrace[gpu]'"]


def test_a_slow_driver_is_asked_more_rarely(tmp_path: Path) -> None:
    """Some eight calls of 40 ms a look: at most a tenth of the time is to be spent on them."""
    seen = sample(tmp_path, Script([Card(more=["slow * 40000"])]), rounds=2)
    assert seen.interval_s >= 2.0
    (line,) = seen.said
    assert "the GPU driver takes" in line and "asked every" in line
