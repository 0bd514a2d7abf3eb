"""A real session of the benchmark's own, recorded into by the real recorder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagetrace import session
from stagetrace.runtime import recorder


@contextmanager
def private_session() -> Iterator[Path]:
    """Make a session directory, point this process's recorder at it, and remove it afterwards."""
    directory = session.create()
    recorder.attach(directory)
    try:
        yield directory
    finally:
        recorder.attach(None)
        shutil.rmtree(directory, ignore_errors=True)
