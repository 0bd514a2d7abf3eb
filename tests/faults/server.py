"""A real server under ``stagetrace run`` that can be made slow at a chosen place while it serves."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagetrace import session
from stagetrace.model import RequestRecord
from stagetrace.store import load
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.serving import Server, free_port, send

from .plugin.stagetrace_faults import control
from .plugin.stagetrace_faults.control import Fault

PLUGIN = Path(__file__).parent / "plugin"
#: What the bench calls them → what they are called where they are described.
LAYOUTS = {"default": "plain", "gpu": "v2_async_uni"}


@dataclass(frozen=True)
class Sent:
    """A request that was answered: its ``x-request-id``, and how long it took by its client's clock."""

    name: str
    e2e_ms: float


@dataclass
class FaultyServer:
    """A live server. ``inject`` holds for every request that is sent after it has returned."""

    server: Server
    port: int
    store: Path
    control: Path
    engine: Any
    model: Path
    layout: str
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**6)))
    _bases: dict[int, str] = field(default_factory=dict)

    def inject(self, fault: Fault | None) -> int:
        """Switch to ``fault``: processes look at the file before every delay, so none is still to hear of it."""
        return control.write(self.control, fault)

    def send(self, arm: str, prompt_tokens: int, output_tokens: int) -> Sent:
        """One streamed chat request with a prompt of its own. Its ``x-request-id`` is ``arm`` and a number."""
        number = next(self._numbers)
        name = f"{arm}-{number:06d}"
        # Each digit is a token: as long as any other prompt, and different from its first token on.
        text = f"{number:06d}"[::-1] + self._base(prompt_tokens)[6:]
        body = {
            "model": self.engine.model, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0.0,
            "stream": True, "messages": [{"role": "user", "content": text}],
        }  # fmt: skip
        result = send(self.port, body, {"X-Request-Id": name})
        if result.status != 200 or result.error or not result.chunk_ns:
            raise RuntimeError(f"request {name} failed with {result.status}: {result.error}\n{self.server.tail()}")
        return Sent(name, result.e2e_ms)

    def _base(self, tokens: int) -> str:
        if tokens not in self._bases:
            self._bases[tokens] = self.engine.prompt_of(self.model, tokens, 0)
        return self._bases[tokens]

    def records(self, names: Sequence[str], timeout_s: float = 15.0) -> dict[str, RequestRecord]:
        """What stagetrace stored of these requests; waits until it has all of them."""
        until = time.monotonic() + timeout_s
        while True:
            newest = load(self.store, limit=len(names) + 20, steps=False).requests
            found = {r.external_id: r for r in newest if r.external_id in names and r.status != "in_flight"}
            if len(found) == len(names):
                return {str(name): record for name, record in found.items()}
            if time.monotonic() > until:
                raise RuntimeError(f"{len(names) - len(found)} of {len(names)} requests are not in the store")
            time.sleep(0.2)

    def delays_ms(self, number: int) -> dict[str, list[float]]:
        """Engine's or client's request id → every delay it met while the writing ``number`` of the file held."""
        found: dict[str, list[float]] = {}
        for note in control.notes(self.control):
            if note.number == number:
                for request in note.requests:
                    found.setdefault(request, []).append(note.ms)
        return found


@contextmanager
def serve(engine: Any, model: Path, folder: Path, layout: str = "default") -> Iterator[FaultyServer]:
    """A server of one of ``LAYOUTS``; its store, its log and the notes of its delays lie in ``folder``."""
    configuration = CONFIGURATIONS[LAYOUTS[layout]]
    port, store, path = free_port(), folder / "faults.db", folder / "faults.json"
    control.write(path, None)
    command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--"]
    command += [*engine.command(model, port), *configuration.arguments]
    environment = {**engine.environment(), **configuration.environment(), session.ENV: "", "STAGETRACE": ""}
    entries = [str(PLUGIN), environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH") or ""]
    environment |= {control.ENV: str(path), "PYTHONPATH": os.pathsep.join(filter(None, entries))}
    with Server(command, port=port, log=folder / "server.log", environment=environment) as server:
        yield FaultyServer(server, port, store, path, engine, model, layout)
