"""stagetrace: a stopwatch on each of the twelve stages of a real LLM request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

    from .store import Trace

__version__ = "0.1.0"
__all__ = ["flush", "instrument", "load", "status", "uninstrument"]


def instrument(
    store: str | None = "stagetrace.db",
    store_max: int | None = None,
    otlp: str | None = None,
    prometheus: str | None = None,
    sample: float | None = None,
    tracer_provider: Any = None,
) -> None:
    """Record the engine that this process is about to build.

    Call it before the engine is built; the collector is started when that happens. Idempotent, and it never raises
    into the host: what went wrong is logged and shown by :func:`status`.

    Args:
        store: file the collector writes (None: keep nothing).
        store_max: size in bytes at which the oldest requests are removed; 1 GiB when None.
        otlp: URL that traces and metrics are exported to; ``OTEL_*`` are honoured with and without it.
        prometheus: HOST:PORT at which metrics can be scraped.
        sample: share of traces to export, 0 to 1; store and metrics see all requests.
        tracer_provider: an OpenTelemetry TracerProvider of yours. The root of each request is then a live span of it
            (its ids, sampler, processors and resource; current while the request is handled), its stages are added
            when the request is over, and the collector is a thread of this process. Traces go there only: ``otlp``
            then gets the metrics, and ``sample`` has no say.
    """
    from . import api

    api.instrument(
        {
            "store": store, "store_max": store_max, "otlp": otlp, "prometheus": prometheus, "sample": sample,
            "tracer_provider": tracer_provider,
        }
    )  # fmt: skip


def status() -> dict[str, Any]:
    """Return what is recorded in this process, as a dictionary.

    ``recording``: whether; ``session``: its directory, or None; ``collector``: where that is read, in a ``thread`` of
    this process or another ``process``, or None; ``hooks``: by integration and target, each one's state;
    ``store``: None where nothing is to be kept or no collector has said so yet, else ``{"file", "fault"}``, of which
    ``fault`` is None as long as all is well, and then the line that says why nothing is stored; ``faults``: a line for
    each thing that :func:`instrument` was asked for and that cannot be, as far as it could tell without starting any.
    """
    from . import api

    return api.status()


def flush(timeout_s: float = 3.0) -> bool:
    """Wait until the collector has stored what was recorded so far.

    False if it did not within ``timeout_s``, or cannot: then :func:`status` says why.
    """
    from . import api

    return api.flush(timeout_s)


def load(path: str | PathLike[str]) -> Trace:
    """Read a store: ``.requests``, ``.steps``, ``.runs``. Raises ``stagetrace.store.StoreError``."""
    from . import store

    return store.load(path)


def uninstrument() -> None:
    """Take every hook out of this process and restore the engine's methods exactly."""
    from . import api

    api.uninstrument()
