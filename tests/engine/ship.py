"""A server whose every request has a trace of its own, so that what became of it can be told whatever happens."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stagetrace import load
from stagetrace.model import RequestRecord
from tests.engine.conftest import Live
from tests.engine.serving import ClientResult, get, send
from tests.invariants import SERVER
from tests.receivers import Receiver, spans_of

#: Found nowhere but in what clients send, in a key, and in what exceptions say.
CANARY = "canary-7f3e91"
KEY = f"{CANARY}-key"
_numbers = itertools.count(1)


@dataclass
class Ship:
    """A server and where its traces go. ``asked`` counts what was asked, ``sent`` are the traces it was asked under."""

    live: Live
    received: Receiver
    sent: list[str] = field(default_factory=list)
    #: Those of them that are not to be exported.
    unsampled: list[str] = field(default_factory=list)
    asked: int = 0
    #: Roots that were there before, by their span's id.
    before: frozenset[str] = frozenset()

    @classmethod
    def joining(cls, live: Live) -> Ship:
        """For a server that has been asked things before."""
        assert live.store is not None and live.received is not None
        return cls(live, live.received, before=frozenset(r.span_id for r in load(live.store).requests))

    @property
    def store(self) -> Any:
        assert self.live.store is not None
        return self.live.store

    def ask(
        self,
        body: Mapping[str, Any] | bytes,
        headers: Mapping[str, str] | None = None,
        *,
        sampled: bool = True,
        by: Callable[..., ClientResult] = send,
        **more: Any,
    ) -> tuple[str, ClientResult]:
        """Send a request under a trace of its own: the trace, and what the client saw. ``more`` is for ``by``."""
        trace, result = f"{next(_numbers):032x}", ClientResult()
        self.asked += 1
        if "traceparent" not in (headers or {}):
            self.sent.append(trace)
            self.unsampled += [] if sampled else [trace]
        caller = f"00-{trace}-{trace[16:]}-{sampled:02x}"
        named = {"traceparent": caller, "Authorization": f"Bearer {KEY}", **(headers or {})}
        try:
            result = by(self.live.port, body, named, **more)
        except (OSError, ValueError) as lost:  # a server that is killed answers nothing, or the half of it
            result.error = type(lost).__name__
        return trace, result

    def ask_many(self, asks: Sequence[Mapping[str, Any]], concurrency: int) -> list[tuple[str, ClientResult]]:
        """Each of ``asks`` is what :meth:`ask` takes, by name."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda ask: self.ask(**ask), asks))

    def stored(self, traces: Sequence[str], timeout_s: float = 30.0) -> list[list[RequestRecord]]:
        """The finished records of each trace, by sequence; waits until each has some."""
        until = time.monotonic() + timeout_s
        while True:
            found: dict[str, list[RequestRecord]] = {trace: [] for trace in traces}
            for record in load(self.store).requests:
                if record.status != "in_flight" and record.trace_id in found:
                    found[record.trace_id].append(record)
            missing = [trace for trace, records in found.items() if not records]
            if not missing:
                return [sorted(found[trace], key=lambda record: record.sequence) for trace in traces]
            assert time.monotonic() < until, f"{len(missing)} of {len(traces)} requests are not in the store: {missing}"
            time.sleep(0.1)

    def record(self, trace: str) -> RequestRecord:
        """The one record of a trace."""
        ((record,),) = self.stored([trace])
        return record

    def running(self, count: int) -> None:
        """Wait until the engine runs that many sequences."""
        wait(lambda: engine_has(self.live.port, "running") >= count, f"{count} sequences run")

    def waiting(self, count: int) -> None:
        """Wait until that many sequences wait in the engine."""
        wait(lambda: engine_has(self.live.port, "waiting") >= count, f"{count} sequences wait")

    def idle(self) -> None:
        """Wait until the engine has nothing to do."""
        wait(lambda: engine_has(self.live.port) == 0, "the engine rests")

    def in_flight(self, count: int) -> None:
        """Wait until the store shows that many unfinished requests that have their first token."""
        wait(
            lambda: sum(r.status == "in_flight" and r.ttft_ms is not None for r in load(self.store).requests) >= count,
            f"{count} are in flight",
        )

    def pids(self, word: str) -> list[int]:
        """Processes of the server whose command line has ``word`` in it, `stagetrace run` apart."""
        return [p for p, command in self.live.server.processes().items() if word in command and " run " not in command]

    def said(self) -> list[str]:
        """What we have said on the server's stderr."""
        lines = self.live.server.log.read_text(errors="replace").splitlines()
        return [line[line.index("stagetrace: ") :] for line in lines if "stagetrace: " in line]


def engine_has(port: int, *states: str) -> float:
    """How many sequences are in one of these states (running and waiting, if none is named), by the engine's gauges."""
    names = tuple(f"vllm:num_requests_{state}{{" for state in states or ("running", "waiting"))
    return sum(float(line.split()[-1]) for line in get(port, "/metrics")[1].splitlines() if line.startswith(names))


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Until it is so."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


class Background:
    """A call that goes on beside the test; :meth:`result` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()))
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(120)
        (found,) = self._found
        return found


def spans_sent(received: Receiver) -> list[Any]:
    """The spans that have arrived; of a message that came again, as it may, once."""
    bodies = dict.fromkeys(body for path, body in received.bodies if path == "/v1/traces")
    return list(spans_of(ExportTraceServiceRequest.FromString(body) for body in bodies))


def roots_sent(received: Receiver) -> list[tuple[str, str]]:
    """(trace, span) of the root spans that have arrived."""
    return [(span.trace_id.hex(), span.span_id.hex()) for span in spans_sent(received) if span.kind == SERVER]
