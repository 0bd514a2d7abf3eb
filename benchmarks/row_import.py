"""``import stagetrace`` in a fresh interpreter, against an interpreter that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from .figures import Options, Outcome, Progress
from .stats import Spread, differences, interleave, ratios

ROUNDS = 10
LIMIT_MS = 50.0
CORE = "import stagetrace"
PLUGIN = "import stagetrace, stagetrace_vllm; stagetrace_vllm.plugin()"


def run(_options: Options, progress: Progress) -> Outcome:
    """Start interpreters by turns."""
    progress.of(ROUNDS)
    arms = (starting("pass"), starting(CORE), starting(PLUGIN))
    interleave(arms, 1, lambda: None)
    nothing, core, plugin = interleave(arms, ROUNDS, progress.tick)
    outcome = Outcome()
    about = f"best of {ROUNDS} each: {min(core):.1f} ms against {min(nothing):.1f} ms"
    outcome.add("import stagetrace, added", "ms", best(core, nothing), LIMIT_MS, about)
    outcome.add("import stagetrace, against python -c pass", "ratio", Spread.of(ratios(core, nothing)))
    outcome.add(
        "the engine plug-in without a session, added", "ms", best(plugin, nothing), None,
        f"best of {ROUNDS} each: {min(plugin):.1f} ms; what --help and probes of the engine pay",
    )  # fmt: skip
    return outcome


def best(with_it: list[float], without: list[float]) -> Spread:
    """Judged is the best against the best: what delays an interpreter's start is never the code."""
    value = min(with_it) - min(without)
    rounds = Spread.of(differences(with_it, without))
    return Spread(value, rounds.p10, rounds.p90, value, value)


def starting(code: str) -> Callable[[], float]:
    """An arm: wall ms of an interpreter that runs ``code``."""

    def arm() -> float:
        before = time.perf_counter_ns()
        subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL, timeout=60)
        return (time.perf_counter_ns() - before) / 1e6

    return arm
