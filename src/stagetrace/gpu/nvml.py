"""The driver's counters through nvidia-ml-py: what a card cannot say is None, and why is said once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ..clock import anchor
from ..model import GpuSample
from .gpm import METRICS, Counters

#: Error codes of the driver's library.
_NOT_SUPPORTED, _NO_PERMISSION, _DRIVER_NOT_LOADED, _NO_LIBRARY, _NO_FUNCTION = 3, 4, 9, 12, 13
_LOST = (15, 16, 28)
#: These do not change while the card is there: whoever has got one asks no more.
_FOR_GOOD = {2: "not supported", 3: "not supported", 4: "no permission", 13: "not supported", 25: "not supported"}
#: The driver's number for the power it keeps by itself. (Of other counters it keeps none that is finer than ours.)
_POWER_KEPT = 0
#: What changes slowly is asked for so often at most.
_STATE_NS = 400_000_000
STATE = ("memory_used_bytes", "memory_total_bytes", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", *METRICS)
#: Of the card's figures for all its slices no one can say which part is one's own.
_WHOLE = ("energy_j", "power_w", "power kept", "utilization", "memory_bandwidth_utilization")
_MIG_WHOLE = "of the whole card only"


class GpuFault(Exception):
    """One line: what about the driver or a card cannot be used, and what to do about it."""


class Lost(Exception):
    """The card does not answer any more and will not again."""


class Reading(NamedTuple):
    """A sample, and the power that the driver had kept meanwhile, (monotonic ns, W), where it does.

    ``whole``: everything in it is of this moment; else what is in :data:`STATE` is of the last whole one.
    """

    sample: GpuSample
    power: list[tuple[int, float]]
    whole: bool = True


class Driver:
    """The driver's library, opened. GpuFault if it cannot be."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise GpuFault("nvidia-ml-py is not installed here: pip install 'stagetrace[gpu]'") from None
        self.nvml: Any = pynvml
        try:
            pynvml.nvmlInitWithFlags(0)
        except pynvml.NVMLError as error:
            raise GpuFault(_no_driver(error)) from None

    def close(self) -> None:
        """Let go of it."""
        try:
            self.nvml.nvmlShutdown()
        except self.nvml.NVMLError:
            return

    def cards(self) -> list[tuple[str, str]]:
        """(id, name) of every card in this machine that answers."""
        found, nvml = [], self.nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append((_text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))))
        return found

    def card(self, ident: str) -> Card:
        """The card that the driver, an engine's worker or a person calls so; GpuFault if there is none."""
        try:
            return Card(self.nvml, self._handle(ident))
        except self.nvml.NVMLError as error:
            raise GpuFault(f"GPU {ident}: {str(error).lower()}; `nvidia-smi -L` lists what there is") from None

    def _handle(self, ident: str) -> Any:
        nvml = self.nvml
        if ident.isdecimal():
            return nvml.nvmlDeviceGetHandleByIndex(int(ident))
        if ident.startswith("PCI-"):
            return nvml.nvmlDeviceGetHandleByPciBusId(ident.removeprefix("PCI-").encode())
        try:
            return nvml.nvmlDeviceGetHandleByUUID(ident.encode())
        except nvml.NVMLError:
            # As CUDA takes them: the beginning of a name, where it is one card's only, and slices by their numbers.
            if ident.startswith("MIG-GPU-"):
                return self._slice(*ident.removeprefix("MIG-").split("/"))
            matches = [uuid for uuid, _ in self.cards() if uuid.startswith(ident)]
            if not matches:
                raise
            if len(matches) > 1:
                raise GpuFault(f"GPU {ident}: several cards are called so; give more of the name") from None
            return nvml.nvmlDeviceGetHandleByUUID(matches[0].encode())

    def _slice(self, parent: str, instance: str = "", compute: str = "") -> Any:
        """A slice by the older form of its name: the card's, and the numbers of both its instances."""
        nvml = self.nvml
        card = nvml.nvmlDeviceGetHandleByUUID(parent.encode())
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
            except nvml.NVMLError:
                continue
            ids = nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle)
            if (str(ids[0]), str(ids[1])) == (instance, compute):
                return handle
        raise nvml.NVMLError(6)


class Card:
    """One card, or a slice of one, and which of its counters it has."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.id = _text(nvml.nvmlDeviceGetUUID(handle))
        #: The card a slice is of; a slice has its own memory, but no other counters than that card's.
        self.parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if self.id.startswith("MIG-") else None
        self._whole = handle if self.parent is None else self.parent
        self.name = _text(nvml.nvmlDeviceGetName(self._whole))
        #: Why a counter is not asked for any more, or has failed, by counter.
        self._gone: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._told: set[str] = set()
        #: The time of the latest power that the driver had kept: its own, µs since 1970, and ours, monotonic ns.
        self._kept_us = self._kept_ns = 0
        self._state: GpuSample | None = None
        self._last: tuple[int, int | None, float | None] | None = None
        self._gpm = Counters(nvml, self._handle, self.parent)
        if self.parent is not None:
            self._gone.update(dict.fromkeys(_WHOLE, _MIG_WHOLE))

    def read(self) -> Reading:
        """Ask for everything, a few dozen microseconds a counter. Lost if the card is gone."""
        before = time.monotonic_ns()
        millijoules = self._ask("energy_j", lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        now = (before + time.monotonic_ns()) // 2
        since = self._last[0] if self._last else now
        whole = self._state is None or now - self._state.t_ns >= _STATE_NS
        kept = self._kept() if whole else []
        recent = [watts for time, watts in kept if time > since]
        made = GpuSample(self.id, now, now - since, self.name)
        made.power_w = sum(recent) / len(recent) if recent else self._power()
        made.energy_j = self._energy(now, millijoules, made.power_w, bool(recent))
        self._shares(made)
        if self._state is None or whole:
            self._take_stock(made)
        else:
            for name in STATE:
                setattr(made, name, getattr(self._state, name))
        made.throttle = self._ask("throttle", self._throttle)
        return Reading(made, kept, whole)

    def last(self) -> Reading:
        """What there is to say of a card that does not answer: nothing, from now on."""
        return Reading(silence(self.id, self.name), [])

    def faults(self) -> list[str]:
        """A line for each reason why counters are not there that has come up since the last call."""
        by_reason: dict[str, list[str]] = {}
        for counter, reason in {**self._failed, **self._gone}.items():
            if counter not in self._told and counter not in ("gpm", "power kept"):
                self._told.add(counter)
                by_reason.setdefault(reason, []).append(counter)
        who = f"GPU {self.id} ({self.name})"
        return [f"{who}: {', '.join(names)}: {reason}; null there" for reason, names in by_reason.items()]

    def _ask(self, counter: str, function: Callable[[], Any]) -> Any:
        if counter in self._gone:
            return None
        try:
            return function()
        except self._nvml.NVMLError as error:
            if error.value in _LOST:
                raise Lost(str(error)) from None
            if error.value in _FOR_GOOD:
                self._gone[counter] = _FOR_GOOD[error.value]
            else:
                self._failed[counter] = str(error).lower()
            return None

    def _kept(self) -> list[tuple[int, float]]:
        """The power that the driver has kept since the last time, W; nothing where it keeps none."""
        now, wall = anchor()
        if self._kept_us > wall // 1000:
            self._kept_us = 0  # the wall clock, whose times the driver gives, has been set back
        since = self._kept_us or wall // 1000 - 1_000_000
        ask = self._nvml.nvmlDeviceGetSamples
        answer = self._ask("power kept", lambda: ask(self._handle, _POWER_KEPT, since))
        found = []
        for each in answer[1] if answer else ():
            time_ns = now - wall + each.timeStamp * 1000
            # A time before the last one's or still to come is one of before the wall clock was set.
            if each.timeStamp > since and self._kept_ns < time_ns <= now:
                self._kept_us, self._kept_ns = each.timeStamp, time_ns
                found.append((time_ns, each.sampleValue.uiVal / 1e3))
        return found

    def _power(self) -> float | None:
        milliwatts = self._ask("power_w", lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle))
        return None if milliwatts is None else milliwatts / 1e3

    def _energy(self, now: int, millijoules: int | None, power: float | None, mean: bool) -> float | None:
        """Joules since the last sample: the counter's, or where there is none or it has begun anew, power by time.

        ``mean`` says that ``power`` is of the whole time; else that at its beginning counts as much as that at its end.
        """
        last, self._last = self._last, (now, millijoules, power)
        if last is None:
            return None
        if millijoules is not None and last[1] is not None and millijoules >= last[1]:
            return (millijoules - last[1]) / 1e3
        if self.parent is not None or power is None:
            return None
        before = power if mean or last[2] is None else last[2]
        return (power + before) / 2 * (now - last[0]) / 1e9

    def _shares(self, made: GpuSample) -> None:
        rates = self._ask("utilization", lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle))
        if rates is not None:
            made.utilization, made.memory_bandwidth_utilization = rates.gpu / 100, rates.memory / 100
            return
        for reasons in (self._gone, self._failed):
            if "utilization" in reasons:
                reasons["memory_bandwidth_utilization"] = reasons["utilization"]

    def _take_stock(self, made: GpuSample) -> None:
        """Memory, clocks, heat, and what is a mean since the last time anyway."""
        nvml = self._nvml
        memory = self._ask("memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle))
        if memory is not None:
            made.memory_used_bytes, made.memory_total_bytes = memory.used, memory.total
        made.sm_clock_mhz = self._ask("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(self._whole, 1))
        made.memory_clock_mhz = self._ask("memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(self._whole, 2))
        made.temperature_c = self._ask("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(self._whole, 0))
        for counter, share in (self._ask("gpm", self._gpm.read) or {}).items():
            setattr(made, counter, share)
        self._state = made

    def _throttle(self) -> Any:
        try:
            return self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._whole)
        except self._nvml.NVMLError as error:
            if error.value != _NO_FUNCTION:
                raise
            return self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._whole)  # its name before driver 535


def silence(card: str, name: str | None) -> GpuSample:
    """A sample that knows nothing, of this moment."""
    return GpuSample(card, time.monotonic_ns(), name=name)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _no_driver(error: Any) -> str:
    why = {
        _NO_LIBRARY: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
        _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
        _NO_PERMISSION: "no permission to use the NVIDIA driver; give this user access to /dev/nvidiactl",
    }
    return why.get(error.value) or f"the NVIDIA driver cannot be used ({str(error).lower()})"
