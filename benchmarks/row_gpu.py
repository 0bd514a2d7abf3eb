"""The GPU sampler's share of a core, with eight cards that answer as fast as real ones are said to.

``python -m benchmarks.row_gpu HZ SECONDS`` samples the cards that the environment names, and prints the CPU ms of each
second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stagetrace.gpu.sampler import Sampler
from stagetrace.gpu.watch import CARDS_ENV
from tests.nvml.stub import Card, Script

from .figures import Options, Outcome, Progress
from .stats import Spread

CARDS = 8
SECONDS = 12
#: Of a core, at 4 Hz.
LIMIT_PERCENT = 0.5
#: Said of a real driver: 2.5 µs for the utilisation, 11.6 µs for the memory (flightlessmango/MangoHud#2104). The other
#: calls are taken to be as long as the latter.
CALL_US, UTILIZATION_US = 11.6, 2.5
#: Name → rate in Hz, and what the cards have beside the counters of all of them.
ARMS: dict[str, tuple[float, list[str]]] = {
    "4 Hz, older cards": (4.0, []),
    "4 Hz, performance counters too (Hopper on)": (4.0, ["gpm"]),
    "4 Hz, and power that the driver keeps": (4.0, ["gpm", "keeps power 20"]),
    "2 Hz (the usual rate), all of that": (2.0, ["gpm", "keeps power 20"]),
}


def run(_options: Options, progress: Progress) -> Outcome:
    """One arm after the other, each in a process that does nothing else."""
    outcome = Outcome()
    progress.of(len(ARMS))
    for name, (hz, has) in ARMS.items():
        progress.say(name)
        shares = [ms / 10 for ms in _measured(hz, has)]
        outcome.add(
            f"{CARDS} cards, {name}", "%", Spread.of(shares), LIMIT_PERCENT,
            f"of one core, a value a second; a call of the driver computes for {CALL_US} µs",
        )  # fmt: skip
        progress.tick()
    outcome.notes.append(
        "The driver is a stub that spins, so that its calls count as CPU time in full; the bindings around it are the "
        f"real ones. {UTILIZATION_US} µs for the utilisation, {CALL_US} µs for any other call: measured by others on a "
        "real card, not here. The share is the process's, which does nothing but sample."
    )
    return outcome


def _measured(hz: float, has: list[str]) -> list[float]:
    busy = [f"busy nvmlDeviceGetUtilizationRates {UTILIZATION_US}", f"busy * {CALL_US}", *has]
    script = Script([Card(number, more=busy) for number in range(CARDS)])
    with tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder:
        environment = {**os.environ, **script.write(Path(folder))}
        command = [sys.executable, "-m", "benchmarks.row_gpu", str(hz), str(SECONDS)]
        found: list[float] = json.loads(subprocess.check_output(command, env=environment))
    return found


def main(hz: float, seconds: int) -> None:
    """Sample, and print the CPU time of each second but the first, in which all is loaded."""
    sampler = Sampler(hz, lambda line: print(line, file=sys.stderr))
    sampler.want(os.environ[CARDS_ENV].split(","))
    sampler.start()
    spent = []
    for _ in range(seconds + 1):
        before = time.process_time_ns()
        time.sleep(1)
        sampler.readings.clear()
        spent.append((time.process_time_ns() - before) / 1e6)
    sampler.stop(1)
    print(json.dumps(spent[1:]))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
