"""Start a server in a process group of its own, and talk to it with a client whose timing is its own.

Standard library only: an HTTP package between the clock and the socket would be part of what is measured.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stagetrace import serve
from stagetrace.serve import port_is_free as port_is_free

HOST = "127.0.0.1"
LOG_LINES = 40


class ServerFailed(AssertionError):
    """The server did not start, did not answer in time or did not leave."""


_given: set[int] = set()


def free_port() -> int:
    """Return a port nobody listens on at the moment, and nobody here has been given: servers may start side by side."""
    while True:
        port = serve.free_port()
        if port not in _given:
            _given.add(port)
            return port


def group_members(group: int) -> dict[int, str]:
    """Return pid → name of the live processes of a process group (a zombie is not alive)."""
    members = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
            name = Path("/proc", entry, "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:
            continue
        state, _parent, process_group = stat.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state not in "ZX":
            members[int(entry)] = name
    return members


class Server:
    """A server process for the length of a ``with`` block.

    ``environment`` is added to this process's. On leaving, the first process gets SIGTERM, as from an
    operator; what is left of its group after ``grace`` seconds gets SIGKILL and is listed in ``killed``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        ready_path: str | None = "/health",
        deadline: float = 240.0,
        grace: float = 20.0,
    ) -> None:
        self.command = list(command)
        self.port = port
        self.log = log
        self.environment = {**os.environ, **(environment or {})}
        self.ready_path = ready_path
        self.deadline = deadline
        self.grace = grace
        self.returncode: int | None = None
        self.killed: dict[int, str] = {}
        self.ready_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The pid of the first process, which is also the number of its process group."""
        assert self._process is not None, "the server is not started"
        return self._process.pid

    def processes(self) -> dict[int, str]:
        """Return pid → command line of the live processes of the server's group."""
        return group_members(self.pid)

    def tail(self, lines: int = LOG_LINES) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Server:
        if not port_is_free(self.port):
            raise ServerFailed(f"port {self.port} is taken before the server has started")
        started = time.monotonic()
        # A group of its own, but not a session: the kernel schedules sessions against each other (autogroups),
        # and beside one full of the engine's spinning processes a client was seen to wait 700 ms for a CPU.
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,
            )
        try:
            self._wait_until_ready(started + self.deadline)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, until: float) -> None:
        assert self._process is not None
        while True:
            code = self._process.poll()
            if code is not None:
                raise ServerFailed(f"the server ended with {code} before it answered; its last lines:\n{self.tail()}")
            if self.ready_path is None or _answers(self.port, self.ready_path):
                return
            if time.monotonic() > until:
                raise ServerFailed(f"no answer after {self.deadline:.0f} s; the server's last lines:\n{self.tail()}")
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        """Send a signal to the first process."""
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """Wait for the first process to end; return its exit status, or None if it still runs."""
        assert self._process is not None
        try:
            self.returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        return self.returncode

    def stop(self) -> int:
        """End the whole group and return the first process's exit status. May be called twice."""
        assert self._process is not None
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        self.wait(self.grace)
        self._wait_for_group(2.0)
        self.killed = self.processes() or self.killed
        if self.killed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._process.wait(10)
        if not self._wait_for_group(10.0):
            raise ServerFailed(f"still alive after SIGKILL: {self.processes()}")
        return self.returncode

    def _wait_for_group(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while self.processes():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True


def _answers(port: int, path: str) -> bool:
    try:
        return get(port, path, timeout=5.0)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def get(port: int, path: str, timeout: float = 30.0) -> tuple[int, str]:
    """Return status and body of a GET."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@dataclass
class ClientResult:
    """What a client saw of one request. Times are ``time.monotonic_ns``; unknown is None."""

    status: int = 0
    sent_ns: int = 0
    first_text_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    end_ns: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    response_id: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    hung_up: bool = False

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts.get(0, "")

    @property
    def ttft_ms(self) -> float | None:
        """Request sent → first non-empty text received (streaming only)."""
        return None if self.first_text_ns is None else (self.first_text_ns - self.sent_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        """Request sent → last byte received."""
        return (self.end_ns - self.sent_ns) / 1e6

    @property
    def gaps_ms(self) -> list[float]:
        """The times between chunks that carried text."""
        return [(b - a) / 1e6 for a, b in zip(self.chunk_ns, self.chunk_ns[1:], strict=False)]


def send(
    port: int,
    body: Mapping[str, Any] | bytes,
    headers: Mapping[str, str] | None = None,
    *,
    path: str | None = None,
    timeout: float = 120.0,
    hang_up_after_chunks: int | None = None,
    hang_up_after_s: float | None = None,
    hang_up_when: threading.Event | None = None,
) -> ClientResult:
    """Send one request and read its answer, streamed or not. The path follows from the body unless given.

    A body in bytes is sent as it is. The client closes its connection after ``hang_up_after_chunks`` of text, or
    ``hang_up_after_s`` from its sending, or when it is told to.
    """
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    chat = isinstance(body, bytes) or "messages" in body
    where = path or ("/v1/chat/completions" if chat else "/v1/completions")
    result = ClientResult()
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    answered = threading.Event()
    try:
        connection.connect()
        result.sent_ns = time.monotonic_ns()
        connection.request("POST", where, payload, {"Content-Type": "application/json", **(headers or {})})
        if hang_up_after_s is not None or hang_up_when is not None:
            _hang_up_later(connection, hang_up_when or threading.Event(), hang_up_after_s, answered, result)
        _read(connection.getresponse(), result, hang_up_after_chunks)
    except (OSError, http.client.HTTPException):
        if not result.hung_up:
            raise
    finally:
        result.end_ns = time.monotonic_ns()
        answered.set()
        connection.close()
    return result


chat = completion = send


def send_half(
    port: int, body: bytes, headers: Mapping[str, str] | None = None, *, path: str | None = None
) -> ClientResult:
    """Announce more than is sent, and leave."""
    result = ClientResult(sent_ns=time.monotonic_ns(), hung_up=True)
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    connection.putrequest("POST", path or "/v1/completions")
    for name, value in {"Content-Type": "application/json", "Content-Length": "5000", **(headers or {})}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    connection.close()
    return result


def run_many(
    port: int,
    bodies: Sequence[Mapping[str, Any]],
    concurrency: int,
    headers: Sequence[Mapping[str, str]] | None = None,
) -> list[ClientResult]:
    """Send every body, at most ``concurrency`` at a time, and return the results in the bodies' order."""
    extra = headers or [{}] * len(bodies)
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda pair: send(port, pair[0], pair[1]), zip(bodies, extra, strict=True)))


def _hang_up_later(
    connection: http.client.HTTPConnection, told: threading.Event, seconds: float | None, answered: threading.Event,
    result: ClientResult,
) -> None:  # fmt: skip
    def close() -> None:
        told.wait(seconds)
        if not answered.is_set():
            result.hung_up = True
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=close, daemon=True).start()


def _read(response: http.client.HTTPResponse, result: ClientResult, hang_up_after_chunks: int | None) -> None:
    result.status = response.status
    result.headers = {name.lower(): value for name, value in response.getheaders()}
    if "text/event-stream" not in result.headers.get("content-type", ""):
        document = response.read().decode()
        if response.status != 200:
            result.error = document
            return
        _absorb(json.loads(document), result, time.monotonic_ns(), streamed=False)
        return
    while line := response.readline():
        now = time.monotonic_ns()
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        _absorb(json.loads(line[6:]), result, now, streamed=True)
        if hang_up_after_chunks is not None and len(result.chunk_ns) >= hang_up_after_chunks:
            result.hung_up = True
            return


def _absorb(event: dict[str, Any], result: ClientResult, now: int, *, streamed: bool) -> None:
    """Take in one server-sent event, or the whole document of an answer that was not streamed."""
    if "error" in event:
        result.error = json.dumps(event["error"])
        return
    inner = event.get("response") or event.get("message") or {}  # of the responses and messages APIs
    named = event.get("id") or event.get("request_id") or inner.get("id")
    result.response_id = named or result.response_id
    result.usage = event.get("usage") or inner.get("usage") or result.usage
    said = [_said(choice, result) for choice in event.get("choices", ())]
    delta = event.get("delta") or {}
    if text := delta if isinstance(delta, str) else delta.get("text"):
        result.texts[0] = result.texts.get(0, "") + text
        said.append(True)
    if streamed and any(said):
        result.chunk_ns.append(now)
        result.first_text_ns = result.first_text_ns or now


def _said(choice: dict[str, Any], result: ClientResult) -> bool:
    """Take in a choice; tell whether there was text in it, or a call of a tool."""
    index = choice.get("index", 0)
    message = choice.get("delta") or choice.get("message") or {}
    text = message.get("content") or choice.get("text") or ""
    result.texts[index] = result.texts.get(index, "") + text
    if choice.get("finish_reason"):
        result.finish_reasons[index] = choice["finish_reason"]
    return bool(text or message.get("tool_calls"))
