"""What the demo does, in order, and what it prints."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..api import integrations
from ..faults import Fault
from ..model import RequestRecord
from ..numbers import numbers, typical
from ..report.numbers import numbers_table
from ..report.stopwatch import reference_shares, stopwatch
from ..store import load, refuse_unless_writable
from .client import RequestFailed, chat
from .server import DemoEngine, demo_server


@dataclass(frozen=True)
class Kind:
    """One kind of request: ``count`` of them, ``at_once`` at a time; ``seed`` is where its prompts start."""

    key: str
    title: str
    count: int
    at_once: int
    prompt: int
    output: int
    seed: int


KINDS = (
    Kind("cold", "cold: 2,000 prompt tokens, none cached, 300 output tokens", 5, 1, 2000, 300, 100),
    Kind("warm", "warm: the same prompts again, from the prefix cache", 5, 1, 2000, 300, 100),
    Kind("loaded", "loaded: one of 24 at once, 100 output tokens each", 24, 24, 2000, 100, 200),
    Kind("short", "short: 2,000 prompt tokens, none cached, 20 output tokens", 9, 1, 2000, 20, 300),
)


def run_demo(model: Path | None, store: Path) -> int:
    """Run the demo; 0 when every kind of request was served and is in ``store``, else 2 with one line.

    StoreError, before anything is started, if ``store`` cannot be written.
    """
    engine = _engine()
    if isinstance(engine, str):
        return _fail(engine)
    if model is not None and not (model / "config.json").is_file():
        return _fail(f"--model {model}: no config.json there; give a directory with a model, or leave --model out")
    refuse_unless_writable(store)
    console = Console()
    began = time.time_ns()
    try:
        ids = _serve(engine, model, store, console)
    except (RequestFailed, Fault) as error:
        return _fail(str(error))
    return _report(ids, began, store, console)


def _engine() -> DemoEngine | str:
    """The first engine that is installed, or why there is none."""
    reasons = []
    for integration in integrations():
        engine: DemoEngine = integration.demo()
        reason = engine.missing()
        if reason is None:
            return engine
        reasons.append(reason)
    return reasons[0] if reasons else "no integration is installed; reinstall stagetrace"


def _serve(engine: DemoEngine, model: Path | None, store: Path, console: Console) -> dict[str, list[str]]:
    """Start the server, send every kind, stop it; return the response ids by kind."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        making = progress.add_task("model: a tiny random one" if model is None else "model: yours", total=1)
        model_dir = model or engine.make_model(_cache() / f"{engine.name}-demo-model")
        progress.advance(making)
        starting = progress.add_task(f"{engine.name} server under stagetrace", total=1)
        with demo_server(engine, model_dir, store, progress.refresh) as server:
            progress.advance(starting)
            # The first requests pay for what an engine does once; they are recorded, but not shown as typical.
            for seed in (1, 2):
                chat(server.port, engine.model, engine.prompt_of(model_dir, 2000, seed), 20)
            return {kind.key: _send(kind, engine, model_dir, server.port, progress) for kind in KINDS}


def _send(kind: Kind, engine: DemoEngine, model_dir: Path, port: int, progress: Progress) -> list[str]:
    task = progress.add_task(f"{kind.key} requests", total=kind.count)
    prompts = [engine.prompt_of(model_dir, kind.prompt, kind.seed + i) for i in range(kind.count)]

    def one(prompt: str) -> str:
        identifier = chat(port, engine.model, prompt, kind.output)
        progress.advance(task)
        return identifier

    with ThreadPoolExecutor(kind.at_once) as pool:
        return list(pool.map(one, prompts))


def _report(ids: dict[str, list[str]], began: int, store: Path, console: Console) -> int:
    # Steps carry monotonic times only, so this run's are told by its session.
    whole = load(store, steps=False)
    runs = [run for run in whole.runs if run.started_unix_ns >= began]
    trace = load(store, session=runs[-1].session) if runs else whole
    chosen: dict[str, RequestRecord] = {}
    console.print()
    for kind in KINDS:
        records = [r for r in trace.requests if r.request_id in ids[kind.key]]
        record = typical(records)
        if record is None or len(records) != kind.count:
            return _fail(f"{store} holds {len(records)} of {kind.count} {kind.key} requests; run the demo again")
        chosen[kind.key] = record
        console.print(stopwatch(record, f"{kind.title} (median of {kind.count})", reference_shares(kind.key)))
    console.print(Text("What to see", style="bold"))
    for line in lessons(chosen):
        console.print(f"  {line}", highlight=False)
    console.print()
    console.print(numbers_table(numbers(trace)))
    console.print(f"\nThe store is {store.resolve()}: `stagetrace stages {store}` shows its requests.", soft_wrap=True)
    return 0


def lessons(chosen: dict[str, RequestRecord]) -> list[str]:
    """The reference document's four contexts, in the figures just measured."""
    cold, warm, loaded, short = (chosen[kind.key] for kind in KINDS)
    return [
        f"warm: {warm.cached_tokens} of {warm.prompt_tokens} prompt tokens were cached; prefill "
        f"{_ms(cold.prefill_ms)} → {_ms(warm.prefill_ms)}, the whole request {_ms(cold.e2e_ms)} → {_ms(warm.e2e_ms)}",
        f"loaded: TTFT {_ms(loaded.ttft_ms)} against {_ms(cold.ttft_ms)}; {share(loaded, 'admission', of='ttft')} of "
        f"it was admission ({loaded.stage('admission').attributes.get('reason')}), which no GPU counter shows",
        f"cold, 300 tokens: decode is {share(cold, 'decode')} of the time, prefill {share(cold, 'prefill')}",
        f"short, 20 tokens: prefill is {share(short, 'prefill')} of the time (reference: 43 %)",
    ]


def share(record: RequestRecord, key: str, of: str = "e2e") -> str:
    """A stage's share of the request's whole time, or of its TTFT, in %."""
    whole = record.e2e_ms if of == "e2e" else record.ttft_ms
    part = record.stage(key).duration_ms
    return f"{part / whole:.0%}" if part is not None and whole else "an unknown share"


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f} ms"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagetrace"


def _fail(line: str) -> int:
    print(f"stagetrace: {line}", file=sys.stderr)
    return 2
