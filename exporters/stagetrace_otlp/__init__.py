"""OTLP: traces and metrics to any OpenTelemetry endpoint, over gRPC or HTTP, configured by ``OTEL_*``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stagetrace.exporting import Exporter, Options, RequestRecord, RunRecord, Say, Sink


def make(options: Options, environment: Mapping[str, str], say: Say) -> Sink | None:
    """See :class:`stagetrace.exporting.Exporter`."""
    from .settings import read

    settings = read(options, environment, say)
    if settings is None:
        return None
    # Half a second of imports, for those who want it only.
    from .sink import OtlpSink

    return OtlpSink(settings, options.health, say)


def lines(records: Iterable[RequestRecord], run: RunRecord | None) -> Iterator[str]:
    """OTLP/JSON: one object a line, which is one call."""
    from .jsonfile import lines as written

    return written(records, run)


EXPORTER = Exporter("otlp", make, {"otlp-json": lines})
