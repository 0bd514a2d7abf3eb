"""What the hooks add to a real step of the engine's scheduler, at several batch sizes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .clocks import cpu_ns, settle_heap
from .engine import Engine, drop
from .figures import Options, Outcome, Progress
from .loads import Churn, Decode, Hooks, Load, answering
from .recording import private_session
from .stats import Spread, differences, interleave, median, ratios

#: batch → (rounds, steps timed in each arm of a round)
DECODE = {1: (300, 20), 8: (300, 20), 64: (1000, 6), 256: (600, 5)}
CHURN = {64: (200, 6), 256: (200, 5)}
ALONE_ROUNDS, ALONE_STEPS = 100, 200

ADDED_LIMIT_US = 15.0
SHARE_LIMIT = {64: 2.0, 256: 2.0}
FLAT_LIMIT_US = 10.0
GPU_STEP_US = 6000.0


def run(_options: Options, progress: Progress) -> Outcome:
    """Build the scheduler once; every load runs on it."""
    progress.of(sum(rounds for rounds, _ in (*DECODE.values(), *CHURN.values())) + ALONE_ROUNDS * len(DECODE))
    progress.say("the engine's scheduler")
    outcome = Outcome()
    with private_session(), tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder:
        engine, hooks = Engine(Path(folder)), Hooks()
        hooks.on()
        scheduler = engine.scheduler()
        hooks.off()
        added = {}
        for size, (rounds, steps) in DECODE.items():
            progress.say(f"decode, batch {size}")
            load = Decode(engine, scheduler, hooks, size, steps)
            added[size] = _in_place(outcome, f"decode, batch {size}", load, rounds, progress)
        for size, (rounds, steps) in CHURN.items():
            progress.say(f"one joins, one leaves, batch {size}")
            churn = Churn(engine, scheduler, hooks, size, steps)
            _in_place(outcome, f"one joins and one leaves, batch {size}", churn, rounds, progress)
        alone = {size: _alone(engine, scheduler, hooks, size, progress) for size in DECODE}
    _flatness(outcome, added, alone)
    outcome.notes += NOTES
    return outcome


NOTES = (
    "A step is Scheduler.schedule and update_from_output of the engine itself (prefix caching and statistics on); no "
    "model runs, so the base is the smallest there is. The hooks are put on the live classes and taken off again "
    "between blocks of steps, and write into a real ring. CPU time of the thread.",
    "In place, a step of 256 requests varies by more than the hooks cost, from round to round and with where the stack "
    "lies (moved at random here). The hooks alone are the same hooks around a scheduler that answers at once: precise, "
    "but with warm caches, so a lower bound.",
)


def _in_place(outcome: Outcome, name: str, load: Load, rounds: int, progress: Progress) -> Spread:
    """The figures of one load; returns the added µs."""
    plain, hooked = interleave((load.arm(False), load.arm(True)), rounds, progress.tick)
    load.hooks.off()
    added = Spread.of(differences(hooked, plain))
    shares = Spread.of([(ratio - 1) * 100 for ratio in ratios(hooked, plain)])
    decodes = isinstance(load, Decode)
    outcome.add(
        f"{name}: added to a step", "µs", added, ADDED_LIMIT_US if decodes and load.size == 1 else None,
        f"a step is {median(plain):,.0f} µs; median surely in {added.low:.1f} – {added.high:.1f} µs; "
        f"{added.value / GPU_STEP_US:.2%} of a GPU's 6 ms step",
    )  # fmt: skip
    outcome.add(f"{name}: added share", "%", shares, SHARE_LIMIT.get(load.size) if decodes else None)
    return added


def _alone(engine: Engine, scheduler: Any, hooks: Hooks, size: int, progress: Progress) -> Spread:
    """Added µs with the engine's own work taken out."""
    progress.say(f"the hooks alone, batch {size}")
    load = Decode(engine, scheduler, hooks, size, 1)
    drop(scheduler)
    hooks.on()
    load.fill()
    step = scheduler.schedule()
    result = scheduler.update_from_output(step, load._output)
    hooks.off()

    def block(hooked: bool) -> float:
        if hooked:
            hooks.on()
        repeat = load.prepare(ALONE_STEPS)
        repeat(20)
        before = cpu_ns()
        repeat(ALONE_STEPS)
        spent = cpu_ns() - before
        hooks.off()
        return spent / ALONE_STEPS / 1000

    settle_heap()
    with answering(step, result):
        plain, hooked = interleave((lambda: block(False), lambda: block(True)), ALONE_ROUNDS, progress.tick)
    return Spread.of(differences(hooked, plain))


def _flatness(outcome: Outcome, added: dict[int, Spread], alone: dict[int, Spread]) -> None:
    for size, spread in alone.items():
        outcome.add(f"the hooks alone, batch {size}", "µs", spread)
    small, large = min(added), max(added)
    about = f"added at batch {large} less added at batch {small}"
    outcome.add("flatness, hooks alone", "µs", alone[large].minus(alone[small]), FLAT_LIMIT_US, about)
    outcome.add("flatness, in place", "µs", added[large].minus(added[small]), FLAT_LIMIT_US, about)
