"""Real servers for the tests: one at a time, each started once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stagetrace import session as sessions
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.serving import ClientResult, Server, free_port, get, run_many
from tests.receivers import Receiver

PROBE = Path(__file__).parent / "probe"
NAME = "stagetrace-demo"
#: Lengths in tokens of the prompts that the offline runs answer with 12 tokens each.
OFFLINE_PROMPTS = (40, 300)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the engine.

    What shares several servers comes last, so that those disturb nobody; and what ends them comes after all else.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: [name in getattr(item, "fixturenames", ()) for name in ("ends", "ships")])


@contextmanager
def own_sessions() -> Iterator[None]:
    """Other servers may run under stagetrace on this machine; theirs are none of our business."""
    with tempfile.TemporaryDirectory(prefix="stagetrace-tests-", dir=sessions.base()) as base:
        before = os.environ.get(sessions.BASE_ENV)
        os.environ[sessions.BASE_ENV] = base
        yield
        os.environ.pop(sessions.BASE_ENV) if before is None else os.environ.update({sessions.BASE_ENV: before})


@pytest.fixture(scope="session", autouse=True)
def sessions_of_our_own() -> Iterator[None]:
    """See :func:`own_sessions`."""
    with own_sessions():
        yield


@pytest.fixture(scope="session")
def engine() -> Any:
    """The demo server's description; fails, and says how to install it, without the engine."""
    from stagetrace_vllm.demo_server import DemoServer

    server = DemoServer()
    missing = server.missing()
    if missing:
        pytest.fail(f"{missing}; or run `make bootstrap`, which installs what the tests need", pytrace=False)
    return server


@pytest.fixture(scope="session")
def model(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made once."""
    made: Path = engine.make_model(tmp_path_factory.mktemp("model") / "tiny")
    return made


@dataclass
class Live:
    """A running server, and where its records go (None: it runs without stagetrace)."""

    server: Server
    port: int
    store: Path | None
    prompts: Any
    folder: Path
    #: Where its traces go, if it was started with one.
    received: Receiver | None = None

    def body(
        self, tokens: int, output: int, *, seed: int = 0, chat: bool = True, stream: bool = True
    ) -> dict[str, Any]:
        """A greedy request of ``tokens`` prompt tokens for exactly ``output`` tokens."""
        text = self.prompts(tokens, seed)
        body: dict[str, Any] = {
            "model": NAME, "max_tokens": output, "ignore_eos": True, "temperature": 0.0, "stream": stream
        }  # fmt: skip
        if stream:
            body["stream_options"] = {"include_usage": True}
        body["messages" if chat else "prompt"] = [{"role": "user", "content": text}] if chat else text
        return body

    def records(self, results: list[ClientResult], timeout: float = 60.0) -> list[Any]:
        """The stored record of each result, in order; waits until all of them are there and finished."""
        from stagetrace import load

        assert self.store is not None
        until = time.monotonic() + timeout
        while True:
            known = {r.request_id: r for r in load(self.store).requests if r.status != "in_flight"}
            found = [known.get(r.response_id or "") for r in results]
            if all(found):
                return found
            assert time.monotonic() < until, f"{found.count(None)} of {len(results)} requests are not in the store"
            time.sleep(0.2)

    @property
    def session(self) -> Path:
        """This server's session; others may run on the machine."""
        (own,) = [s for s in sessions.live() if (s / sessions.OWNER).read_text().split()[0] == str(self.server.pid)]
        return own

    def look_inside(self) -> dict[str, dict[str, Any]]:
        """What the probe says of each engine process, by role."""
        seen = {}
        for pid, command in self.server.processes().items():
            role = next((r for r in ("EngineCore", "Worker") if r in command), None)
            if role is None and "api_server" in command and " run " not in command:
                role = "API"
            if role is None or "resource_tracker" in command:
                continue
            os.kill(pid, signal.SIGUSR2)
            dump = self.folder / f"{pid}.json"
            until = time.monotonic() + 20
            while not dump.exists():
                get(self.port, "/health")  # wakes the event loop, so that Python gets to its signal handler
                assert time.monotonic() < until, f"{role} (pid {pid}) does not answer the probe"
                time.sleep(0.05)
            seen[role] = json.loads(dump.read_text())
            dump.unlink()
        return seen


@dataclass
class Starter:
    """Starts servers of one configuration, with or without stagetrace."""

    engine: Any
    model: Path
    folder: Path
    _texts: dict[tuple[int, int], str] = field(default_factory=dict)

    def prompt(self, tokens: int, seed: int) -> str:
        """A prompt, made once."""
        key = (tokens, seed)
        if key not in self._texts:
            self._texts[key] = self.engine.prompt_of(self.model, tokens, seed)
        return self._texts[key]

    def start(
        self,
        name: str,
        *,
        traced: bool,
        extra: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        received: Receiver | None = None,
        deadline_s: float = 240.0,
        **variables: str,
    ) -> Iterator[Live]:
        """Yield a live server; the generator's end stops it and everything it started.

        ``extra`` are the server's, ``options`` those of ``stagetrace run``, and ``received`` gets its traces; the
        server itself is to be ``without`` some of the ``variables``.
        """
        configuration = CONFIGURATIONS[name]
        port = free_port()
        folder = self.folder / f"{name}-{'traced' if traced else 'untraced'}-{port}"
        folder.mkdir()
        store = folder / "store.db" if traced else None
        command = [*configuration.command(self.engine.command(self.model, port)), *extra]
        if without:
            command = ["env", *(f"--unset={variable}" for variable in without), *command]
        if received:
            options = (*options, "--otlp", received.url)
        if traced:
            command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), *options, "--", *command]
        environment = {**self.engine.environment(), **configuration.environment(), "PROBE_DIR": str(folder)}
        entries = [str(PROBE), *filter(None, [environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(entries)
        log = folder / "server.log"
        with Server(
            command, port=port, log=log, environment={**environment, **variables}, deadline=deadline_s
        ) as server:
            yield Live(server, port, store, self.prompt, folder, received)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def starter(engine: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Starter:
    """See :class:`Starter`."""
    return Starter(engine, model, tmp_path_factory.mktemp("servers"))


@dataclass
class Untraced:
    """What a server without stagetrace answered, and what its processes look like inside."""

    serial: list[str]
    offline: list[str]
    loaded: list[list[str]]
    inside: dict[str, dict[str, Any]]


def serial_bodies(live: Live) -> list[dict[str, Any]]:
    """Greedy requests of several kinds, to be sent one at a time."""
    return [
        live.body(tokens, output, seed=seed, chat=chat, stream=stream)
        for seed, (tokens, output, chat, stream) in enumerate(
            [(20, 40, True, True), (400, 30, True, False), (900, 60, False, True), (2000, 20, False, False)]
        )
    ]


def mixed_bodies(live: Live, count: int = 100) -> list[dict[str, Any]]:
    """The mixed load: short and long prompts and answers, chat and completions, streamed and not."""
    rng = random.Random(7)
    return [
        live.body(
            rng.choice([20, 400, 2000]), rng.choice([1, 5, 20, 120]),
            seed=rng.randrange(6), chat=rng.random() < 0.7, stream=rng.random() < 0.7,
        )
        for _ in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="session")
def untraced(starter: Starter) -> Untraced:
    """The yardstick, from one server that is gone again before any other is started."""
    serve = starter.start("plain", traced=False)
    live = next(serve)
    try:
        serial = [r.text for r in run_many(live.port, serial_bodies(live), 1)]
        offline = [r.text for r in run_many(live.port, [live.body(n, 12, seed=5) for n in OFFLINE_PROMPTS], 1)]
        get(live.port, "/metrics")  # the traced servers' tests ask for it, and it starts a thread
        loaded = [[r.text for r in run_many(live.port, mixed_bodies(live), 16)] for _ in range(2)]
        return Untraced(serial, offline, loaded, live.look_inside())
    finally:
        serve.close()


@pytest.fixture(scope="session")
def ships(starter: Starter) -> Iterator[Any]:
    """Several servers at a time: see :class:`tests.engine.fleet.Fleet`."""
    from tests.engine.fleet import fleet  # which needs what is defined above

    with fleet(starter) as running:
        yield running


@pytest.fixture
def ends() -> None:
    """For a test that ends a server of the fleet."""
