"""Whether a server started from here would be recorded, stage by stage. Nothing of the engine is imported."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import runtime, session
from .api import integrations
from .canary import fly
from .floor import find_device
from .floor.engine import CURE
from .floor.engine import ENV as GPU_ENV
from .gpu.look import look
from .hooks import HookGroup, HookSpec
from .hooks.install import resolve
from .hooks.resolve import Unresolved, parsed
from .live import Server, badness, servers
from .model import SCHEMA
from .stages import STAGES

#: Rings of a server with one GPU; each writing thread has 2 MiB.
ROOM_BYTES = 10 << 20
_NO_EXPORTER = "exporter: none configured in this environment (--otlp URL sends a span to one)"
#: What may yet keep a stage that can be watched from having times of its own.
_FUSED = {"embedding": "`fused` where the model is compiled or captured"}
_TMPFS = ("tmpfs", "ramfs")
Row = dict[str, Any]


@dataclass
class Finding:
    """The document of ``doctor --json``; ``faults`` and ``notes`` are lines for a person, faults with their cure."""

    document: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether every applicable stage can be observed, and what is to be exported arrives."""
        states = {stage["state"] for stage in self.document["stages"]}
        return "not_observable" not in states and not self.document["exporter"]["failed"]


def examine(otlp: str | None = None) -> Finding:
    """Look at everything; ``otlp`` is where spans are to go, the environment's endpoint if not given."""
    known = integrations()
    chosen, installed = next(((i, v) for i in known if (v := engine_version(i))), (None, None))
    faults, notes = _here()
    hooks: list[Row] = []
    broken: dict[str, str] = {}
    if chosen is None or installed is None:
        cure = "; ".join(filter(None, [i.install for i in known])) or "reinstall stagetrace, which brings integrations"
        faults.append(f"no engine is installed in this environment; install one: {cure}")
    else:
        faults += chosen.checks()
        notes += _tested(chosen, installed)
        hooks, broken = _hooks(chosen.hooks)
    cards = look()
    notes.append(cards.words())
    running = servers()
    notes += [line for server in running for line in (server.words(), *server.gpu)]
    broken |= _overlay(hooks, running, chosen.hooks if chosen else ())
    stages = _stages(chosen, broken, faults)
    if chosen is not None:
        faults += _cures(broken, f"{chosen.name} {installed}", chosen)
    canary = fly(otlp)
    faults += [canary.fault] if canary.fault else []
    if not canary.failed:
        notes.append(f"exporter: a span arrived at {canary.endpoint}" if canary.sent else _NO_EXPORTER)
    notes.append(_floors())
    document = {
        "schema": SCHEMA,
        "engine": chosen.name if chosen else None,
        "engine_version": installed,
        "tested": bool(chosen and installed and beyond(installed, chosen.tested) == 0),
        "stages": stages,
        "hooks": hooks,
        "exporter": {"sent": canary.sent, "failed": canary.failed},
        **({"gpu": [{"id": card, "name": name} for card, name in cards.cards.items()]} if cards.cards else {}),
    }
    return Finding(document, faults, notes)


def _floors() -> str:
    """What a server started from here would be held against."""
    named = os.environ.get(GPU_ENV)
    if not named:
        return f"floors: of the GPU that a worker reports; where there is none, {CURE}"
    device = find_device(named)
    return (
        f"floors: of {device.name} ({GPU_ENV})" if device else f"floors: none, {GPU_ENV}={named} is not known; {CURE}"
    )


def engine_version(integration: runtime.Integration) -> str | None:
    """What is installed of the integration's engine."""
    for name in integration.distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def beyond(installed: str, tested: tuple[str, str]) -> int:
    """0 within the tested range, whose ends count with all their patch releases; -1 before it, 1 after it."""

    def parts(text: str, depth: int) -> list[int]:
        found = [int(digits) for digits in re.findall(r"[0-9]+", text.partition("+")[0])]
        return (found + [0] * depth)[:depth]

    first, last = tested
    if parts(installed, len(first.split("."))) < parts(first, len(first.split("."))):
        return -1
    return int(parts(installed, len(last.split("."))) > parts(last, len(last.split("."))))


def _tested(integration: runtime.Integration, installed: str) -> list[str]:
    side = beyond(installed, integration.tested)
    if not side:
        return []
    first, last = integration.tested
    word = "newer" if side > 0 else "older"
    return [
        f"{integration.name} {installed} is {word} than what was tested ({first} to {last}); see what resolves below"
    ]


def _here() -> tuple[list[str], list[str]]:
    """Faults and notes on this environment: the switch, and the place for sessions."""
    faults = ["STAGETRACE=0 is set, so nothing is recorded; unset it"] if os.environ.get("STAGETRACE") == "0" else []
    base = session.base()
    cure = f"mount a tmpfs there or point {session.BASE_ENV} at one"
    try:
        probe = tempfile.mkdtemp(prefix="stagetrace-doctor-", dir=base)
        os.rmdir(probe)
        room = shutil.disk_usage(base).free
    except OSError as error:
        return [*faults, f"sessions in {base}: {session.reason(error)}; {cure}"], []
    if room < ROOM_BYTES:
        faults.append(f"sessions in {base}: {room / 2**20:.1f} MiB free, a server needs about 10; make room, or {cure}")
    kind = _filesystem(base)
    notes = [f"sessions in {base} ({kind}): {room / 2**20:,.0f} MiB free"]
    if kind not in _TMPFS:
        notes.append(f"{base} is no tmpfs: a disk can stall what writes to it; {cure}")
    return faults, notes


def _filesystem(path: Path) -> str:
    """The type of the file system that holds ``path``."""
    best = ("", "unknown")
    with suppress(OSError, ValueError):
        real = str(path.resolve())
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, where, kind, *_ = line.split(" ")
            where = where.replace("\\040", " ")
            if (real == where or real.startswith(where.rstrip("/") + "/")) and len(where) >= len(best[0]):
                best = where, kind
    return best[1]


def _hooks(groups: tuple[HookGroup, ...]) -> tuple[list[Row], dict[str, str]]:
    """Every row of every group, resolved in source; and why a group is not whole."""
    rows: list[Row] = []
    broken: dict[str, str] = {}
    for group in groups:
        mine = [_hook(hook) for hook in group.hooks]
        why = next((row["reason"] for row in mine if row["state"] == "missing"), None)
        if why is not None:
            broken[group.name] = why
            for row in mine:
                if row["state"] != "missing":
                    row |= {"state": "refused", "reason": f"hooks of a group go together: {why}"}
        rows += mine
    parsed.cache_clear()
    return rows, broken


def _hook(hook: HookSpec) -> Row:
    try:
        place = resolve(hook, lambda module: False)
    except Unresolved as error:
        return {"target": hook.target, "state": "missing", "reason": str(error)}
    return {"target": hook.target, "state": "resolved", "reason": None if place == hook.target else f"at {place}"}


def _overlay(hooks: list[Row], running: list[Server], groups: tuple[HookGroup, ...]) -> dict[str, str]:
    """Put what running servers say of their hooks in the rows; return why their groups are not whole."""
    broken: dict[str, str] = {}
    home = {hook.target: group.name for group in groups for hook in group.hooks}
    # What hooks stand on is said to fail like one of them: a device's events, a host's provider.
    more = {name for server in running for name, state in server.states.items() if badness(state) > 1}
    hooks += [{"target": name} for name in sorted(more - {row["target"] for row in hooks})]
    for row in hooks:
        told = [state for server in running if (state := server.states.get(row["target"]))]
        if not told:
            continue
        word, _, why = max(told, key=badness).partition(" ")
        row |= {"state": word.rstrip(":"), "reason": why or None}
        if badness(word) > 1 and row["target"] in home:
            broken[home[row["target"]]] = f"{row['target']} is {word.rstrip(':')} in a running server: {why}"
    return broken


def _stages(chosen: runtime.Integration | None, broken: dict[str, str], faults: list[str]) -> list[Row]:
    """All twelve. Of the optional groups that watch the same stage, versions have one or another: one will do."""
    rows = []
    for stage in STAGES:
        groups = [group for group in (chosen.hooks if chosen else ()) if stage.key in group.stages]
        needed = [broken[g.name] for g in groups if not g.optional and g.name in broken]
        others = [g for g in groups if g.optional]
        lost = [broken[g.name] for g in others if g.name in broken]
        if len(lost) < len(others):
            lost = []
        reason = next(iter([*faults, *needed, *lost]), None)
        state = "observable" if reason is None else "not_observable"
        reason = reason or _FUSED.get(stage.key)
        rows.append({"number": stage.number, "key": stage.key, "state": state, "reason": reason})
    return rows


def _cures(broken: dict[str, str], engine: str, chosen: runtime.Integration) -> list[str]:
    """A line for each broken group that costs a stage or a fact; alternatives that are simply absent cost nothing."""
    lines = []
    for group in chosen.hooks:
        whole = any(g.optional and g.name not in broken and set(g.stages) >= set(group.stages) for g in chosen.hooks)
        if group.name not in broken or (group.optional and (whole or not group.stages)):
            continue
        costs = f"stages {', '.join(group.stages)}" if group.stages else "some facts"
        first, last = chosen.tested
        lines.append(
            f"{engine}: hook group {group.name} ({costs}): {broken[group.name]}; "
            f"use {chosen.name} {first} to {last}, or a newer stagetrace"
        )
    return lines
