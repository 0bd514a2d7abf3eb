"""The core's instruments in a registry of their own, and the page that shows them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from stagetrace.exporting import (
    INSTRUMENTS,
    Engines,
    GpuSample,
    Health,
    Instrument,
    Observation,
    RequestRecord,
    RunRecord,
    StepRecord,
    finished,
    of_gpu,
    of_requests,
    of_steps,
)


class PrometheusSink:
    """See :class:`stagetrace.exporting.Sink`. ValueError with one line if nothing can listen there."""

    def __init__(self, host: str, port: int, health: Health) -> None:
        self.registry = CollectorRegistry()
        self._engines = Engines()
        self._metrics = {e.name: _metric(e, self.registry) for e in INSTRUMENTS.values() if not e.health}
        self.registry.register(_Counts(health))
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ValueError(f"--prometheus {host}:{port}: {error.strerror or error}; name another") from None
        self.port = self._server.server_port

    def run(self, run: RunRecord) -> None:
        """Note whose records these are."""
        self._engines.model = run.model or ""

    def requests(self, records: list[RequestRecord]) -> None:
        """Count the calls that are over."""
        for call in finished(records):
            self._take(of_requests(call, self._engines))

    def steps(self, records: list[StepRecord]) -> None:
        """Count what the engine did."""
        self._take(of_steps(records, self._engines))

    def gpu(self, samples: list[GpuSample]) -> None:
        """Show what cards say, and nothing any more of what they do not."""
        for seen in of_gpu(samples):
            if math.isnan(seen.value):
                each = INSTRUMENTS[seen.name]
                with suppress(KeyError):  # it was not known before either
                    self._metrics[seen.name].remove(*(seen.labels[label] for label in each.labels))
            else:
                self._take([seen])

    def flush(self) -> None:
        """Whoever scrapes sees the latest anyway."""

    def close(self) -> None:
        """Stop listening, within half a second: its loop looks up that often, and nobody waits for it."""
        threading.Thread(target=self._stop, daemon=True).start()

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, seen: Iterable[Observation]) -> None:
        child: Any = None
        last: Observation | None = None
        for each in seen:
            # A request's tokens follow each other with one dictionary of labels; looking them up takes longest.
            if last is None or last.name != each.name or last.labels is not each.labels:
                child = self._metrics[each.name].labels(**each.labels)
            last = each
            kind = INSTRUMENTS[each.name].kind
            if kind in ("gauge", "updowncounter"):
                child.set(each.value)
            elif kind == "counter":
                child.inc(each.value)
            elif each.example is None:
                child.observe(each.value)
            else:
                child.observe(each.value, {"trace_id": each.example.trace_id, "span_id": each.example.span_id})


class _Counts(Collector):
    """Counters that are read where they are kept."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        """What they say now."""
        for each in (each for each in INSTRUMENTS.values() if each.health):
            kept = getattr(self._health, each.health)
            made = CounterMetricFamily(_name(each), each.description, labels=each.labels)
            for keys, count in [([key], kept[key]) for key in sorted(kept)] if each.labels else [([], kept)]:
                made.add_metric(keys, count)
            yield made


def _name(each: Instrument) -> str:
    return each.name.replace(".", "_") + ("_seconds" if each.unit == "s" else "")


def _metric(each: Instrument, registry: CollectorRegistry) -> Any:
    about = (_name(each), each.description, each.labels)
    if each.kind == "histogram":
        return Histogram(*about, registry=registry, buckets=each.buckets)
    return (Counter if each.kind == "counter" else Gauge)(*about, registry=registry)
