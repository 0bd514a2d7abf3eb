"""What assembly hands on: one :class:`RequestRecord` per sequence, in the shape of ``stages --json``.

Times are milliseconds from the request's start unless a name says otherwise. Unknown is ``None``, never 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .stages import STAGES

#: Version of the JSON documents; the store has one of its own.
SCHEMA = 1


@dataclass
class StageRecord:
    """One stage of one request. ``start_ms`` counts from the request's start; both times may be None."""

    number: int
    key: str
    state: str
    source: str | None = None
    start_ms: float | None = None
    duration_ms: float | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class RequestRecord:
    """One sequence of one request (``n`` > 1 gives several with the same ``request_id``)."""

    request_id: str
    external_id: str | None
    trace_id: str
    operation: str
    model: str | None
    status: str
    finish_reason: str | None
    active_stage: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    start_unix_ns: int
    e2e_ms: float | None
    ttft_ms: float | None
    ttft_kind: str | None
    queue_ms: float | None
    prefill_ms: float | None
    itl_ms: dict[str, float | None]
    coverage: float | None
    coverage_ttft: float | None
    unattributed_ms: float | None
    preemptions: int
    sequence: int
    stages: list[StageRecord]
    gaps_ms: dict[str, float] = field(default_factory=dict)
    span_id: str = ""
    parent_span_id: str | None = None
    internal_id: str | None = None
    token_times_ms: list[float] = field(default_factory=list)
    #: The caller's wish, where a trusted caller sent one.
    caller_sampled: bool | None = None
    #: The ``tracestate`` that came with the caller's span, parent or not.
    tracestate: str | None = None
    #: The caller's span where callers are not trusted: then it is no parent, and the trace is the request's own.
    link_trace_id: str | None = None
    link_span_id: str | None = None
    #: The HTTP status the call was answered with.
    http_status: int | None = None
    #: Why it was not answered in full, in one word; see :func:`stagetrace.assemble.ending.error_of`.
    error_type: str | None = None
    #: Which engine core served it, and the front-end process that took it in.
    engine: int | None = None
    process: int | None = None
    #: Its share of the cards' energy, and whether they were throttled; None where no card is sampled.
    gpu: dict[str, Any] | None = None

    def stage(self, key: str) -> StageRecord:
        """Return the stage named ``key``; KeyError if there is none."""
        for record in self.stages:
            if record.key == key:
                return record
        raise KeyError(key)

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object: 64-bit integers as digits, token times left out."""
        out = asdict(self)
        del out["token_times_ms"]
        out["start_unix_ns"] = str(self.start_unix_ns)
        return out


@dataclass
class StepRecord:
    """One engine iteration, times in monotonic nanoseconds; what the worker did not report is None.

    One with an empty batch says that nothing runs from here on.
    """

    step: int
    engine: int
    schedule_ns: tuple[int, int]
    batch_size: int
    tokens: int
    prefill_tokens: int
    running: int
    waiting: int
    kv_usage: float
    update_ns: tuple[int, int] | None = None
    execute_ns: tuple[int, int] | None = None
    forward_ns: tuple[int, int] | None = None
    lm_head_ns: tuple[int, int] | None = None
    sample_call_ns: tuple[int, int] | None = None
    sample_ns: tuple[int, int] | None = None
    embedding_ns: tuple[int, int] | None = None
    preempted: int = 0
    #: The device runs on after a call has returned, so that the host cannot time what it does.
    device_async: bool = False
    #: Forward, head, sampler and embedding are timed by events of the device.
    device_timed: bool = False


@dataclass
class GpuSample:
    """What one card said at one moment, ``t_ns`` (monotonic). What it does not say is None.

    ``card`` is the driver's name for it (``GPU-...``; ``MIG-...`` of a slice). Shares are from 0 to 1. ``energy_j`` was
    used since the card's sample before, ``period_ns`` ago (0: there was none). ``throttle`` are the driver's bits, see
    :data:`stagetrace.gpu.throttle.REASONS`.
    """

    card: str
    t_ns: int
    period_ns: int = 0
    name: str | None = None
    #: Share of the time in which any kernel ran; and in which the memory was read or written.
    utilization: float | None = None
    memory_bandwidth_utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: int | None = None
    #: Where the card has performance counters (Hopper and later): multiprocessors with work, warps on them, tensor
    #: cores, and memory bandwidth, each as a share of what is possible.
    sm_active: float | None = None
    sm_occupancy: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None


@dataclass
class RunRecord:
    """One engine seen in a session. ``config`` holds allow-listed settings only."""

    session: str
    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    started_unix_ns: int = 0
    notes: list[str] = field(default_factory=list)


def empty_stages(state: str) -> list[StageRecord]:
    """Return all twelve stages in order, every one in ``state``."""
    return [StageRecord(s.number, s.key, state) for s in STAGES]
