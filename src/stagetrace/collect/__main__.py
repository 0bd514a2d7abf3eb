"""``python -m stagetrace.collect DIRECTORY``: collect a session that an engine process has opened."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from .. import session
from ..exporting import Options
from ..gpu.watch import Watch
from . import sinks
from .loop import Collector
from .sink import say


def main(arguments: list[str] | None = None) -> int:
    """Collect until the last writer has gone."""
    parser = argparse.ArgumentParser(prog="stagetrace.collect")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--store")
    parser.add_argument("--store-max", type=int, default=1 << 30)
    parser.add_argument("--otlp")
    parser.add_argument("--prometheus")
    parser.add_argument("--sample", type=float)
    options = parser.parse_args(arguments)
    try:
        directory = session.check(options.directory)
        # Not getppid(): who started us may have died by now.
        parent = session.owner(directory)
        lock = session.own(directory)
    except (OSError, session.SessionError) as error:
        say(f"nothing is collected: {session.reason(error)}")
        return 2
    # Both are meant for the server; this process ends by itself once the server has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asked = Options(options.otlp, options.prometheus, options.sample)
    into = sinks.opened(options.store, options.store_max, asked, os.environ, say)
    collector = Collector(directory, into, asked.health, Watch(say, os.environ))
    try:
        _collect(collector, parent)
        collector.close()
    except Exception as error:
        say(f"recording has ended ({type(error).__name__}: {error}); serving goes on")
        return 70
    finally:
        for sink in reversed(into):
            sink.close()
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
    return 0


def _collect(collector: Collector, parent: int) -> None:
    """Poll until every process that wrote, and the one that started us, are gone."""
    while session.alive(parent) or collector.writers():
        time.sleep(0.02 if collector.poll() else 0.1)


if __name__ == "__main__":
    sys.exit(main())
