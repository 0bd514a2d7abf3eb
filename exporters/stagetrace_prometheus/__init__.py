"""Prometheus: a page to scrape, on loopback unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from stagetrace.exporting import Exporter, Options, Say, Sink


def make(options: Options, environment: Mapping[str, str], say: Say) -> Sink | None:
    """See :class:`stagetrace.exporting.Exporter`."""
    if options.prometheus is None:
        return None
    host, port = address(options.prometheus)
    try:
        from .sink import PrometheusSink
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise ValueError("--prometheus needs prometheus-client: pip install 'stagetrace[prometheus]'") from None
    sink = PrometheusSink(host, port, options.health)
    say(f"metrics at http://{f'[{host}]' if ':' in host else host}:{sink.port}/metrics")
    return sink


def address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``[HOST]:PORT``, ``:PORT`` or ``PORT``; ValueError with one line."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        port = ""  # an IPv6 address without brackets: which part is the port?
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or " " in text or not text.isprintable():
        raise ValueError(f"--prometheus {text}: not an address such as 127.0.0.1:9464")
    return host or "127.0.0.1", int(port)


EXPORTER = Exporter("prometheus", make)
