"""``stagetrace run``: the server's parent and its collector in one process; right as PID 1 too.

It reaps whatever becomes its child, forwards the signals it is sent, and ends with the server's exit code.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import session
from .collect import sinks
from .collect.loop import Collector
from .collect.sink import StoreSink, say
from .exporting import Options, Sink
from .gpu.watch import Watch
from .store import StoreWriter

FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
)  # fmt: skip
#: What a terminal sends, it sends to its whole foreground group.
FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH, signal.SIGHUP)
#: Python ignores these, which a program it starts would inherit.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
#: After the server has ended, its children get this long to follow before the collector closes.
LINGER_S = 3.0
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
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
    #: Said once there is an engine to record: the command may be anything.
    greeted: bool = field(default=False, init=False)

    def run(self) -> int:
        """Start, supervise, and return the command's exit code (128 + N if signal N ended it; 127 not found)."""
        watched = {*FORWARDED, signal.SIGCHLD}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        # Inherited as ignored, the system would reap for us and keep the exit code.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _become_subreaper()
        try:
            self.child = os.posix_spawnp(
                self.command[0], self.command, self.environment, setsigmask=before, setsigdef=_IGNORED
            )
        except (OSError, ValueError) as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            say(f"cannot run {self.command[0]}: {session.reason(error)}")
            return 126 if isinstance(error, OSError) and error.errno != errno.ENOENT else 127
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
        elif not self._has_it(info):
            with suppress(ProcessLookupError):
                os.kill(self.child, info.si_signo)

    def _has_it(self, info: signal.struct_siginfo) -> bool:
        """Whether the server was sent this signal, too: by the terminal, unless it left our process group."""
        if info.si_code != _SI_KERNEL or info.si_signo not in FROM_KEYBOARD:
            return False
        if info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid():
            return False  # the line went dead: only the session's leader is told
        with suppress(ProcessLookupError):
            return os.getpgid(self.child) == os.getpgrp()
        return True

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
        """Read the rings; return how long to wait for a signal before the next time."""
        if self.collector is None:
            return 1.0
        try:
            busy = self.collector.poll()
        except Exception as error:  # a fault of ours must not cost the server its parent
            say(f"recording has ended ({type(error).__name__}: {error}); serving goes on")
            self.collector = None
            return 1.0
        if busy and not self.greeted:
            self.greeted = True
            say(f"recording (session {self.collector.directory.name})")
        return 0.02 if busy else min(pause * 1.5, 0.1)

    def _linger(self) -> None:
        """Children of the server may outlive it for a moment and still write."""
        until = time.monotonic() + LINGER_S
        while self.collector and self.collector.writers() and time.monotonic() < until:
            self._poll(0.02)
            self._reap()
            time.sleep(0.02)


def run(command: list[str], store: Path | None, store_max: int, options: Options | None = None) -> int:
    """Run ``command`` under stagetrace.

    StoreError or ExportError before it is started if ``store`` cannot be written, or not be exported as asked.
    """
    environment = dict(os.environ)
    options = options or Options()
    if environment.get("STAGETRACE") == "0":
        say("STAGETRACE=0: nothing is recorded")
        return Supervisor(command, None, environment).run()
    if command[0] and shutil.which(command[0]) is None:  # let it fail as it will, but leave no empty store behind
        return Supervisor(command, None, environment).run()
    with ExitStack() as stack:
        # The store first: it is refused for what a look at the file tells, and nothing is listening yet.
        sink = StoreSink(StoreWriter(store, store_max), say) if store else None
        if sink:
            stack.callback(_close_store, sink)
        exporting = sinks.build(options, os.environ, say)
        for each in exporting:
            stack.callback(each.close)
        _withhold(environment)
        collector = _session(environment, [*([sink] if sink else []), *exporting], options, stack)
        supervisor = Supervisor(command, collector, environment)
        code = supervisor.run()
        if supervisor.collector:
            _settle(supervisor.collector)
            heard = supervisor.greeted or supervisor.collector.requests
            if supervisor.child and not heard and supervisor.collector.sinks:
                _unheard(code)
    if sink and collector and collector.requests and not sink.writer.failed:
        say(f"{collector.requests} requests recorded in {sink.writer.path}; look: stagetrace stages {store}")
    return code


def _withhold(environment: dict[str, str]) -> None:
    """Engines start exporters of their own when they see this variable; it is meant for ours."""
    if environment.pop(TRACES_ENDPOINT, None):
        say(f"{TRACES_ENDPOINT} is for stagetrace's export and withheld from the command, which may act on it itself")


def _session(environment: dict[str, str], into: list[Sink], options: Options, stack: ExitStack) -> Collector | None:
    """Make the session and name it in ``environment``; what is to be undone goes on ``stack``."""
    # Of another `stagetrace run`, around this one: that one would record us.
    environment.pop(session.ENV, None)
    try:
        session.remove_stale()
        directory = session.create()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.callback(os.close, session.own(directory))
    except (OSError, session.SessionError) as error:
        say(f"{session.reason(error)}; serving goes on without recording")
        return None
    environment[session.ENV] = str(directory)
    return Collector(directory, into, options.health, Watch(say, os.environ))


def _settle(collector: Collector) -> None:
    try:
        collector.close()
    except Exception as error:
        say(f"the last requests were not recorded ({type(error).__name__}: {error})")


def _unheard(code: int) -> None:
    """Something was to be kept or exported, and there was nothing."""
    say(
        f"no engine recorded (the command ended with {code}); if it was to start one, "
        "`stagetrace doctor` says what is missing"
    )


def _close_store(sink: StoreSink) -> None:
    try:
        sink.close()
    except Exception as error:
        say(f"store {sink.writer.path}: not closed properly ({type(error).__name__})")


def _become_subreaper() -> None:
    """Let orphaned grandchildren become ours, so that nobody is left a zombie. Linux only; otherwise no harm."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
