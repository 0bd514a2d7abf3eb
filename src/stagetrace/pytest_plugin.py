"""A pytest plug-in: a server recorded by stagetrace for the length of a session, and assertions on its stages.

def test_latency(stagetrace_server):
    server = stagetrace_server("server --model MODEL --port {port}")
    server.load(requests=30)
    server.assert_stage("prefill", p95_ms=120)
    server.assert_stage("ttft", p95_ms=200)
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .gate.ab import Plan
    from .model import RequestRecord
    from .serve import Served

T = TypeVar("T")
#: What was answered is in the store this soon, on the slowest machine.
STORED_S = 30.0
_LIMIT = re.compile(r"p(\d{1,2}(?:\.\d+)?)_ms")


class Measured:
    """A live server. What is asserted is asserted of the last :meth:`load`."""

    def __init__(self, served: Served) -> None:
        self.url = served.url
        self.store = served.store
        self._ids: set[str] = set()
        self._seeds: set[int] = set()

    def load(
        self,
        requests: int = 30,
        concurrency: int = 1,
        prompt_tokens: str | int = "400",
        output_tokens: str | int = "60",
        seed: int | None = None,
        warmup: int = 3,
    ) -> None:
        """Send a closed loop of so many requests; fails the test if one of them is not answered.

        Each load has prompts of its own: those of an earlier one would be found in the prefix cache. The same ``seed``
        is the same prompts.
        """
        __tracebackhide__ = True  # what failed is the caller's line
        from .gate.ab import Plan

        for name, number, least in (("requests", requests, 1), ("concurrency", concurrency, 1), ("warmup", warmup, 0)):
            if not isinstance(number, int) or number < least:
                pytest.fail(f"load({name}={number!r}): give a whole number of {least} or more")
        if seed is None:
            seed = next(number for number in count() if number not in self._seeds)
        self.send(Plan(1, requests, concurrency, str(prompt_tokens), str(output_tokens), seed, warmup))

    def send(self, plan: Plan) -> None:
        """The same, of a plan."""
        __tracebackhide__ = True
        from .loadgen import run_load

        self._seeds.add(plan.seed)  # also if it comes to nothing: some of it may have been answered
        outcome = _tried(lambda: run_load(plan.settings(self.url), lambda *_: None))
        failed = [exchange for exchange in outcome.exchanges if not exchange.ok]
        if failed:
            pytest.fail(
                f"{len(failed)} of {len(outcome.exchanges)} requests failed: {failed[0].error} {failed[0].said}"
            )
        self._ids = {exchange.request_id for exchange in outcome.exchanges}

    def requests(self) -> list[RequestRecord]:
        """The records of the last load."""
        __tracebackhide__ = True
        from .store import load

        until = time.monotonic() + STORED_S
        while True:
            stored = load(self.store, steps=False).requests
            found = [r for r in stored if r.external_id in self._ids and r.status != "in_flight"]
            if len(found) >= len(self._ids):
                return found
            if time.monotonic() > until:
                pytest.fail(
                    f"{self.store} has {len(found)} of {len(self._ids)} requests: is stagetrace installed where the "
                    "server is?"
                )
            time.sleep(0.2)

    def assert_stage(self, key: str, **limits_ms: float) -> None:
        """Fail if a percentile of a stage or timer is above its limit: ``assert_stage("prefill", p95_ms=120)``."""
        __tracebackhide__ = True
        from .gate.runs import times_of
        from .gate.settings import NAMES
        from .stats import percentile

        quantiles = _checked(key, limits_ms, NAMES)
        if not self._ids:
            pytest.fail("assert_stage: nothing was sent yet; call load() first")
        known = [(ms, r) for r in self.requests() if (ms := times_of(r).get(NAMES[key].key)) is not None]
        if not known:
            states = {row.state for r in self.requests() for row in r.stages if row.key == key}
            pytest.fail(f"{key} has no time in any of {len(self._ids)} requests ({', '.join(sorted(states))})")
        values = [ms for ms, _ in known]
        seen = {name: percentile(values, q) or 0.0 for name, q in quantiles.items()}
        broken = [
            f"{name.removesuffix('_ms')} is {seen[name]:.2f} ms, {most:g} ms at most"
            for name, most in limits_ms.items()
            if seen[name] > most
        ]
        if broken:
            ms, longest = max(known, key=lambda each: each[0])
            pytest.fail(
                f"{key}: {'; '.join(broken)}; over {len(values)} requests, the longest {ms:.2f} ms: "
                f"stagetrace stages {self.store} --request {longest.request_id}"
            )


def _checked(key: str, limits_ms: dict[str, float], names: Collection[str]) -> dict[str, float]:
    """The percentile of each limit; fails the test where it asks for something there is not."""
    __tracebackhide__ = True
    if key not in names:
        pytest.fail(f"{key}: no timer or stage; there are: {', '.join(sorted(names))}")
    if not limits_ms:
        pytest.fail(f"assert_stage({key!r}): give a limit, such as p95_ms=120")
    matches = {name: _LIMIT.fullmatch(name) for name in limits_ms}
    strange = [name for name, match in matches.items() if match is None]
    if strange:
        pytest.fail(f"{strange[0]}: write a limit as p95_ms=120")
    for name, most in limits_ms.items():
        if isinstance(most, bool) or not isinstance(most, int | float) or not 0 < most < math.inf:
            pytest.fail(f"{name}={most!r}: a limit is a time in ms, more than 0")
    return {name: float(match[1]) for name, match in matches.items() if match}


def _tried(work: Callable[[], T]) -> T:
    """What cannot be done fails the test, in one line, as the command would say it."""
    __tracebackhide__ = True
    from .faults import Fault

    try:
        return work()
    except Fault as fault:
        said = str(fault)
    pytest.fail(said)


@contextmanager
def servers(folder: Path) -> Iterator[Callable[[str], Measured]]:
    """What starts a server by its command line, once each; stores and logs are in ``folder``. They end with it."""
    from .faults import Fault
    from .gate.ab import parse_command
    from .serve import Served

    known: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:

        def started(command: str) -> Measured:
            parsed = parse_command(command)
            words, port = parsed.with_port()
            store = folder / f"server-{len(known) + len(failed) + 1}.db"
            served = Served(words, port, store, store.with_suffix(".log"), parsed.environment)
            return Measured(stack.enter_context(served))

        def start(command: str) -> Measured:
            __tracebackhide__ = True
            if command not in known and command not in failed:
                try:
                    known[command] = started(command)
                except Fault as fault:
                    failed[command] = str(fault)
            if command in failed:
                pytest.fail(failed[command])  # once tried: a server that does not start may take a minute to say so
            return known[command]

        yield start


@pytest.fixture(scope="session")
def stagetrace_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Measured]]:
    """Start a server by its command line, once in a session; it is ended with the session."""
    with servers(tmp_path_factory.mktemp("stagetrace")) as start:
        yield start
