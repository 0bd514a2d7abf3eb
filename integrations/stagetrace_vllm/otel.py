"""For `opentelemetry-instrument` and whoever else drives instrumentors: the same as ``stagetrace.instrument()``.

opentelemetry-instrumentation is none of our dependencies: where it is missing, nobody comes by here.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from stagetrace.plugin import OPTIONS, instrument, uninstrument

from . import INTEGRATION

try:
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
except ImportError:
    BaseInstrumentor = object


class StagetraceInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # it may not be there
    """Entry point ``opentelemetry_instrumentor``. Takes what :func:`stagetrace.instrument` takes."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The engine, under the name it is installed by: all that is listed here has to be there."""
        oldest = INTEGRATION.tested[0]
        names = [name for name in INTEGRATION.distributions if _installed(name)]
        return [f"{name} >= {oldest}" for name in names[:1] or INTEGRATION.distributions[:1]]

    def _instrument(self, **kwargs: Any) -> None:
        instrument(**{name: value for name, value in kwargs.items() if name in OPTIONS})

    def _uninstrument(self, **kwargs: Any) -> None:
        uninstrument()


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
