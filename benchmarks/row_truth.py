"""How much of a real request's time the stages account for, and how near its clock is to a client's."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stagetrace import session
from stagetrace.model import RequestRecord
from stagetrace.store import load
from stagetrace_vllm.demo_server import DemoServer
from tests.engine.serving import ClientResult, Server, free_port, run_many

from .figures import Options, Outcome, Progress
from .stats import Spread

REQUESTS, AT_ONCE, ALONE = 100, 16, 24
PATIENCE_S = 30.0


def run(_options: Options, progress: Progress) -> Outcome:
    """One traced server: mixed requests, first one at a time, then sixteen."""
    engine = DemoServer()
    progress.of(3)
    with tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder:
        model = engine.make_model(Path(folder) / "model")
        port, store = free_port(), Path(folder) / "store.db"
        command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--", *engine.command(model, port)]
        environment = {**engine.environment(), session.ENV: "", "STAGETRACE": ""}
        progress.say("starting a traced server")
        with Server(command, port=port, log=Path(folder) / "log", environment=environment):
            run_many(port, bodies(engine, model, 4, seed=1), 1)
            progress.tick()
            progress.say(f"{ALONE} requests one at a time, then {REQUESTS} at {AT_ONCE}")
            alone = run_many(port, bodies(engine, model, ALONE, seed=2), 1)
            progress.tick()
            mixed = run_many(port, bodies(engine, model, REQUESTS, seed=3), AT_ONCE)
            progress.tick()
            return summarise(alone, stored(store, alone), mixed, stored(store, mixed))


def bodies(engine: DemoServer, model: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Short and long prompts and answers, streamed three times in four."""
    rng = random.Random(seed)
    texts = {n: [engine.prompt_of(model, n, 10 * seed + i) for i in range(6)] for n in (20, 400, 2000)}
    return [
        {
            "model": engine.model, "stream": rng.random() < 0.75, "max_tokens": rng.choice([5, 20, 120, 240]),
            "ignore_eos": True, "temperature": 0.0,
            "messages": [{"role": "user", "content": rng.choice(texts[rng.choice([20, 400, 2000])])}],
        }
        for _ in range(count)
    ]  # fmt: skip


def stored(store: Path, results: list[ClientResult]) -> list[RequestRecord]:
    """Each result's record; RuntimeError if one is still missing after a while."""
    until = time.monotonic() + PATIENCE_S
    while True:
        known = {r.request_id: r for r in load(store, steps=False).requests if r.status != "in_flight"}
        found = [known[r.response_id] for r in results if r.response_id in known]
        if len(found) == len(results):
            return found
        if time.monotonic() > until:
            raise RuntimeError(f"{len(results) - len(found)} of {len(results)} requests are not in the store")
        time.sleep(0.2)


def summarise(
    alone: list[ClientResult], first: list[RequestRecord], mixed: list[ClientResult], then: list[RequestRecord]
) -> Outcome:
    """Coverage and clocks; limits hold at the median."""
    outcome = Outcome(notes=[f"load average after the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"])
    for when, records in (("one at a time", first), (f"{AT_ONCE} at a time", then)):
        long = [(1 - r.coverage) * 100 for r in records if r.coverage is not None and (r.e2e_ms or 0) >= 500]
        short = [r.unattributed_ms for r in records if r.unattributed_ms is not None and (r.e2e_ms or 0) < 500]
        if long:
            about = f"{len(long)} requests of 500 ms and more: 100 % less their coverage"
            outcome.add(f"not covered, {when}", "%", Spread.of(long), 3.0, about)
        if short:
            outcome.add(f"unattributed, {when}", "ms", Spread.of(short), 5.0, f"{len(short)} requests under 500 ms")
    for when, clients, records, fixed, part in (
        ("one at a time", alone, first, 2.0, 0.02), (f"{AT_ONCE} at a time", mixed, then, 5.0, 0.05)
    ):  # fmt: skip
        pairs = list(zip(clients, records, strict=True))
        late = [c.e2e_ms - (r.e2e_ms or 0.0) - part * c.e2e_ms for c, r in pairs]
        about = f"client's end-to-end time less ours, less {part:.0%} of it"
        outcome.add(f"e2e against a client's, {when}", "ms", Spread.of(late), fixed, about)
        text = [c.ttft_ms - r.ttft_ms - part * c.ttft_ms for c, r in pairs if c.ttft_ms and r.ttft_ms]
        outcome.add(f"TTFT against a client's, {when}", "ms", Spread.of(text), fixed, "the same of the TTFT, streamed")
    return outcome
