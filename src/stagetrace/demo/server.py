"""The demo's server, and what an engine's integration has to say of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..serve import Served, free_port


class DemoEngine(Protocol):
    """What an integration offers for the demo."""

    name: str
    model: str
    max_num_seqs: int

    def missing(self) -> str | None: ...
    def make_model(self, path: Path) -> Path: ...
    def prompt_of(self, model_dir: Path, tokens: int, seed: int) -> str: ...
    def command(self, model_dir: Path, port: int) -> list[str]: ...
    def environment(self) -> dict[str, str]: ...


@contextmanager
def demo_server(engine: DemoEngine, model_dir: Path, store: Path, tick: Callable[[], None]) -> Iterator[Served]:
    """A server of ``engine`` that answers; ``tick`` is called while it is waited for. Fault if it does not start.

    Its log is kept only when something went wrong.
    """
    port = free_port()
    descriptor, name = tempfile.mkstemp(prefix="stagetrace-demo-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    failed = False
    try:
        with Served(
            engine.command(model_dir, port), port, store, log, engine.environment(), lambda _: tick()
        ) as server:
            yield server
    except Exception:  # and not Ctrl-C, where nothing went wrong
        failed = True
        raise
    finally:
        if not failed:
            log.unlink(missing_ok=True)
