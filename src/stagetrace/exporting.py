"""What an exporter is written against: this module, and nothing else of stagetrace.

An exporter is registered in the entry-point group ``stagetrace.exporters`` as an :class:`Exporter`. It runs in the
collector, never in an engine's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .address import parse as parse_address
from .address import shown as shown_address
from .metrics import INSTRUMENTS, Engines, Instrument, Observation, of_gpu, of_requests, of_steps
from .model import GpuSample, RequestRecord, RunRecord, StageRecord, StepRecord
from .parents import Caller
from .propagation import chosen
from .provider import LiveRoot, LiveSpans
from .stats import inter_token, percentile

__all__ = [
    "INSTRUMENTS",
    "Caller",
    "Engines",
    "Exporter",
    "GpuSample",
    "Health",
    "Instrument",
    "LiveRoot",
    "LiveSink",
    "Observation",
    "Options",
    "RequestRecord",
    "RunRecord",
    "Say",
    "Sink",
    "StageRecord",
    "StepRecord",
    "calls",
    "chosen",
    "finished",
    "inter_token",
    "of_gpu",
    "of_requests",
    "of_steps",
    "parse_address",
    "percentile",
    "shown_address",
]

#: Prints one line for the person at the terminal.
Say = Callable[[str], None]


class Sink(Protocol):
    """Where records go. Must not raise for what it can count instead, and never wait for anybody's network.

    ``requests`` gets snapshots of running requests, too, with the status ``in_flight``. A sink that sends a span for
    each request, under its record's ids, has an attribute ``traces``: the share of the traces without a caller that is
    certain to be sent, chosen by :func:`chosen`. Of those, and of what a caller samples, the span becomes the parent of
    whatever spans the engine makes by itself.
    """

    def run(self, run: RunRecord) -> None: ...
    def requests(self, records: list[RequestRecord]) -> None: ...
    def steps(self, records: list[StepRecord]) -> None: ...
    def gpu(self, samples: list[GpuSample]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class LiveSink(Sink, LiveSpans, Protocol):
    """A sink whose spans for requests are alive while these run: it starts them, in the engine's front end."""


@dataclass
class Health:
    """What stagetrace counts about itself, over the life of a collector. The collector and exporters write it."""

    marks_dropped: int = 0
    #: Spans that were made and did not get out, by reason.
    spans_dropped: Counter[str] = field(default_factory=Counter)
    #: Processes in which a hook failed, by hook.
    hook_errors: Counter[str] = field(default_factory=Counter)


@dataclass
class Options:
    """What was asked for on the command line, or of ``instrument``."""

    otlp: str | None = None
    prometheus: str | None = None
    sample: float | None = None
    #: The host's own, in whose process this collector then is: traces go there, and to nobody else.
    tracer_provider: Any = None
    health: Health = field(default_factory=Health)


@dataclass(frozen=True)
class Exporter:
    """An entry point of ``stagetrace.exporters``.

    ``make`` returns None where neither options nor environment ask for it, and raises ValueError with one line for
    what cannot be done. ``formats`` are for ``stagetrace export``: name → what turns records into the file's lines.
    ``live`` makes the sink that starts and ends spans of ``Options.tracer_provider``.
    """

    name: str
    make: Callable[[Options, Mapping[str, str], Say], Sink | None] = lambda options, environment, say: None
    formats: Mapping[str, Callable[[Iterable[RequestRecord], RunRecord | None], Iterator[str]]] = field(
        default_factory=dict
    )
    live: Callable[[Options], LiveSink] | None = None


def calls(records: Iterable[RequestRecord]) -> list[list[RequestRecord]]:
    """The newest of ``records`` of each sequence, by the call they belong to and in order."""
    found: dict[tuple[str, str], dict[int, RequestRecord]] = {}
    for record in records:
        found.setdefault((record.trace_id, record.span_id), {})[record.sequence] = record
    return [[call[sequence] for sequence in sorted(call)] for call in found.values()]


def finished(records: Iterable[RequestRecord]) -> list[list[RequestRecord]]:
    """The calls among ``records`` that are over, each with its sequences in order."""
    return [call for call in calls(records) if all(record.status != "in_flight" for record in call)]
