"""Send a load and report on it: an open loop (Poisson arrivals) or a closed one."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from ..clock import anchor
from ..faults import Fault
from .body import payload
from .client import Exchange, send
from .discover import Served, discover
from .mix import Mix
from .plan import Ask, Calibration, Texts, calibrated, plan
from .settings import API_KEY, Settings, Target

#: Lengths in characters of the two requests that tell how long a token is here: one is little but a chat's frame.
CALIBRATION = (20, 3000)
#: Told after each answer: how many there are, how many of them failed, seconds since the start.
Tick = Callable[[int, int, float], None]


@dataclass
class Outcome:
    """All that came of a load."""

    served: Served
    calibration: Calibration = field(default_factory=Calibration)
    clock: tuple[int, int] = field(default_factory=anchor)
    #: Calibration and warm-up: on the server they are requests like any other.
    before: list[Exchange] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    interrupted: bool = False


def run_load(settings: Settings, tick: Tick) -> Outcome:
    """Send the load; Fault, before any of it is sent, for what cannot be. Ctrl-C ends it with what there is."""
    target, prompt, output = settings.checked()
    headers = _authorization(target)
    served = discover(target, settings, headers)
    longest = max(prompt.longest, 1) + output.longest
    if served.max_model_len is not None and longest > served.max_model_len:
        raise Fault(
            f"--prompt-tokens {settings.prompt_tokens} and --output-tokens {settings.output_tokens} make up to "
            f"{longest:,} tokens; {served.model} takes {served.max_model_len:,}"
        )
    load = Load(settings, target, headers, Outcome(served), tick)
    asyncio.run(load.run(prompt, output))
    load.outcome.exchanges.sort(key=lambda exchange: exchange.index)
    return load.outcome


def _authorization(target: Target) -> dict[str, str]:
    key = os.environ.get(API_KEY)
    if key and not (key.isascii() and key.isprintable()):
        raise Fault(f"{API_KEY}: not a key that can be sent; it has other than printable ASCII characters")
    value = f"Bearer {key}" if key else target.authorization
    return {"Authorization": value} if value else {}


@dataclass
class Load:
    """A load that is being sent."""

    settings: Settings
    target: Target
    headers: dict[str, str]
    outcome: Outcome
    tick: Tick
    #: In every request id, with how it is driven: ids of two loads must not meet in one store.
    name: str = field(init=False)
    texts: Texts = field(init=False)
    _stopped: bool = False
    _began: int = 0

    def __post_init__(self) -> None:
        rate = self.settings.rate
        driven = f"c{self.settings.concurrency or 1}" if rate is None else f"r{rate:g}"
        self.name = f"load-{driven}-{secrets.token_hex(4)}"

    async def run(self, prompt: Mix, output: Mix) -> None:
        """Calibrate, warm up, and send it all."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._all(prompt, output))

        def stop() -> None:
            self._stopped = self.outcome.interrupted = True
            work.cancel()

        with suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            loop.add_signal_handler(signal.SIGINT, stop)
        try:
            await work
        except asyncio.CancelledError:
            if not self._stopped:
                raise

    async def _all(self, prompt: Mix, output: Mix) -> None:
        settings = self.settings
        self.texts = Texts(settings.seed, Calibration())
        await self._calibrate()
        self.texts = Texts(settings.seed, self.outcome.calibration)
        # Other prompts than the load's own, which would find them in the prefix cache.
        warm = [Ask(-3 - a.index, a.prompt_tokens, a.output_tokens, None)
                for a in plan(settings.seed, prompt, output, None, settings.warmup)]  # fmt: skip
        await self._closed(iter(warm), settings.concurrency or 1, None, self.outcome.before)
        asks = plan(settings.seed, prompt, output, settings.rate, settings.count)
        self._began = time.monotonic_ns()
        if settings.rate is not None:
            await self._open(asks)
        else:
            await self._closed(asks, settings.concurrency or 1, settings.duration_s, self.outcome.exchanges)

    async def _calibrate(self) -> None:
        """Two requests of known lengths for one token each; the first must succeed, or none will."""
        points = []
        few, many = CALIBRATION
        # A token is a character at least, so this fits.
        many = min(many, max(few + 1, (self.outcome.served.max_model_len or 2 * many) // 2))
        for index, characters in enumerate((few, many), 1):
            if self._stopped:
                return
            exchange = self._exchange(Ask(-index, 0, 1, None), None)
            await self._send(exchange, self.texts.text(exchange.index, characters))
            self.outcome.before.append(exchange)
            if not exchange.ok and index == 1 and not self._stopped:
                said = f": {exchange.said}" if exchange.said else ""
                raise Fault(
                    f"{self.settings.place}{self.settings.path} refused a first request ({exchange.error}{said})"
                )
            points.append((characters, exchange.prompt_tokens if exchange.ok else None))
        self.outcome.calibration = calibrated(points)

    async def _closed(self, asks: Iterator[Ask], at_once: int, duration_s: float | None, into: list[Exchange]) -> None:
        until = None if duration_s is None else time.monotonic() + duration_s

        async def one_after_the_other() -> None:
            for ask in asks:
                if self._stopped or (until is not None and time.monotonic() >= until):
                    return
                await self._one(ask, None, into)

        await _together(one_after_the_other() for _ in repeat(None, at_once))

    async def _open(self, asks: Iterator[Ask]) -> None:
        tasks: set[asyncio.Task[None]] = set()
        duration_s = self.settings.duration_s
        try:
            for ask in asks:
                if self._stopped or (duration_s is not None and (ask.due_s or 0) >= duration_s):
                    break
                due = self._began + int((ask.due_s or 0) * 1e9)
                await asyncio.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
                tasks.add(asyncio.create_task(self._one(ask, due, self.outcome.exchanges)))
            await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def _one(self, ask: Ask, due_ns: int | None, into: list[Exchange]) -> None:
        exchange = self._exchange(ask, due_ns)
        try:
            await self._send(exchange, self.texts.prompt(ask, self.settings.shared_prefix))
        finally:
            into.append(exchange)
        if into is self.outcome.exchanges:
            failed = sum(not done.ok for done in into)
            self.tick(len(into), failed, (time.monotonic_ns() - self._began) / 1e9)

    def _exchange(self, ask: Ask, due_ns: int | None) -> Exchange:
        flag = "01" if self.settings.sampled else "00"
        number = f"{ask.index:06d}" if ask.index >= 0 else f"warm{-ask.index}"
        return Exchange(
            ask.index, f"{self.name}-{number}", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flag}",
            ask.prompt_tokens, ask.output_tokens, due_ns,
        )  # fmt: skip

    async def _send(self, exchange: Exchange, prompt: str) -> None:
        headers = {**self.headers, "traceparent": exchange.traceparent, "x-request-id": exchange.request_id}
        body = payload(self.settings, self.outcome.served.model, prompt, exchange.asked_output_tokens)
        await send(self.target, self.settings.path, headers, body, exchange, self.settings.timeout_s)


async def _together(works: Iterator[Coroutine[Any, Any, None]] | Any) -> None:
    """Run them all; none is left behind, however it ends."""
    tasks = {asyncio.create_task(work) for work in works}
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
