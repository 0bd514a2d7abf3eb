"""``stagetrace run``: the server's parent and its collector in one process; right as PID 1 too.

It reaps whatever becomes its child, forwards the signals it is sent, and ends with the server's exit code.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import session
from .collect.loop import Collector, Sink
from .collect.sink import StoreSink
from .store import StoreWriter

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
)  # fmt: skip
#: After the server has ended, its children get this long to follow before the collector closes.
LINGER_S = 3.0
_SI_KERNEL = 0x80
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Supervisor:
    """Runs ``command`` and polls ``collector`` (None: nothing is recorded) until it has ended."""

    command: list[str]
    collector: Collector | None
    environment: dict[str, str]
    code: int | None = field(default=None, init=False)
    child: int = field(default=0, init=False)

    def run(self) -> int:
        """Start, supervise, and return the command's exit code (128 + N if signal N ended it; 127 not found)."""
        watched = {*FORWARDED, signal.SIGCHLD}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        _become_subreaper()
        try:
            self.child = os.posix_spawnp(self.command[0], self.command, self.environment, setsigmask=before)
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            say(f"cannot run {self.command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        pause = 0.02
        while self.code is None:
            self._signal(signal.sigtimedwait(watched, pause))
            pause = self._poll(pause)
        self._linger()
        return self.code

    def _signal(self, info: signal.struct_siginfo | None) -> None:
        if info is None:
            return
        if info.si_signo == signal.SIGCHLD:
            self._reap()
        elif info.si_code != _SI_KERNEL:
            # What the terminal sends it sends to the whole foreground group; the server has it already.
            try:
                os.kill(self.child, info.si_signo)
            except ProcessLookupError:
                self._reap()

    def _reap(self) -> None:
        """Collect every dead child; signals of the same kind are merged, so one may stand for several."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code

    def _poll(self, pause: float) -> float:
        if self.collector is None:
            return 1.0
        busy = self.collector.poll()
        return 0.02 if busy else min(pause * 1.5, 0.1)

    def _linger(self) -> None:
        """Children of the server may outlive it for a moment and still write."""
        until = time.monotonic() + LINGER_S
        while self.collector and self.collector.writers() and time.monotonic() < until:
            self.collector.poll()
            self._reap()
            time.sleep(0.02)


def run(command: list[str], store: Path | None, store_max: int) -> int:
    """Run ``command`` under stagetrace; StoreError before it is started if ``store`` cannot be written."""
    sink = StoreSink(StoreWriter(store, store_max), say) if store else None
    environment = dict(os.environ)
    directory = None
    try:
        session.remove_stale()
        directory = session.create()
        environment[session.ENV] = str(directory)
    except session.SessionError as error:
        say(f"{error}; serving goes on without recording")
    sinks: list[Sink] = [sink] if sink else []
    collector = Collector(directory, sinks) if directory else None
    try:
        code = Supervisor(command, collector, environment).run()
        if collector:
            collector.close()
        return code
    finally:
        if sink:
            sink.close()
            if collector and collector.requests:
                say(f"{collector.requests} requests in {sink.writer.path}; look: stagetrace stages {store}")
        if directory:
            shutil.rmtree(directory, ignore_errors=True)


def _become_subreaper(prctl: Callable[..., int] | None = None) -> None:
    """Let orphaned grandchildren become ours, so that nobody is left a zombie. Linux only; otherwise no harm."""
    try:
        (prctl or ctypes.CDLL(None, use_errno=True).prctl)(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def say(line: str) -> None:
    """One line on stderr, named as ours."""
    print(f"stagetrace: {line}", file=sys.stderr, flush=True)
