"""What the driver's library says, against `nvidia-smi`, which asks the same driver in its own way."""

from __future__ import annotations

import subprocess
import time
from typing import Any

from tests.gpu.devices import Gpu
from tests.gpu.part import NotHere, Part

#: `nvidia-smi`'s name for it, and by how much the two may differ: a share, and an amount in its unit.
COMPARED = {
    "utilization.gpu": (0.0, 20.0, "%"),
    "memory.used": (0.0, 64.0, "MiB"),
    "power.draw": (0.15, 15.0, "W"),
    "clocks.sm": (0.05, 30.0, "MHz"),
    "clocks.mem": (0.05, 30.0, "MHz"),
    "temperature.gpu": (0.0, 4.0, "°C"),
}
ROUNDS = 8


def against_nvidia_smi(part: Part) -> None:
    """Under load, and by turns: a value of `nvidia-smi`'s lies between those read before and after it, or close."""
    if part.rehearsal:
        raise NotHere("there is no driver to rehearse with")
    on = Gpu()
    try:
        import pynvml
    except ImportError as error:
        raise NotHere("nvidia-ml-py is not installed here") from error
    pynvml.nvmlInit()
    try:
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        apart: dict[str, list[float]] = {name: [] for name in COMPARED}
        for _ in range(ROUNDS):
            busy(on)
            before = read(pynvml, card)
            busy(on)
            theirs = smi()
            busy(on)
            after = read(pynvml, card)
            for name, value in theirs.items():
                low, high = sorted((before[name], after[name]))
                apart[name].append(max(low - value, value - high, 0.0))
            part.figures = {name: {"nvml": before[name], "nvidia_smi": value} for name, value in theirs.items()}
        part.figures["call_us"] = cost(pynvml, card)
        for name, (share, amount, unit) in COMPARED.items():
            if apart[name]:
                limit = amount + share * part.figures[name]["nvidia_smi"]
                # The median: between two readings the driver itself may have taken another sample.
                part.hold(f"{name}: apart", sorted(apart[name])[len(apart[name]) // 2], limit, unit)
    finally:
        pynvml.nvmlShutdown()


def busy(on: Gpu) -> None:
    """Half a second of work."""
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        for _ in range(20):
            on.forward()
        on.synchronize()


def read(pynvml: Any, card: Any) -> dict[str, float]:
    """In `nvidia-smi`'s names and units."""
    return {
        "utilization.gpu": pynvml.nvmlDeviceGetUtilizationRates(card).gpu,
        "memory.used": pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2).used / 2**20,
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


def cost(pynvml: Any, card: Any) -> float:
    """What all of these calls take together, µs."""
    begun = time.perf_counter_ns()
    for _ in range(20):
        read(pynvml, card)
    return round((time.perf_counter_ns() - begun) / 20e3, 1)
