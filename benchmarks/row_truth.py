"""How much of a real request's time the stages account for, and how near its clock is to a client's."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagetrace import session
from stagetrace import store as stores
from stagetrace.model import RequestRecord
from stagetrace_vllm.demo_server import DemoServer
from tests.engine.serving import ClientResult, Server, free_port, run_many

from .figures import Options, Outcome, Progress
from .stats import Spread, median

#: So many requests at each concurrency.
REQUESTS, CONCURRENCIES = 110, (1, 16, 64)
PATIENCE_S = 60.0
LONG_MS = 500


@dataclass
class Load:
    """What was sent so many at a time, what the clients saw, and the records: of each a list of its sequences."""

    concurrency: int
    clients: list[ClientResult]
    records: list[list[RequestRecord]]

    @property
    def when(self) -> str:
        """In words."""
        return "one at a time" if self.concurrency == 1 else f"{self.concurrency} at a time"

    @property
    def sequences(self) -> list[RequestRecord]:
        """All records."""
        return [record for call in self.records for record in call]


def run(_options: Options, progress: Progress) -> Outcome:
    """One traced server: mixed requests, first one at a time, then more."""
    engine = DemoServer()
    progress.of(1 + len(CONCURRENCIES))
    with tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder:
        model = engine.make_model(Path(folder) / "model")
        port, store = free_port(), Path(folder) / "store.db"
        command = [sys.executable, "-m", "stagetrace", "run", "--store", str(store), "--", *engine.command(model, port)]
        environment = {**engine.environment(), session.ENV: "", "STAGETRACE": ""}
        progress.say("starting a traced server")
        with Server(command, port=port, log=Path(folder) / "log", environment=environment):
            run_many(port, bodies(engine, model, 12, seed=1), 1)
            progress.tick()
            loads = []
            for seed, concurrency in enumerate(CONCURRENCIES, 2):
                progress.say(f"{REQUESTS} mixed requests, {concurrency} at a time")
                clients = run_many(port, bodies(engine, model, REQUESTS, seed), concurrency)
                loads.append(Load(concurrency, clients, stored(store, clients)))
                progress.tick()
            return summarise(loads)


def bodies(engine: DemoServer, model: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Short and long prompts and answers; chats, completions, ids, several answers, grammars; most are streamed."""
    rng = random.Random(seed)
    texts = {n: [engine.prompt_of(model, n, 10 * seed + i) for i in range(6)] for n in (20, 400, 2000)}
    return [_body(engine, rng, rng.choice(texts[rng.choice([20, 400, 2000])])) for _ in range(count)]


def _body(engine: DemoServer, rng: random.Random, text: str) -> dict[str, Any]:
    body = {
        "model": engine.model, "stream": rng.random() < 0.75, "max_tokens": rng.choice([5, 20, 120, 240]),
        "ignore_eos": True, "temperature": 0.0,
    }  # fmt: skip
    kind = rng.choices(["chat", "completion", "ids", "n", "grammar"], [60, 20, 10, 5, 5])[0]
    if kind in ("completion", "ids"):
        return {**body, "prompt": text if kind == "completion" else rng.choices(range(10, 1000), k=len(text) // 4)}
    chat = {**body, "messages": [{"role": "user", "content": text}]}
    if kind == "n":
        return {**chat, "n": 2, "temperature": 0.8}
    grammar = {"structured_outputs": {"regex": "[a-z ]{40,400}"}, "ignore_eos": False}
    return {**chat, **grammar} if kind == "grammar" else chat


def stored(store: Path, results: list[ClientResult]) -> list[list[RequestRecord]]:
    """Each result's records; RuntimeError if some are still missing after a while."""
    until = time.monotonic() + PATIENCE_S
    while True:
        known: dict[str, list[RequestRecord]] = {}
        for record in stores.load(store, steps=False).requests:
            if record.status != "in_flight":
                known.setdefault(record.request_id, []).append(record)
        missing = [r for r in results if r.response_id not in known]
        if not missing:
            return [known[r.response_id or ""] for r in results]
        if time.monotonic() > until:
            raise RuntimeError(f"{len(missing)} of {len(results)} requests are not in the store")
        time.sleep(0.2)


def summarise(loads: list[Load]) -> Outcome:
    """Coverage and clocks; limits hold at the median unless a figure says otherwise."""
    roots = {r.span_id for load in loads for r in load.sequences}
    sent = sum(len(load.clients) for load in loads)
    outcome = Outcome(
        notes=[
            f"{sent} requests sent, {len(roots)} roots stored.",
            f"Load average after the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs.",
        ]
    )
    for load in loads:
        _coverage(outcome, load.when, load.sequences)
        outcome.notes.append(f"Unattributed, {load.when}, mean by gap: {_by_gap(load.sequences)}.")
    everything = [record for load in loads for record in load.sequences]
    _coverage(outcome, "all together", everything)
    for load in loads:
        _clocks(outcome, load)
    return outcome


def _coverage(outcome: Outcome, when: str, records: list[RequestRecord]) -> None:
    """What the stages leave unexplained."""
    long = [(1 - r.coverage) * 100 for r in records if r.coverage is not None and (r.e2e_ms or 0) >= LONG_MS]
    short = [r.unattributed_ms for r in records if r.unattributed_ms is not None and (r.e2e_ms or 0) < LONG_MS]
    early = [(1 - r.coverage_ttft) * 100 for r in records if r.coverage_ttft is not None]
    if long:
        about = f"{len(long)} sequences of {LONG_MS} ms and more: 100 % less their coverage"
        outcome.add(f"not covered, {when}", "%", Spread.of(long), 1.0, about)
        outcome.add(f"not covered by the worst twentieth, {when}", "%", Spread.of(long, 0.95), 3.0, "at least")
    if short:
        about = f"{len(short)} sequences under {LONG_MS} ms"
        outcome.add(f"unattributed, {when}", "ms", Spread.of(short), 3.0, about)
    outcome.add(f"not covered before the first token, {when}", "%", Spread.of(early), 5.0, f"{len(early)} sequences")
    other = [_other(r) for r in records if r.stage("decode").duration_ms]
    outcome.add(f"`other` of decode, {when}", "%", Spread.of(other), 5.0, f"{len(other)} sequences with a decode")


def _other(record: RequestRecord) -> float:
    decode = record.stage("decode")
    return 100 * float(decode.attributes["split_ms"]["other"]) / (decode.duration_ms or 1.0)


def _by_gap(records: list[RequestRecord]) -> str:
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.gaps_ms)
    return ", ".join(f"{name} {spent / len(records):.2f} ms" for name, spent in total.most_common(6))


def _clocks(outcome: Outcome, load: Load) -> None:
    """Against what a client saw. At one at a time nothing else is in its way."""
    fixed, part = (1.0, 0.01) if load.concurrency == 1 else (5.0, 0.05)
    pairs = list(zip(load.clients, load.records, strict=True))
    e2e = [(c.e2e_ms, max(r.e2e_ms or 0.0 for r in records)) for c, records in pairs]
    single = [(c, records[0]) for c, records in pairs if len(records) == 1 and c.ttft_ms]
    ttft = [(c.ttft_ms, r.ttft_ms) for c, r in single if c.ttft_ms and r.ttft_ms]
    itl = [(median(c.gaps_ms), r.itl_ms["p50"]) for c, r in single if c.gaps_ms and r.itl_ms["p50"]]
    for name, times in (("e2e", e2e), ("TTFT", ttft), ("ITL", itl)):
        beyond = [abs(theirs - ours) - part * theirs for theirs, ours in times if theirs and ours]
        about = f"how far a client's and ours are apart, less {part:.0%} of it; {len(beyond)} requests"
        outcome.add(f"{name} against a client's, {load.when}", "ms", Spread.of(beyond), fixed, about)
