"""The metrics: one table of instruments, and what a finished request or an engine step says to each of them.

Exporters read the table and pass the observations on; nothing here knows a protocol. Durations are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .gpu.throttle import REASONS
from .model import GpuSample, RequestRecord, StepRecord
from .stats import inter_token

# The GenAI conventions' buckets, with more below: a token of a small model takes 2 ms, a stage 50 µs.
_FINE = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008)
_TOKEN = (*_FINE, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_REQUEST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
_STAGE = (
    0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
    5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_QUEUE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, *(value for value in _FIRST if value > 0.005))


@dataclass(frozen=True)
class Instrument:
    """A metric. ``kind`` is histogram, gauge, counter or updowncounter (of which the present value is observed).

    ``health`` names the field of :class:`stagetrace.exporting.Health` that keeps a counter of our own: it is read
    there, and never observed.
    """

    name: str
    kind: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    health: str = ""


#: Every request's or step's metric carries these: the engine core and the front-end process, numbered from 0 as
#: they appear, and the served model. Never a client's string.
LABELS = ("engine", "process", "model")
_OF_REQUEST = (*LABELS, "operation")

_DURATION = "gen_ai.server.request.duration"
_TTFT = "gen_ai.server.time_to_first_token"
_TPOT = "gen_ai.server.time_per_output_token"
_QUEUED = "stagetrace.queue.duration"
_PREFILL = "stagetrace.prefill.duration"
_ITL = "stagetrace.inter_token.duration"
_OF_STAGE = "stagetrace.stage.duration"
_KV, _DEPTH, _BATCH = "stagetrace.kv_cache.utilization", "stagetrace.queue.depth", "stagetrace.batch.size"
_PREEMPTIONS = "stagetrace.preemptions"
#: A card's metrics carry these: the driver's name for it, and what kind of card it is.
_OF_CARD = ("hw_id", "hw_name")
_OF_HARDWARE = (*_OF_CARD, "hw_type")
_ENERGY, _POWER, _HEAT = "hw.energy", "hw.power", "hw.temperature"
_BUSY, _USED, _ROOM = "hw.gpu.utilization", "hw.gpu.memory.usage", "hw.gpu.memory.limit"
_FULL, _BANDWIDTH = "hw.gpu.memory.utilization", "stagetrace.gpu.memory.bandwidth.utilization"
_CLOCK, _THROTTLED, _ACTIVE = "stagetrace.gpu.clock.frequency", "stagetrace.gpu.throttled", "stagetrace.gpu.activity"

INSTRUMENTS: dict[str, Instrument] = {
    each.name: each
    for each in (
        Instrument(
            _DURATION, "histogram", "s", "A call, from its first byte to its last", (*_OF_REQUEST, "error"), _REQUEST
        ),
        Instrument(_TTFT, "histogram", "s", "Until the first text is handed to the client", _OF_REQUEST, _FIRST),
        Instrument(_TPOT, "histogram", "s", "Mean time of a token after the first", _OF_REQUEST, _TOKEN),
        Instrument(_QUEUED, "histogram", "s", "Waiting for a batch slot and free blocks", _OF_REQUEST, _QUEUE),
        Instrument(_PREFILL, "histogram", "s", "From the first chunk's start to the last's end", _OF_REQUEST, _FIRST),
        Instrument(_ITL, "histogram", "s", "The gap before each token after the first", _OF_REQUEST, _TOKEN),
        Instrument(_OF_STAGE, "histogram", "s", "Each of the twelve stages", (*_OF_REQUEST, "stage"), _STAGE),
        Instrument(_KV, "gauge", "1", "Share of the KV cache in use, in the latest step", LABELS),
        Instrument(_DEPTH, "gauge", "{request}", "Requests waiting, in the latest step", LABELS),
        Instrument(_BATCH, "gauge", "{request}", "Requests in the latest step", LABELS),
        Instrument(_BUSY, "gauge", "1", "Share of the time a kernel ran", (*_OF_CARD, "hw_gpu_task")),
        Instrument(_USED, "updowncounter", "By", "GPU memory in use", _OF_CARD),
        Instrument(_ROOM, "updowncounter", "By", "Size of the GPU memory", _OF_CARD),
        Instrument(_FULL, "gauge", "1", "Share of the GPU memory in use", _OF_CARD),
        Instrument(_POWER, "gauge", "W", "Power the card draws", _OF_HARDWARE),
        Instrument(_ENERGY, "counter", "J", "Energy the card has used since it is sampled", _OF_HARDWARE),
        Instrument(_HEAT, "gauge", "Cel", "Temperature of the card", _OF_CARD),
        Instrument(_BANDWIDTH, "gauge", "1", "Share of the time its memory was read or written", _OF_CARD),
        Instrument(_CLOCK, "gauge", "Hz", "Clock of the multiprocessors (sm) or the memory", (*_OF_CARD, "domain")),
        Instrument(_THROTTLED, "gauge", "1", "Whether the card is slowed down for that reason", (*_OF_CARD, "reason")),
        Instrument(_ACTIVE, "gauge", "1", "Share of what a unit could do, Hopper and later", (*_OF_CARD, "unit")),
        Instrument(_PREEMPTIONS, "counter", "{preemption}", "Requests evicted from the KV cache", LABELS),
        Instrument(
            "stagetrace.marks.dropped", "counter", "{mark}", "Marks overwritten unread", health="marks_dropped"
        ),
        Instrument(
            "stagetrace.spans.dropped", "counter", "{span}", "Spans not exported", ("reason",), health="spans_dropped"
        ),
        Instrument(
            "stagetrace.hook.errors", "counter", "{process}", "Processes where a hook failed", ("hook",),
            health="hook_errors",
        ),
    )
}  # fmt: skip


class Observation(NamedTuple):
    """One value for the instrument ``name``, and the request that can serve as its example."""

    name: str
    value: float
    labels: dict[str, str]
    example: RequestRecord | None = None


@dataclass
class Engines:
    """Numbers engine cores and front-end processes from 0, as they appear; knows the model they serve."""

    model: str = ""
    _engines: dict[int, str] = field(default_factory=dict)
    _processes: dict[int, str] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)

    def labels(self, engine: int | None, process: int | None) -> dict[str, str]:
        """The three labels; what is not known is empty."""
        return {
            "engine": "" if engine is None else self._engines.setdefault(engine, str(len(self._engines))),
            "process": "" if process is None else self._processes.setdefault(process, str(len(self._processes))),
            "model": self.model,
        }

    def fresh(self, step: StepRecord) -> bool:
        """Whether a step comes for the first time: one that has become more complete comes again."""
        if step.step <= self._seen.get(step.engine, -1):
            return False
        self._seen[step.engine] = step.step
        return True


def of_requests(call: Sequence[RequestRecord], engines: Engines) -> Iterator[Observation]:
    """What a call that is over says; ``call`` are its sequences. Calls count once, tokens and stages each time."""
    first = call[0]
    ends = [record.e2e_ms for record in call if record.e2e_ms is not None]
    if ends:
        error = next((r.error_type for r in call if r.error_type), "")
        yield Observation(_DURATION, max(ends) / 1e3, {**_labels(first, engines), "error": error}, first)
    # Timers are those of answered calls, as in `stagetrace numbers`: others would make the server look fast.
    if all(record.status == "ok" and record.e2e_ms is not None for record in call):
        for record in call:
            yield from _of_sequence(record, _labels(record, engines))


def _labels(record: RequestRecord, engines: Engines) -> dict[str, str]:
    return {**engines.labels(record.engine, record.process), "operation": record.operation}


def _of_sequence(record: RequestRecord, labels: dict[str, str]) -> Iterator[Observation]:
    """The timers of a sequence."""
    for name, ms in ((_TTFT, record.ttft_ms), (_QUEUED, record.queue_ms), (_PREFILL, record.prefill_ms)):
        if ms is not None:
            yield Observation(name, ms / 1e3, labels, record)
    if record.ttft_ms is not None and record.e2e_ms is not None and (record.output_tokens or 0) > 1:
        each = (record.e2e_ms - record.ttft_ms) / ((record.output_tokens or 0) - 1)
        yield Observation(_TPOT, max(each, 0.0) / 1e3, labels, record)
    gaps = inter_token(record.token_times_ms)
    worst = max(gaps, default=0.0)
    for gap in gaps:
        yield Observation(_ITL, gap / 1e3, labels, record if gap == worst else None)
    for row in record.stages:
        # The call's own stages are on each of its sequences.
        if row.duration_ms is not None and (record.sequence == 0 or row.number > 3):
            yield Observation(_OF_STAGE, row.duration_ms / 1e3, {**labels, "stage": row.key}, record)


def of_steps(steps: Iterable[StepRecord], engines: Engines) -> Iterator[Observation]:
    """What engine steps say: gauges of the newest of each engine, evictions of all of them."""
    newest: dict[int, StepRecord] = {}
    evicted: dict[int, int] = {}
    for step in steps:
        if engines.fresh(step):
            newest[step.engine] = step
            evicted[step.engine] = evicted.get(step.engine, 0) + step.preempted
    for step in newest.values():
        labels = engines.labels(step.engine, None)
        yield Observation(_PREEMPTIONS, float(evicted[step.engine]), labels)
        yield Observation(_KV, step.kv_usage, labels)
        yield Observation(_DEPTH, float(step.waiting), labels)
        yield Observation(_BATCH, float(step.batch_size), labels)


def of_gpu(samples: Iterable[GpuSample]) -> Iterator[Observation]:
    """What cards say. What is not known, as when a card is lost, is NaN: whoever shows the value takes it away."""
    for sample in samples:
        card = {"hw_id": sample.card, "hw_name": sample.name or ""}
        hardware = {**card, "hw_type": "gpu"}
        used, room = sample.memory_used_bytes, sample.memory_total_bytes
        yield _or_nan(_BUSY, sample.utilization, {**card, "hw_gpu_task": "general"})
        yield _or_nan(_USED, used, card)
        yield _or_nan(_ROOM, room, card)
        yield _or_nan(_FULL, used / room if used is not None and room else None, card)
        yield _or_nan(_POWER, sample.power_w, hardware)
        if sample.energy_j is not None:
            yield Observation(_ENERGY, sample.energy_j, hardware)
        yield _or_nan(_HEAT, sample.temperature_c, card)
        yield _or_nan(_BANDWIDTH, sample.memory_bandwidth_utilization, card)
        for domain, mhz in (("sm", sample.sm_clock_mhz), ("memory", sample.memory_clock_mhz)):
            yield _or_nan(_CLOCK, None if mhz is None else mhz * 1e6, {**card, "domain": domain})
        for bit, reason in REASONS.items():
            slow = None if sample.throttle is None else float(bool(sample.throttle & bit))
            yield _or_nan(_THROTTLED, slow, {**card, "reason": reason})
        for unit in ("sm_active", "sm_occupancy", "tensor_active", "dram_active"):
            yield _or_nan(_ACTIVE, getattr(sample, unit), {**card, "unit": unit.removesuffix("_active")})


def _or_nan(name: str, value: float | None, labels: dict[str, str]) -> Observation:
    return Observation(name, math.nan if value is None else float(value), labels)
