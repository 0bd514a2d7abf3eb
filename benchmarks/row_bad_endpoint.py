"""Real servers whose OTLP endpoint is bad, between one that exports nothing and one whose endpoint is good."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagetrace import session
from stagetrace_vllm.demo_server import DemoServer
from tests.engine.serving import ClientResult, Server, free_port, run_many

from .endpoints import DYING, KINDS, Endpoint, endpoint
from .figures import Options, Outcome, Progress
from .row_endpoints import CONTROL, USUAL, dropped
from .stats import Spread, quantile, ratios

STREAMS, TOKENS, PROMPT = 8, 48, 24
LOAD_S = 60.0
#: Prompt and answer, in tokens, of the requests whose answers are compared: one at a time, or batches would differ.
SERIAL = ((20, 40), (400, 30), (900, 60), (2000, 20))
PATIENCE_S = 60.0
PLAIN, NOTHING = "without stagetrace", "without export"
RATIO_LIMIT, EXIT_LIMIT_S = 1.15, 5.0

NOTE = (
    f"Each server is loaded for {LOAD_S:.0f} s: {STREAMS} streams of {TOKENS} tokens, over and over; a value is one "
    "such round. The servers run one after the other. Two identical ones have been seen to differ by about 13 % on a "
    "shared machine, which is what a good endpoint against none shows."
)


@dataclass
class Seen:
    """What one server was like."""

    answers: list[str] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    itl_p50_ms: list[float] = field(default_factory=list)
    itl_p99_ms: list[float] = field(default_factory=list)
    exit_s: float = 0.0
    exit_code: int = 0
    about: str = ""


@dataclass
class Bench:
    """Starts servers and looks at them."""

    engine: DemoServer
    model: Path
    folder: Path
    progress: Progress

    def serve(self, name: str, place: Endpoint | None = None) -> Seen:
        """Start the server ``name``, load it (unless it is without stagetrace), and end it."""
        self.progress.say(name)
        port, seen = free_port(), Seen()
        command, environment = self.engine.command(self.model, port), self.engine.environment()
        if name != PLAIN:
            ours = [sys.executable, "-m", "stagetrace", "run", "--store", str(self.folder / f"{port}.db")]
            command = [*ours, *(["--otlp", place.url] if place else []), "--", *command]
        environment |= {session.ENV: "", "STAGETRACE": "", **(place.environment() if place else {})}
        log = self.folder / f"{port}.log"
        with Server(command, port=port, log=log, environment=environment) as server:
            self.progress.tick()
            seen.answers = [result.text for result in answered(port, [self.body(*size) for size in SERIAL], 1)]
            if name != PLAIN:
                self._load(port, seen, place)
            self.progress.tick()
            began = time.monotonic()
            server.signal(signal.SIGTERM)
            code = server.wait(PATIENCE_S)
            seen.exit_s = time.monotonic() - began
        if code is None:
            raise RuntimeError(f"{name}: still there {PATIENCE_S:.0f} s after SIGTERM")
        seen.exit_code = code if code >= 0 else 128 - code
        reasons = dropped(log.read_text(errors="replace"))
        lost = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items()))
        seen.about = f"{place.taken if place else 0:,} spans taken, {sum(reasons.values()):,} dropped ({lost or '-'})"
        self.progress.tick()
        return seen

    def _load(self, port: int, seen: Seen, place: Endpoint | None) -> None:
        """Rounds of the closed loop; the first one only warms up."""
        bodies = [self.body(PROMPT, TOKENS, seed=seed) for seed in range(STREAMS)]
        answered(port, bodies, STREAMS)
        began = time.monotonic()
        while (passed := time.monotonic() - began) < LOAD_S:
            if place and place.kind.behaviour == DYING and passed > LOAD_S / 2:
                place.die()
            before = time.monotonic()
            results = answered(port, bodies, STREAMS)
            seen.tokens_per_s.append(STREAMS * TOKENS / (time.monotonic() - before))
            gaps = [gap for result in results for gap in result.gaps_ms]
            seen.itl_p50_ms.append(quantile(gaps, 0.5))
            seen.itl_p99_ms.append(quantile(gaps, 0.99))

    def body(self, prompt: int, output: int, seed: int = 0) -> dict[str, Any]:
        """A greedy request."""
        text = self.engine.prompt_of(self.model, prompt, seed)
        return {
            "model": self.engine.model, "stream": True, "max_tokens": output, "ignore_eos": True, "temperature": 0.0,
            "messages": [{"role": "user", "content": text}],
        }  # fmt: skip


def answered(port: int, bodies: list[dict[str, Any]], at_once: int) -> list[ClientResult]:
    """The answers; RuntimeError if one of them is none."""
    results = run_many(port, bodies, at_once)
    if any(result.error or not result.chunk_ns for result in results):
        raise RuntimeError(f"the server failed a request: {[result.error for result in results]}")
    return results


def run(options: Options, progress: Progress) -> Outcome:
    """For each bad endpoint: without stagetrace (its exit and its answers only), without export, bad, good."""
    names = options.endpoints or USUAL
    progress.of(len(names) * 4 * 3)
    outcome = Outcome(notes=[NOTE])
    for name in names:
        with bench(progress) as made, endpoint(KINDS[name], made.folder) as bad:
            plain, nothing = made.serve(PLAIN), made.serve(NOTHING)
            seen = made.serve(name, bad)
            with endpoint(KINDS[CONTROL], made.folder) as good:
                control = made.serve(CONTROL, good)
        compare(outcome, name, seen, control, plain)
        compare(outcome, f"{CONTROL} (by {name})", control, nothing, plain, than=NOTHING)
    return outcome


@contextmanager
def bench(progress: Progress) -> Iterator[Bench]:
    """The model made, and a folder for logs and stores."""
    engine = DemoServer()
    missing = engine.missing()
    if missing:
        raise RuntimeError(missing)
    with tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder:
        yield Bench(engine, engine.make_model(Path(folder) / "model"), Path(folder), progress)


def compare(outcome: Outcome, name: str, seen: Seen, other: Seen, plain: Seen, than: str = CONTROL) -> None:
    """Figures of one server: rounds against another's, in order; answers and exit against the one without us."""
    rounds = min(len(seen.tokens_per_s), len(other.tokens_per_s))
    for what, ours, theirs in (
        ("time per token", other.tokens_per_s, seen.tokens_per_s),
        ("inter-token latency p50", seen.itl_p50_ms, other.itl_p50_ms),
        ("inter-token latency p99", seen.itl_p99_ms, other.itl_p99_ms),
    ):
        values = ratios(ours[:rounds], theirs[:rounds])
        unit = "tokens/s" if what == "time per token" else "ms"
        mine, its = (theirs, ours) if unit == "tokens/s" else (ours, theirs)
        about = f"{quantile(mine, 0.5):,.1f} against {quantile(its, 0.5):,.1f} {unit}; {rounds} rounds"
        limit = None if what.endswith("p99") else RATIO_LIMIT
        outcome.add(f"{name}: {what} against {than}", "ratio", Spread.of(values), limit, about)
    differing = sum(a != b for a, b in zip(seen.answers, plain.answers, strict=True))
    outcome.add(f"{name}: answers that differ", "count", Spread.of([differing]), 0, f"of {len(SERIAL)}, greedy")
    later = Spread.of([seen.exit_s - plain.exit_s])
    about = f"{seen.exit_s:.2f} s against {plain.exit_s:.2f} s after SIGTERM; {seen.about}"
    outcome.add(f"{name}: exit later than {PLAIN}", "s", later, EXIT_LIMIT_S, about)
    codes = f"{seen.exit_code} and {plain.exit_code}"
    outcome.add(f"{name}: exit codes that differ", "count", Spread.of([seen.exit_code != plain.exit_code]), 0, codes)
