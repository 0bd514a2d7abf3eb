"""A server started for the length of a ``with`` block: recorded, in a process group of its own, gone afterwards."""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .faults import Fault
from .session import ENV

HOST = "127.0.0.1"
READY_S = 900.0
#: How long a server may take to end before it is killed.
STOP_S = 30.0
#: It is told to end this often.
TOLD_AGAIN_S = 5.0
#: What it leaves behind is told, too, and may take so long: a compiler that is killed leaves half a file in a cache.
LEFT_S = 3.0
_PR_SET_PDEATHSIG = 1
_PATH, _NO_SUCH_PATH = "/v1/models", 404
#: One that wants a key is there, too; what has none to send is then told so at once.
_ANSWERS = (200, 401, 403)
#: A disk with fewer bytes left is full.
_FULL = 1 << 16
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: What a line that says why a program ended has in it.
_ERROR = re.compile(r"\w(?:Error|Exception)\b|\berror:", re.IGNORECASE)
#: So many ports are chosen from, a tenth of it at least; where ports for everybody begin.
_ENOUGH, _UNPRIVILEGED = 10_000, 1024


def free_port() -> int:
    """A loopback port nobody listens on. No outgoing connection is given it first, if the system leaves any such."""
    ports = _ports()
    for _ in range(100):
        port = secrets.choice(ports)
        if port_is_free(port):
            return port
    raise Fault(f"no free port on {HOST} from {ports[0]} to {ports[-1]}; end what listens there")


def _ports() -> range:
    """Those below or above what the kernel gives to outgoing connections, whichever are enough."""
    try:
        first, last = map(int, _GIVEN_OUT.read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999  # Linux's own choice
    below, above = range(max(_UNPRIVILEGED, first - _ENOUGH), first), range(last + 1, 1 << 16)
    return next((ports for ports in (below, above) if len(ports) >= _ENOUGH // 10), range(_UNPRIVILEGED, 1 << 16))


def port_is_free(port: int) -> bool:
    """Whether a server could listen on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def must_be_free(port: int) -> None:
    """Fault where somebody listens on it: that would be measured instead."""
    if not port_is_free(port):
        raise Fault(f"port {port} is taken; end what listens there, or write {{port}} in the command")


class Served:
    """``command`` under ``stagetrace run``, recorded in ``store``; what it prints is in ``log``.

    ``with`` returns when it answers on ``/v1/models``; Fault if it does not. ``tick`` is called while that is waited
    for, with "starting", and while it ends, with "ending".
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        store: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        tick: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--", *command]
        self.port, self.store, self.log, self.tick = port, store, log, tick
        # A session of somebody else's, or recording switched off, is not for this server.
        kept = {name: value for name, value in os.environ.items() if name not in ("STAGETRACE", ENV)}
        self.environment = {**kept, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Served:
        must_be_free(self.port)
        try:
            with open(self.log, "wb") as log:
                # A group of its own, but not a session: schedulers weigh sessions against each other, and beside one
                # full of an engine's busy threads the client would wait for a CPU.
                self._process = subprocess.Popen(
                    self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    preexec_fn=_group_of_its_own(),
                )  # fmt: skip
        except OSError as error:
            raise Fault(f"{self.log}: {error.strerror}") from None
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _wait(self) -> None:
        assert self._process is not None
        until = time.monotonic() + READY_S
        while (status := _answer(self.port)) not in _ANSWERS:
            code = self._process.poll()
            if status == _NO_SUCH_PATH:
                raise Fault(f"port {self.port} answers HTTP 404 on {_PATH}: that is no OpenAI-compatible server")
            if code is not None or time.monotonic() > until:
                how = f"ended with {code}" if code is not None else f"did not answer within {READY_S:.0f} s"
                if status is not None:
                    how += f", but with HTTP {status} on {_PATH}"
                raise Fault(f"the server {how}; its log is {self.log}; {self._last()}")
            self.tick("starting")
            time.sleep(0.25)

    def stop(self) -> None:
        """End it and all that it started. May be called twice; who is interrupted in it does not wait any longer."""
        if self._process is None:
            return
        until = time.monotonic() + STOP_S
        try:
            while self._process.poll() is None and time.monotonic() < until:
                # More than once: an engine that is being started may miss the first, and then serve for ever.
                self._process.send_signal(signal.SIGTERM)
                again = min(until, time.monotonic() + TOLD_AGAIN_S)
                while self._process.poll() is None and time.monotonic() < again:
                    self.tick("ending")
                    time.sleep(0.1)
            if self._process.poll() is not None and self._told(signal.SIGTERM):
                until = time.monotonic() + LEFT_S
                while self._told(0) and time.monotonic() < until:
                    time.sleep(0.1)
        finally:
            self._told(signal.SIGKILL)
            self._process.wait()

    def _told(self, number: int) -> bool:
        """Send a signal to the group; whether there is still one. Its number is nobody else's while a member lives."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _last(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        # Its own last words, and not what `stagetrace run` adds to them.
        own = [line.strip() for line in lines if not line.startswith("stagetrace: ")] or lines
        errors = [line for line in own if _ERROR.search(line)]
        if errors:
            return f"the last error in it: {errors[-1][:300]}"
        if not own and shutil.disk_usage(self.log.parent).free < _FULL:
            return "there is nothing in it, for the disk is full"
        return f"the last line: {own[-1][:300] if own else '(nothing)'}"


def _group_of_its_own() -> Callable[[], None]:
    """What the child does before it becomes the server: should we be killed, ``stagetrace run`` is to end it."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        os.setpgrp()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return prepare


def _answer(port: int) -> int | None:
    """The HTTP status of the list of models; None where nobody answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5.0)
    try:
        connection.request("GET", _PATH)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
