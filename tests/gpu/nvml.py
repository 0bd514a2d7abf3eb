"""What the driver's library says, against `nvidia-smi`, which asks the same driver in its own way."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from stagetrace.gpu.nvml import Card, Driver, GpuFault
from tests.gpu.devices import Gpu
from tests.gpu.part import NotHere, Part

#: `nvidia-smi`'s name for it, and by how much the two may differ: a share, and an amount in its unit.
COMPARED = {
    "utilization.gpu": (0.0, 20.0, "%"),
    # `nvidia-smi` leaves out what the driver keeps for itself.
    "memory.used": (0.0, 1024.0, "MiB"),
    "power.draw": (0.15, 15.0, "W"),
    "clocks.sm": (0.05, 30.0, "MHz"),
    "clocks.mem": (0.05, 30.0, "MHz"),
    "temperature.gpu": (0.0, 4.0, "°C"),
}
ROUNDS = 8
Read = Callable[[], dict[str, float]]


def against_nvidia_smi(part: Part) -> None:
    """Under load, and by turns: a value of `nvidia-smi`'s lies between those read before and after it, or close.

    Read twice over: by plain calls, and as the collector samples a card.
    """
    on = None if part.rehearsal else Gpu()
    try:
        driver = Driver()
    except GpuFault as fault:
        raise NotHere(str(fault)) from fault
    try:
        sampled = driver.card("0")
        readers = {"nvml": partial(plain, driver.nvml), "sampler": partial(ours, sampled)}
        found = [between(on, readers) for _ in range(ROUNDS)]
        part.figures = {name: found[-1][name] for name in COMPARED if name in found[-1]}
        part.figures["call_us"] = {who: cost(read) for who, read in readers.items()}
        part.figures["not_known"] = sampled.faults()
        for name, (share, amount, unit) in COMPARED.items():
            for who in readers:
                apart = [distance(each[name], who) for each in found if who in each.get(name, {})]
                if apart:
                    # The median: between two readings the driver itself may have taken another sample.
                    limit = amount + share * part.figures[name]["nvidia_smi"]
                    part.hold(f"{name}: {who} and nvidia-smi apart", median(apart), limit, unit)
    finally:
        driver.close()


def between(on: Gpu | None, readers: dict[str, Read]) -> dict[str, dict[str, Any]]:
    """By counter: what `nvidia-smi` says, and what each reader says before and after it."""
    busy(on)
    before = {who: read() for who, read in readers.items()}
    busy(on)
    theirs = smi()
    busy(on)
    after = {who: read() for who, read in readers.items()}
    return {
        name: {
            "nvidia_smi": value,
            **{who: [before[who][name], after[who][name]] for who in readers if name in after[who]},
        }
        for name, value in theirs.items()
    }


def distance(values: dict[str, Any], who: str) -> float:
    """How far `nvidia-smi`'s value is from the stretch between the two others."""
    low, high = sorted(values[who])
    return float(max(low - values["nvidia_smi"], values["nvidia_smi"] - high, 0.0))


def busy(on: Gpu | None) -> None:
    """Half a second of work."""
    until = time.monotonic() + 0.5
    while on is not None and time.monotonic() < until:
        for _ in range(20):
            on.forward()
        on.synchronize()


def ours(card: Card) -> dict[str, float]:
    """What the collector's sampler has of a card, in `nvidia-smi`'s names and units; what it has not is left out."""
    sample = card.read().sample
    found = {
        "utilization.gpu": sample.utilization and 100 * sample.utilization,
        "memory.used": sample.memory_used_bytes and sample.memory_used_bytes / 2**20,
        "power.draw": sample.power_w, "clocks.sm": sample.sm_clock_mhz, "clocks.mem": sample.memory_clock_mhz,
        "temperature.gpu": sample.temperature_c,
    }  # fmt: skip
    return {name: float(value) for name, value in found.items() if value is not None}


def plain(pynvml: Any) -> dict[str, float]:
    """The same from the driver's library."""
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "utilization.gpu": pynvml.nvmlDeviceGetUtilizationRates(card).gpu,
        "memory.used": pynvml.nvmlDeviceGetMemoryInfo(card).used / 2**20,
        "power.draw": pynvml.nvmlDeviceGetPowerUsage(card) / 1e3,
        "clocks.sm": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
        "clocks.mem": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM),
        "temperature.gpu": pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
    }


def smi() -> dict[str, float]:
    """What `nvidia-smi` says of the first card; what it does not know is left out."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(COMPARED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotHere(f"nvidia-smi cannot be run here ({type(error).__name__})") from error
    return parsed(done.stdout)


def parsed(line: str) -> dict[str, float]:
    """The values of one line of its CSV, by name."""
    found = {}
    for name, text in zip(COMPARED, line.strip().split(", "), strict=True):
        try:
            found[name] = float(text)
        except ValueError:  # [N/A], [Not Supported]
            continue
    return found


def cost(read: Read) -> float:
    """What one reading takes, µs."""
    begun = time.perf_counter_ns()
    for _ in range(20):
        read()
    return round((time.perf_counter_ns() - begun) / 20e3, 1)
