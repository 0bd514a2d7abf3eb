"""What running servers say of their hooks, from their session directories."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from . import address, marks, session
from .marks import TextMark
from .rings import open_ring

#: From harmless to worst, by the first word of a state.
_ORDER = ("waiting", "installed", "failing", "refused:", "removed")


@dataclass
class Server:
    """A live session. ``states`` has the worst that any of its processes says of each hook."""

    name: str
    processes: int
    paused: bool
    states: dict[str, str]
    #: Lines on the GPUs its collector samples, or cannot.
    gpu: list[str] = field(default_factory=list)

    def words(self) -> str:
        """One line for a person."""
        installed = sum(state == "installed" for state in self.states.values())
        bad = [target for target, state in self.states.items() if badness(state) > 1]
        said = f", {len(bad)} in trouble ({', '.join(bad)})" if bad else ""
        paused = "; paused (`stagetrace resume` goes on)" if self.paused else ""
        return f"running: {self.name}, {self.processes} processes record, {installed} hooks installed{said}{paused}"


def badness(state: str) -> int:
    """How far from in order a hook is."""
    word = state.partition(" ")[0]
    return _ORDER.index(word) if word in _ORDER else 0


def servers() -> list[Server]:
    """Every live session of this user."""
    return [server(directory) for directory in session.live()]


def server(directory: Path) -> Server:
    """What is known of one."""
    hooks = _told(directory)
    pids = set()
    for path in directory.glob("ring-*"):
        ring = open_ring(path)
        if ring is None:
            continue
        pids.add(ring.pid)
        for mark in ring.read():
            if isinstance(mark, TextMark) and mark.field == marks.HOOK:
                target, _, state = mark.text.partition(" ")
                of_process = hooks.setdefault(str(ring.pid), {})
                # Threads have rings of their own, in no order; and with a hook it only ever gets worse.
                of_process[target] = max(state, of_process.get(target, "waiting"), key=badness)
        ring.close()
    states: dict[str, str] = {}
    for of_process in hooks.values():
        for target, state in of_process.items():
            states[target] = max(state, states.get(target, "waiting"), key=badness)
    return Server(directory.name, len(pids), (directory / session.PAUSED).exists(), states, _gpu(directory))


def whose(directory: Path) -> str:
    """The command that a session records, as far as its first words tell: options may be secrets."""
    pid = session.owner(directory)
    words = _words(pid)
    if "--" in words:  # `stagetrace run ... -- CMD`
        words = words[words.index("--") + 1 :]
    elif recorded := session.writers(directory):  # its collector is a process of its own, or a thread of it
        pid = min(recorded)
        words = _words(pid)
    if not words:
        return f"pid {pid}"
    # Up to the first option, but `python -m MODULE` is one name; NAME=VALUE is a value of somebody's.
    plain = takewhile(lambda word: word == "-m" or not word.startswith("-"), words[1:3])
    said = [re.sub(r"=.*", "=…", word, flags=re.DOTALL) for word in (Path(words[0]).name, *plain)]
    return f"pid {pid}: {address.shown(' '.join(said))[:120]}{' …' if len(words) > len(said) else ''}"


def _words(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    return []


def _gpu(directory: Path) -> list[str]:
    """What the collector says of the cards."""
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        said = json.loads((directory / session.GPU).read_text(encoding="ascii"))
        cards = ", ".join(f"{name} ({card})" for card, name in said["cards"].items())
        lines = [f"running: {directory.name}, every {said['interval_s']:.2g} s sampled: {cards}"] if cards else []
        return [*lines, *(f"running: {directory.name}, {fault}" for fault in said["faults"])]
    return []


def _told(directory: Path) -> dict[str, dict[str, str]]:
    """What the collector has noted: a busy server's rings have long been written over."""
    with suppress(OSError, ValueError, AttributeError):
        noted = json.loads((directory / session.HOOKS).read_text(encoding="ascii"))
        return {str(pid): {str(k): str(v) for k, v in states.items()} for pid, states in noted.items()}
    return {}
