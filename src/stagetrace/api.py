"""The Python entry points, loaded when first used."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from . import runtime, session

log = logging.getLogger("stagetrace")
GROUP = "stagetrace.integrations"


def integrations() -> list[runtime.Integration]:
    """Every integration whose plug-in can be imported."""
    found = []
    for entry in entry_points(group=GROUP):
        try:
            found.append(entry.load())
        except Exception as error:  # one plug-in's failure stays its own
            log.warning("stagetrace: integration %s not loaded (%s)", entry.name, type(error).__name__)
    return found


def instrument(options: dict[str, Any]) -> None:
    """See :func:`stagetrace.instrument`."""
    try:
        given = options.get("tracer_provider")
        if given is not None and not callable(getattr(given, "get_tracer", None)):
            kind = type(given).__name__
            log.warning("stagetrace: tracer_provider is not used: a TracerProvider has get_tracer(), this %s not", kind)
            options = {**options, "tracer_provider": None}
        faults = runtime.options(options)
        for integration in integrations():
            runtime.activate(integration)
        for line in faults:
            log.warning("stagetrace: %s", line)
    except Exception as error:
        log.warning("stagetrace: not instrumented (%s)", type(error).__name__)


def status() -> dict[str, Any]:
    """See :func:`stagetrace.status`."""
    directory = runtime.directory()
    return {
        "recording": runtime.recorder.recording and bool(runtime.states()),
        "session": str(directory) if directory else None,
        "collector": runtime.collector(),
        "hooks": runtime.states(),
        "store": _store(directory),
        "faults": runtime.faults(),
    }


def flush(timeout_s: float) -> bool:
    """See :func:`stagetrace.flush`."""
    directory = runtime.directory()
    if directory is None:
        return True
    request = directory / session.FLUSH
    stamp = str(time.monotonic_ns())
    try:
        session.write(request, stamp)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            done = directory / session.FLUSHED
            if done.exists() and done.read_text() == stamp:
                return True
            if (_store(directory) or {}).get("fault"):
                return False
            time.sleep(0.02)
    except OSError as error:
        log.warning("stagetrace: flush failed (%s)", error.strerror)
    return False


def _store(directory: Path | None) -> dict[str, Any] | None:
    """What the session's collector says of its store."""
    if directory is not None:
        with suppress(OSError, ValueError):
            said = json.loads((directory / session.STORE).read_text(encoding="ascii"))
            return said if isinstance(said, dict) else None
    return None


def uninstrument() -> None:
    """See :func:`stagetrace.uninstrument`."""
    try:
        runtime.deactivate()
    except Exception as error:
        log.warning("stagetrace: not everything was removed (%s)", type(error).__name__)
