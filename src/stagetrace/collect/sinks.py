"""Where the records of a collector go: the store, and every installed exporter that is asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points

from ..exporting import Exporter, GpuSample, LiveSink, Options, RequestRecord, RunRecord, Say, Sink, StepRecord
from ..store import StoreError, StoreWriter
from .sink import NoStore, StoreSink

GROUP = "stagetrace.exporters"


class ExportError(Exception):
    """One line for the person: what was asked for and cannot be done."""


def exporters(say: Say) -> Iterator[Exporter]:
    """Every exporter whose plug-in can be imported."""
    for entry in entry_points(group=GROUP):
        try:
            yield entry.load()
        except Exception as error:  # one plug-in's failure stays its own
            say(f"exporter {entry.name} not loaded ({type(error).__name__})")


def opened(store: str | None, store_max: int, options: Options, environment: Mapping[str, str], say: Say) -> list[Sink]:
    """What can be had of that. The engine is being built already: what cannot be is said, and the rest goes on."""
    sinks: list[Sink] = []
    if store is not None:
        try:
            sinks.append(StoreSink(StoreWriter(store, store_max), say))
        except StoreError as error:
            say(f"{error}; nothing will be stored")
            sinks.append(NoStore(os.path.abspath(store), str(error)))
    try:
        sinks += build(options, environment, say)
    except ExportError as error:
        say(f"{error}; nothing will be exported")
    return sinks


def live(options: Options, say: Say) -> LiveSink:
    """What makes spans of ``options.tracer_provider``; ExportError if nothing can."""
    for exporter in exporters(say):
        if exporter.live:
            try:
                return exporter.live(options)
            except Exception as error:
                raise ExportError(f"tracer_provider cannot be used ({type(error).__name__}: {error})") from error
    raise ExportError("tracer_provider: the exporter that can use it is not installed")


def build(options: Options, environment: Mapping[str, str], say: Say) -> list[Sink]:
    """The sinks that ``options`` and ``environment`` ask for; ExportError if one that ``options`` name cannot be."""
    made: list[Sink] = []
    found = list(exporters(say))
    missing = {"otlp", "prometheus"} - {exporter.name for exporter in found}
    for name in sorted(missing):
        if getattr(options, name) is not None:
            raise ExportError(f"--{name}: its exporter is not installed")
    with _no_signals():
        for exporter in found:
            try:
                sink = exporter.make(options, environment, say)
            except Exception as error:
                if getattr(options, exporter.name, None) is None and options.sample is None:
                    # Only the environment speaks of it, which is everybody's: no reason to keep a server from starting.
                    say(f"{line_of(exporter, error)}; nothing is exported by {exporter.name}")
                    continue
                for each in made:
                    each.close()
                raise ExportError(line_of(exporter, error)) from error
            if sink is not None:
                made.append(Guarded(exporter.name, sink, say))
    return made


def line_of(exporter: Exporter, error: Exception) -> str:
    """An exporter words its own refusals; what a library of its raised needs a name before it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if type(error) is ValueError else f"exporter {exporter.name}: {text}"


@contextmanager
def _no_signals() -> Iterator[None]:
    """Threads inherit which signals they take: none, or one of them would get what is meant for the main thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Guarded:
    """A sink whose faults stay its own: the store and the other exporters go on."""

    def __init__(self, name: str, sink: Sink, say: Say) -> None:
        self.name = name
        self.sink = sink
        self.failed = 0
        self.traces: float | None = None
        with suppress(Exception):
            self.traces = getattr(sink, "traces", None)
        self._say = say

    def run(self, run: RunRecord) -> None:
        """See :class:`stagetrace.exporting.Sink`."""
        with self._guard():
            self.sink.run(run)

    def requests(self, records: list[RequestRecord]) -> None:
        """See :class:`stagetrace.exporting.Sink`."""
        with self._guard():
            self.sink.requests(records)

    def steps(self, records: list[StepRecord]) -> None:
        """See :class:`stagetrace.exporting.Sink`."""
        with self._guard():
            self.sink.steps(records)

    def gpu(self, samples: list[GpuSample]) -> None:
        """See :class:`stagetrace.exporting.Sink`; one that was written before there were any takes none."""
        if hasattr(self.sink, "gpu"):
            with self._guard():
                self.sink.gpu(samples)

    def flush(self) -> None:
        """See :class:`stagetrace.exporting.Sink`."""
        with self._guard():
            self.sink.flush()

    def close(self) -> None:
        """See :class:`stagetrace.exporting.Sink`."""
        with self._guard():
            self.sink.close()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                self._say(f"exporter {self.name}: {type(error).__name__}: {error}; serving and storing go on")
