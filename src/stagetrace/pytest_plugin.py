"""A pytest plug-in: a server recorded by stagetrace for the length of a session, and assertions on its stages.

def test_latency(stagetrace_server):
    server = stagetrace_server("server --model MODEL --port {port}")
    server.load(requests=30)
    server.assert_stage("prefill", p95_ms=120)
    server.assert_stage("ttft", p95_ms=200)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .gate.ab import Plan
    from .model import RequestRecord
    from .serve import Served

#: What was answered is in the store this soon, on the slowest machine.
STORED_S = 30.0
_LIMIT = re.compile(r"p(\d{1,2}(?:\.\d+)?)_ms")


class Measured:
    """A live server. What is asserted is asserted of the last :meth:`load`."""

    def __init__(self, served: Served) -> None:
        self.url = served.url
        self.store = served.store
        self._ids: set[str] = set()

    def load(
        self,
        requests: int = 30,
        concurrency: int = 1,
        prompt_tokens: str = "400",
        output_tokens: str = "60",
        seed: int = 0,
        warmup: int = 3,
    ) -> None:
        """Send a closed loop of so many requests; fails the test if one of them is not answered."""  # fmt: skip
        from .gate.ab import Plan

        self.send(Plan(1, requests, concurrency, prompt_tokens, output_tokens, seed, warmup))

    def send(self, plan: Plan) -> None:
        """The same, of a plan."""
        __tracebackhide__ = True  # what failed is the caller's line
        from .loadgen import run_load

        outcome = run_load(plan.settings(self.url), lambda *_: None)
        failed = [exchange for exchange in outcome.exchanges if not exchange.ok]
        if failed:
            pytest.fail(
                f"{len(failed)} of {len(outcome.exchanges)} requests failed: {failed[0].error} {failed[0].said}"
            )
        self._ids = {exchange.request_id for exchange in outcome.exchanges}

    def requests(self) -> list[RequestRecord]:
        """The records of the last load."""
        __tracebackhide__ = True  # what failed is the caller's line
        from .store import load

        until = time.monotonic() + STORED_S
        while True:
            stored = load(self.store, steps=False).requests
            found = [r for r in stored if r.external_id in self._ids and r.status != "in_flight"]
            if len(found) >= len(self._ids):
                return found
            if time.monotonic() > until:
                pytest.fail(f"{self.store} has {len(found)} of {len(self._ids)} requests: is the server recorded?")
            time.sleep(0.2)

    def assert_stage(self, key: str, **limits_ms: float) -> None:
        """Fail if a percentile of a stage or timer is above its limit: ``assert_stage("prefill", p95_ms=120)``."""
        __tracebackhide__ = True  # what failed is the caller's line
        from .gate.runs import times_of
        from .gate.settings import NAMES
        from .stats import percentile

        if key not in NAMES:
            raise ValueError(f"{key}: no timer or stage; there are: {', '.join(sorted(NAMES))}")
        if not limits_ms:
            raise ValueError(f"assert_stage({key!r}): give a limit, such as p95_ms=120")
        if not self._ids:
            raise ValueError("assert_stage: nothing was sent yet; call load() first")
        records = self.requests()
        values = [ms for record in records if (ms := times_of(record).get(NAMES[key].key)) is not None]
        if not values:
            states = sorted(
                {r.stage(key).state for r in records} if any(s.key == key for s in records[0].stages) else ()
            )
            pytest.fail(f"{key} has no time in any of {len(records)} requests {', '.join(states)}")
        for name, most in limits_ms.items():
            match = _LIMIT.fullmatch(name)
            if match is None:
                raise ValueError(f"{name}: write a limit as p95_ms=120")
            seen = percentile(values, float(match[1])) or 0.0
            if seen > most:
                pytest.fail(f"{key}: p{match[1]} is {seen:.2f} ms over {len(values)} requests, {most:g} ms at most")


@pytest.fixture(scope="session")
def stagetrace_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Measured]]:
    """Start a server by its command line, once in a session; it is ended with the session."""
    from .gate.ab import parse_command
    from .serve import Served

    folder = tmp_path_factory.mktemp("stagetrace")
    known: dict[str, Measured] = {}
    with ExitStack() as stack:

        def start(command: str) -> Measured:
            if command not in known:
                parsed = parse_command(command)
                words, port = parsed.with_port()
                store = folder / f"server-{len(known) + 1}.db"
                served = Served(words, port, store, store.with_suffix(".log"), parsed.environment)
                known[command] = Measured(stack.enter_context(served))
            return known[command]

        yield start
