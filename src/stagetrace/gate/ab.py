"""Two servers in turn, A B B A ..., each started anew and under the same load: what drifts meets both alike."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

from ..faults import Fault
from ..loadgen import Settings, run_load
from ..serve import Served, free_port, must_be_free
from .runs import MOST_FAILED, NothingRecorded, Run, runs_of_store

PORT = "{port}"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
#: Told as it goes: which run of how many, what is done, and steps done of steps in all.
Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Command:
    """A server's command line, and the environment that was written before it."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def with_port(self) -> tuple[list[str], int]:
        """The words to start, and where that server will listen."""
        if any(PORT in word for word in self.words):
            port = free_port()
            return [word.replace(PORT, str(port)) for word in self.words], port
        for word, after in zip(self.words, (*self.words[1:], ""), strict=True):
            name, _, value = word.partition("=")
            if name == "--port" and (value or after).isdecimal() and 0 < int(value or after) < 1 << 16:
                return list(self.words), int(value or after)
        raise Fault(f"{shlex.join(self.words)}: say where it listens: --port {PORT}, or --port and a number")


def parse_command(text: str) -> Command:
    """Read ``[NAME=VALUE ...] PROGRAM ARGUMENT...`` as a shell would; Fault if it cannot be run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Fault(f"{text}: {error}") from None
    environment: dict[str, str] = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words:
        raise Fault(f'"{text}": a command is missing')
    if Path(words[0]).name == "stagetrace":
        raise Fault(f"{text}: give the server's own command; the gate runs it under stagetrace itself")
    if shutil.which(words[0]) is None:
        raise Fault(f"{text}: no program {words[0]}")
    return Command(tuple(words), environment)


@dataclass(frozen=True)
class Plan:
    """How much is measured: ``runs`` a side, each a closed loop of ``requests``."""

    runs: int = 5
    requests: int = 50
    concurrency: int = 1
    prompt_tokens: str = "400"
    output_tokens: str = "60"
    seed: int = 0
    warmup: int = 5

    def settings(self, url: str) -> Settings:
        """The load on one server: the same requests for each."""
        return Settings(
            url, None, None, self.concurrency, self.requests, None, self.prompt_tokens, self.output_tokens, 0,
            self.seed, max(self.warmup, self.concurrency), True, False, True, 600.0, None,
        )  # fmt: skip


def measure(
    commands: Sequence[Command],
    plan: Plan,
    folder: Path,
    tick: Tick,
    check: Callable[[Sequence[Sequence[Run]]], object] = lambda _: None,
) -> list[list[Run]]:
    """Run the servers in turn, and return the runs of each.

    The stores and logs stay in ``folder``. Fault for a server that cannot be measured, and where ``check``, which sees
    the runs there are as soon as every side has one, raises it.
    """
    for command in commands:  # not only when it is their turn, which is the second's after minutes
        must_be_free(command.with_port()[1])
    plan.settings("http://127.0.0.1:1").checked()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise Fault(f"--stores {folder}: {error.strerror}; name a folder that is yet to be made") from None
    sides: list[list[Run]] = [[] for _ in commands]
    in_turn = order(plan.runs, len(commands))
    steps = len(in_turn) * (plan.requests + 1)
    for number, side in enumerate(in_turn):
        name = f"run {number + 1} of {len(in_turn)} ({ascii_uppercase[side]})"
        done = number * (plan.requests + 1)
        store = folder / f"{number + 1:02d}-{ascii_lowercase[side]}.db"
        try:
            _one(commands[side], plan, store, name, partial(_ticked, tick, done, steps))
            sides[side].extend(_recorded(store, name, commands[side]))
        except BaseException:
            _set_aside(store)
            raise
        if all(sides):
            check(sides)
    return sides


def _recorded(store: Path, name: str, command: Command) -> list[Run]:
    with contextlib.suppress(NothingRecorded):
        if store.exists():
            return runs_of_store(store)
    raise Fault(
        f"{name}: it answered, but nothing was recorded: is stagetrace installed where {command.words[0]} is? "
        f"`stagetrace doctor` there says; the server's log is {store.with_suffix('.log')}"
    )


def _set_aside(store: Path) -> None:
    """A run that is not whole: what lies there under a run's name may be judged, also after an interruption."""
    part = store.with_suffix(".part")
    for file in ("-wal", "-shm", "-lock", ""):
        with contextlib.suppress(OSError):
            Path(f"{store}{file}").rename(f"{part}{file}")


def _ticked(tick: Tick, done: int, steps: int, said: str, more: int) -> None:
    tick(said, done + more, steps)


def order(runs: int, sides: int = 2) -> list[int]:
    """A B B A A B B A ...: each side as often, and as early, as the other."""
    forth = list(range(sides))
    return [side for number in range(runs) for side in (forth if number % 2 == 0 else forth[::-1])]


def _one(command: Command, plan: Plan, store: Path, name: str, tick: Callable[[str, int], None]) -> None:
    words, port = command.with_port()
    log = store.with_suffix(".log")
    began: dict[str, float] = {}

    def waits(phase: str) -> None:
        seconds = time.monotonic() - began.setdefault(phase, time.monotonic())
        tick(f"{name}: {phase}, {seconds:.0f} s", 0 if phase == "starting" else plan.requests)

    with Served(words, port, store, log, command.environment, waits) as server:
        outcome = run_load(plan.settings(server.url), lambda done, *_: tick(f"{name}: load", 1 + done))
    if outcome.interrupted:
        raise KeyboardInterrupt
    failed = [exchange for exchange in outcome.exchanges if not exchange.ok]
    if len(failed) > MOST_FAILED * len(outcome.exchanges):
        said = f": {failed[0].said}" if failed[0].said else ""
        raise Fault(
            f"{name}: {len(failed)} of {len(outcome.exchanges)} requests failed ({failed[0].error}{said}); "
            f"the server's log is {log}"
        )
