"""The sink: finished calls become traces and metrics, on their way to the endpoint without anybody waiting for it."""

from __future__ import annotations

import time

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.export import SpanExporter

from stagetrace.exporting import Engines, GpuSample, Health, RequestRecord, RunRecord, Say, StepRecord, finished

from . import spans
from .metrics import Metrics, no_compression
from .pipeline import Pipeline, aside
from .settings import Settings, Signal

#: What closing may take, whatever the endpoint does.
CLOSE_S = 2.8


class OtlpSink:
    """See :class:`stagetrace.exporting.Sink`."""

    def __init__(self, settings: Settings, health: Health, say: Say) -> None:
        self._policy = settings.policy
        # OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT and the like; ValueError with one line for one that is no number.
        self._limits = SpanLimits() if settings.traces else None
        self._health = health
        self._say = say
        self._engines = Engines()
        self._provider: str | None = None
        # Made once: it draws an id for this instance.
        self._base = Resource.create({})
        self._resource = resource_of(None, self._base)
        self._metrics_to = settings.metrics
        self._metrics: Metrics | None = None
        self.traces = settings.policy.ratio if settings.traces else None
        self.pipeline: Pipeline | None = None
        if settings.traces:
            self.pipeline = Pipeline(
                span_exporter(settings.traces), say, health.spans_dropped,
                settings.queue_spans, settings.batch_spans, settings.delay_s, settings.traces,
            )  # fmt: skip

    def run(self, run: RunRecord) -> None:
        """Note whose records these are."""
        self._provider = run.engine
        self._engines.model = run.model or ""
        self._resource = resource_of(run, self._base)

    def requests(self, records: list[RequestRecord]) -> None:
        """Export the calls that are over."""
        for call in finished(records):
            exported = self.pipeline is not None and self._policy.exports(call)
            if self.pipeline and exported:
                made = spans.trace(call, self._resource, self._provider, self._limits, self._health.spans_dropped)
                self.pipeline.put(made)
            if metrics := self._ready():
                metrics.call(call, self._engines, exported)

    def steps(self, records: list[StepRecord]) -> None:
        """Count what the engine did."""
        if metrics := self._ready():
            metrics.steps(records, self._engines)

    def gpu(self, samples: list[GpuSample]) -> None:
        """Pass on what cards say."""
        if metrics := self._ready():
            metrics.gpu(samples)

    def flush(self) -> None:
        """Have what is queued sent soon; nobody waits for it."""
        if self.pipeline:
            self.pipeline.hurry()

    def close(self) -> None:
        """Send what there is, within three seconds."""
        until = time.monotonic() + CLOSE_S
        last = aside(self._metrics.close) if self._metrics else None
        if self.pipeline:
            self.pipeline.close(until - time.monotonic())
        if last:
            last.join(max(until - time.monotonic(), 0.05))
        elif self._metrics:
            self._metrics.close()
        if dropped := self._health.spans_dropped.total():
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self._health.spans_dropped.items()))
            trouble = self.pipeline.trouble if self.pipeline else ""
            self._say(f"{dropped} spans were not exported ({reasons}){f'; {trouble}' if trouble else ''}")

    def _ready(self) -> Metrics | None:
        """The metrics, once it is known what they are about."""
        if self._metrics is None and self._metrics_to is not None:
            self._metrics = Metrics(self._metrics_to, self._resource, self._health, self._say)
        return self._metrics


def resource_of(run: RunRecord | None, found: Resource) -> Resource:
    """``found`` is what ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say; the engine where they do not."""
    more: dict[str, str] = {}
    if str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        more[SERVICE_NAME] = (run.engine if run else None) or "stagetrace"
    if run and run.engine:
        more["stagetrace.engine.name"] = run.engine
        if run.engine_version:
            more["stagetrace.engine.version"] = run.engine_version
    return found.merge(Resource(more))


def span_exporter(signal: Signal) -> SpanExporter:
    """The official exporter for ``signal``."""
    if signal.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc(endpoint=signal.endpoint, compression=no_compression("TRACES"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp(endpoint=signal.endpoint)
