"""The collector as a thread of the engine's front end: there, requests can be live spans of the host's own provider."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import provider, rings, session
from ..exporting import Options
from . import sinks
from .loop import Collector
from .sinks import Guarded

#: What stopping may take.
STOP_S = 3.0
#: How long a call that has ended may wait for the engine's last word on it.
PATIENCE_S = 2.0
#: How long a fork waits for the thread to be between two polls.
FORK_S = 5.0

log = logging.getLogger("stagetrace")


def say(line: str) -> None:
    """One line for the person: in the host's own log, for this is its process."""
    log.warning("stagetrace: %s", line)


class CollectorThread:
    """Collects ``directory`` until :meth:`stop`. The constructor raises ExportError for a provider it cannot use."""

    def __init__(self, directory: Path, options: dict[str, Any], report: Callable[[str, str], None]) -> None:
        asked = Options(
            options.get("otlp"), options.get("prometheus"), options.get("sample"), options["tracer_provider"]
        )
        live = sinks.live(asked, say)
        self.directory = directory
        into = sinks.opened(options.get("store"), options.get("store_max") or 1 << 30, asked, os.environ, say)
        self._collector = Collector(directory, [Guarded(provider.NAME, live, say), *into], asked.health)
        # The same pair for the spans and for what is stored of them.
        self._collector.assembler.anchors[os.getpid()] = provider.use(live, report)
        self._lock = -1
        self._over = threading.Event()
        #: Held while the thread may hold locks of others: the store's, the provider's.
        self._busy = threading.RLock()
        self._thread = threading.Thread(target=self._work, name="stagetrace-collector", daemon=True)

    def start(self) -> None:
        """Begin to collect. RuntimeError or OSError if that cannot be."""
        try:
            self._lock = session.own(self.directory)
            self._thread.start()
        except Exception:
            self._tidy()
            raise
        _here.thread = self

    def stop(self) -> None:
        """Write out what there is, within :data:`STOP_S`; spans of calls that still run end as they are."""
        provider.release()
        self._over.set()
        self._thread.join(STOP_S)
        _here.thread = None

    def hold(self) -> None:
        """Keep it from polling: a child must not inherit a lock that nobody there will ever release."""
        self._busy.acquire(timeout=FORK_S)

    def resume(self) -> None:
        """Let it poll again."""
        with suppress(RuntimeError):  # it took too long, and was not held
            self._busy.release()

    def abandon(self) -> None:
        """In a forked child: there is no thread here, and the session, the store and the spans are the parent's."""
        provider.release()
        self._unlock()

    def _work(self) -> None:
        # Signals are for the host's threads.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pause = 0.0
        try:
            while not self._over.wait(pause):
                with self._busy:
                    pause = 0.02 if self._collector.poll() else 0.1
            self._settle()
        except Exception as error:
            say(f"recording has ended ({type(error).__name__}: {error}); serving goes on")
        finally:
            # Whoever still writes need not, and would have nowhere to make new rings.
            with suppress(OSError):
                rings.set_paused(self.directory, True)
            shutil.rmtree(self.directory, ignore_errors=True)
            self._tidy()

    def _settle(self) -> None:
        now = time.monotonic_ns()
        until = time.monotonic() + PATIENCE_S
        while True:
            with self._busy:
                self._collector.poll()
                if not self._collector.owes(now) or time.monotonic() > until:
                    self._collector.close()
                    return
            time.sleep(0.02)

    def _tidy(self) -> None:
        provider.release()
        with self._busy:
            for sink in self._collector.sinks:
                sink.close()
            self._unlock()

    def _unlock(self) -> None:
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Here:
    """What runs in this process; and, in a child, what its parent had: dropped, its store would be closed twice."""

    thread: CollectorThread | None = None
    left_behind: CollectorThread | None = None


_here = _Here()


def _before_fork() -> None:
    if _here.thread:
        _here.thread.hold()


def _after_fork() -> None:
    if _here.thread:
        _here.thread.resume()


def _in_child() -> None:
    if _here.thread:
        _here.thread.abandon()
        _here.thread, _here.left_behind = None, _here.thread


def _at_exit() -> None:
    if _here.thread:
        _here.thread.stop()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
# After the provider's own, as a rule, and so called before it.
atexit.register(_at_exit)
