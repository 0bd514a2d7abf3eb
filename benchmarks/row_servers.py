"""CPU time per streamed token of a real server's processes, without stagetrace and with it."""

from __future__ import annotations

import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from stagetrace import session
from stagetrace_vllm.demo_server import DemoServer
from tests.engine.serving import Server, free_port, run_many

from .figures import Options, Outcome, Progress
from .stats import Spread, median

STREAMS, TOKENS, ROUNDS = 8, 200, 20
PROMPT = 24
API_LIMIT = 1.35
ROLES = ("API", "EngineCore", "Worker", "collector")
#: What one server is: a start, a warm-up, and the rounds of its load.
TICKS = ROUNDS + 2
PLAIN, TRACED = "untraced", "traced"
#: CPU µs per token of each process of one server.
Costs = dict[str, float]

NOTE = (
    "The servers of this row run one after the other, never side by side. On a shared machine two identical ones have "
    "been seen to differ by about 13 %: the ratios of untraced against untraced show how much it is here, and the "
    "ratios of traced against untraced bound what recording costs, they cannot resolve it."
)


def run(options: Options, progress: Progress) -> Outcome:
    """Untraced, traced, untraced, traced, ...: ``options.servers`` of each."""
    engine = DemoServer()
    missing = engine.missing()
    if missing:
        raise RuntimeError(missing)
    progress.of(options.servers * 2 * TICKS)
    costs: dict[str, list[Costs]] = {PLAIN: [], TRACED: []}
    with tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder:
        model = engine.make_model(Path(folder) / "model")
        for number in range(options.servers):
            for kind in (PLAIN, TRACED):
                name = f"{kind} server {number + 1} of {options.servers}"
                costs[kind].append(_serve(engine, model, Path(folder), kind == TRACED, name, progress))
    return summarise(costs)


def summarise(costs: dict[str, list[Costs]]) -> Outcome:
    """Ratios of neighbours in time, then what each process took."""
    outcome = Outcome(notes=[NOTE])
    plain, traced = costs[PLAIN], costs[TRACED]
    for role in ROLES[:3]:
        pairs = [t[role] / p[role] for p, t in zip(plain, traced, strict=True)]
        limit = API_LIMIT if role == "API" else None
        outcome.add(f"{role}: traced against untraced", "ratio", _few(pairs), limit, _listed(pairs))
    for kind, servers in costs.items():
        repeated = [b["API"] / a["API"] for a, b in pairwise(servers)]
        if repeated:
            outcome.add(f"API: {kind} against {kind}", "ratio", _few(repeated), None, _listed(repeated))
    for role in ROLES:
        for kind, servers in costs.items():
            values = [server[role] for server in servers if role in server]
            if values:
                about = "one value per server" if role != "collector" else "stagetrace run, idle polling included"
                outcome.add(f"{role}: CPU per token, {kind}", "µs", _few(values), None, about)
    return outcome


def _few(values: list[float]) -> Spread:
    """Of a handful of values, all lie between the bounds."""
    return Spread(median(values), min(values), max(values), min(values), max(values))


def _listed(values: list[float]) -> str:
    return "each: " + ", ".join(f"{value:.3f}" for value in values)


def _serve(engine: DemoServer, model: Path, folder: Path, traced: bool, name: str, progress: Progress) -> Costs:
    """Start one server, drive it, and return what its processes used per streamed token."""
    progress.say(f"{name}: starting")
    port = free_port()
    command = engine.command(model, port)
    if traced:
        store = folder / f"{port}.db"
        command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--", *command]
    environment = {**engine.environment(), session.ENV: "", "STAGETRACE": ""}
    with Server(command, port=port, log=folder / f"{port}.log", environment=environment) as server:
        progress.tick()
        progress.say(f"{name}: {STREAMS} streams of {TOKENS} tokens")
        _load(engine, model, port)
        progress.tick()
        before = _used(server)
        tokens = 0
        for _ in range(ROUNDS):
            tokens += _load(engine, model, port)
            progress.tick()
        after = _used(server)
    if not all(role in before and role in after for role in (ROLES if traced else ROLES[:3])):
        raise RuntimeError(f"the server's processes are not the expected ones: {sorted(after)}")
    return {role: (after[role] - before[role]) * 1e6 / tokens for role in after}


def _load(engine: DemoServer, model: Path, port: int) -> int:
    """The fixed load, once; the tokens it streamed."""
    bodies = [
        {
            "model": engine.model, "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0,
            "messages": [{"role": "user", "content": engine.prompt_of(model, PROMPT, seed)}],
        }
        for seed in range(STREAMS)
    ]  # fmt: skip
    results = run_many(port, bodies, STREAMS)
    if any(result.error or not result.chunk_ns for result in results):
        raise RuntimeError(f"the server failed a request: {[result.error for result in results]}")
    return STREAMS * TOKENS


def _used(server: Server) -> dict[str, float]:
    """CPU seconds (user and system) of the server's processes so far, by role."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {}
    for pid, command in server.processes().items():
        role = _role(command)
        if role:
            fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
            used[role] = (int(fields[11]) + int(fields[12])) / ticks
    return used


def _role(command: str) -> str | None:
    if "resource_tracker" in command:
        return None
    if "stagetrace run" in command:
        return "collector"
    for role in ("EngineCore", "Worker"):
        if role in command:
            return role
    return "API" if "api_server" in command else None
