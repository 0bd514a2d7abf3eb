"""OTLP: traces and metrics to any OpenTelemetry endpoint, over gRPC or HTTP, configured by ``OTEL_*``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stagetrace.exporting import Exporter, LiveSink, Options, RequestRecord, RunRecord, Say, Sink


def make(options: Options, environment: Mapping[str, str], say: Say) -> Sink | None:
    """See :class:`stagetrace.exporting.Exporter`."""
    from .settings import read

    settings = read(options, environment, say)
    if settings is None:
        return None
    # Half a second of imports, for those who want it only.
    from .reasons import listen
    from .sink import OtlpSink

    if options.tracer_provider is None:  # else this is the host's process, and its loggers are the host's
        # The official exporters write lines of their own for every failure, with tracebacks; ours says it once.
        listen()
    return OtlpSink(settings, options.health, say)


def lines(records: Iterable[RequestRecord], run: RunRecord | None) -> Iterator[str]:
    """OTLP/JSON: one object a line, which is one call."""
    from .jsonfile import lines as written

    return written(records, run)


def live_spans(options: Options) -> LiveSink:
    """Spans of the host's own TracerProvider."""
    from .live import LiveSpans

    return LiveSpans(options.tracer_provider, options.health)


EXPORTER = Exporter("otlp", make, {"otlp-json": lines}, live_spans)
