"""The core's instruments in a private MeterProvider, read and sent by the official SDK now and then."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from stagetrace.exporting import (
    INSTRUMENTS,
    Engines,
    GpuSample,
    Health,
    Instrument,
    RequestRecord,
    Say,
    StepRecord,
    of_gpu,
    of_requests,
    of_steps,
)
from stagetrace.exporting import Observation as Seen

from .reasons import complaint, heard
from .settings import Signal

#: Our labels under the conventions' names, where they have one.
_NAMES = {
    "model": "gen_ai.request.model", "operation": "gen_ai.operation.name", "error": "error.type",
    "hw_id": "hw.id", "hw_name": "hw.name", "hw_type": "hw.type", "hw_gpu_task": "hw.gpu.task",
}  # fmt: skip
Attributes = tuple[tuple[str, str], ...]
_NOWHERE = Context()


class Metrics:
    """Takes what calls and steps say; the reader's own thread sends it."""

    def __init__(self, signal: Signal, resource: Resource, health: Health, say: Say) -> None:
        views = [
            View(instrument_name=each.name, aggregation=ExplicitBucketHistogramAggregation(each.buckets))
            for each in INSTRUMENTS.values()
            if each.buckets
        ]
        # Interval and timeout are the reader's to find: OTEL_METRIC_EXPORT_INTERVAL, OTEL_METRIC_EXPORT_TIMEOUT.
        reader = PeriodicExportingMetricReader(metric_exporter(signal, say))
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False, views=views)
        self._health = health
        self._meter = self._provider.get_meter("stagetrace")
        #: What a card's gauges stand at, by metric and attributes. They are read when they are sent: a synchronous one
        #: would go on saying what a card that is lost has said last.
        self._levels: dict[str, dict[Attributes, float]] = {}
        self._instruments = {each.name: self._make(each) for each in INSTRUMENTS.values()}

    def call(self, records: Sequence[RequestRecord], engines: Engines, exported: bool) -> None:
        """Record a call that is over; only a trace that was exported can be an example."""
        labels: tuple[dict[str, str], dict[str, str]] = ({}, {})
        for seen in of_requests(records, engines):
            # A request's tokens follow each other with one dictionary of labels.
            if labels[0] is not seen.labels:
                labels = seen.labels, renamed(seen.labels)
            self._record(seen, labels[1], exported)

    def steps(self, records: Iterable[StepRecord], engines: Engines) -> None:
        """Record engine steps."""
        for seen in of_steps(records, engines):
            self._record(seen, renamed(seen.labels), False)

    def gpu(self, samples: Iterable[GpuSample]) -> None:
        """Record what cards say."""
        for seen in of_gpu(samples):
            self._record(seen, renamed(seen.labels), False)

    def close(self) -> None:
        """Send a last time; may take as long as the endpoint does."""
        self._provider.shutdown(timeout_millis=2500)

    def _record(self, seen: Seen, labels: dict[str, str], exported: bool) -> None:
        kind = INSTRUMENTS[seen.name].kind
        instrument = self._instruments[seen.name]
        context = _context(seen.example) if seen.example and exported else _NOWHERE
        if kind == "histogram":
            instrument.record(seen.value, labels, context)
        elif kind == "counter":
            counts = INSTRUMENTS[seen.name].unit.startswith("{")
            instrument.add(round(seen.value) if counts else seen.value, labels, context)
        elif seen.name in self._levels:
            self._levels[seen.name][tuple(labels.items())] = seen.value
        else:
            instrument.set(seen.value, labels, context)

    def _make(self, each: Instrument) -> Any:
        about = {"name": each.name, "unit": each.unit, "description": each.description}
        if each.health:
            return self._meter.create_observable_counter(callbacks=[lambda _: self._counts(each)], **about)
        if "hw_id" in each.labels and each.kind != "counter":
            levels = self._levels.setdefault(each.name, {})
            kind = "up_down_counter" if each.kind == "updowncounter" else each.kind
            return getattr(self._meter, f"create_observable_{kind}")(callbacks=[lambda _: _known(levels)], **about)
        return getattr(self._meter, f"create_{each.kind}")(**about)

    def _counts(self, each: Instrument) -> list[Observation]:
        kept = getattr(self._health, each.health)
        if not each.labels:
            return [Observation(kept)]
        (label,) = each.labels
        return [Observation(count, {label: key}) for key, count in sorted(kept.items())]


def _known(levels: dict[Attributes, float]) -> list[Observation]:
    return [Observation(value, dict(key)) for key, value in list(levels.items()) if not math.isnan(value)]


def renamed(labels: dict[str, str]) -> dict[str, str]:
    """Our labels as attributes; what is not known is left out."""
    return {_NAMES.get(name, name): value for name, value in labels.items() if value}


def _context(record: RequestRecord) -> Context:
    span = SpanContext(int(record.trace_id, 16), int(record.span_id, 16), False, TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(span), Context())


def metric_exporter(signal: Signal, say: Say) -> MetricExporter:
    """The official exporter for ``signal``; says once if the endpoint takes no metrics: many take traces only."""
    base: Any
    more: dict[str, Any] = {}
    if signal.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as OverGrpc

        base, more = OverGrpc, {"compression": no_compression("METRICS")}
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as OverHttp

        base = OverHttp
    said: list[str] = []

    def export(self: Any, *args: Any, **kwargs: Any) -> Any:
        heard.forget()
        result = base.export(self, *args, **kwargs)
        if result is not MetricExportResult.SUCCESS and not said:
            said.append(complaint(signal, "metrics", "OTEL_METRICS_EXPORTER=none sends none", heard.of()))
            say(said[0])
        return result

    made: MetricExporter = type("Watched", (base,), {"export": export})(endpoint=signal.endpoint, **more)
    return made


def no_compression(signal: str) -> Any:
    """What the official gRPC exporters are told where the environment says "none", which they do not know."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION")
    value = next((os.environ[name] for name in names if os.environ.get(name)), "")
    if value.strip().lower() != "none":
        return None
    from grpc import Compression

    return Compression.NoCompression
