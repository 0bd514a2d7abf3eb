"""``stagetrace run`` with a card: a program that writes marks as a server would, and a stub of the driver's library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.feed import EXIT_CODE, NUMBERS
from benchmarks.tally import Tally
from stagetrace import load
from stagetrace.clock import anchor
from tests.nvml.stub import Card, Script
from tests.unit.helpers import DEADLINE_S, ended, plain_environment, wait_until

REPO = Path(__file__).resolve().parents[2]
LIBRARY = "libnvidia-ml"


@contextmanager
def running(folder: Path, script: Script) -> Iterator[subprocess.Popen[str]]:
    """A recorded program that serves 20 requests a second until it gets SIGTERM."""
    command = [sys.executable, "-m", "stagetrace", "run", "--store", str(folder / "s.db"), "--"]
    feed = [sys.executable, "-m", "benchmarks.feed", "20", str(folder / "tally")]
    environment = {**plain_environment(), **script.write(folder), "STAGETRACE_TMPDIR": str(folder)}
    Tally(folder / "tally", *NUMBERS)
    process = subprocess.Popen(
        [*command, *feed], cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=os.setpgrp
    )
    with ended(process):
        yield process


def stopped(process: subprocess.Popen[str]) -> str:
    """End the program; what `run` has said on the way."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == EXIT_CODE
    return said


def sampled(folder: Path, at_least: int) -> bool:
    return (folder / "s.db").exists() and len(load(folder / "s.db").gpu) >= at_least


def test_samples_and_joules_are_in_the_store(tmp_path: Path) -> None:
    with running(tmp_path, Script([Card(0, power=[(0, 200.0)])])) as process:
        wait_until(lambda: sampled(tmp_path, 4), "samples")
        holders = []
        for pid in [process.pid, *map(int, children(process.pid))]:
            if LIBRARY in Path(f"/proc/{pid}/maps").read_text():
                holders.append(pid)
        assert holders == [process.pid], "the collector has it, the program does not"
        said = stopped(process)
    trace = load(tmp_path / "s.db")
    mono, wall = anchor()
    first = trace.gpu[0].t_ns - mono + wall
    done = [r for r in trace.requests if r.gpu and r.start_unix_ns > first + 50_000_000]
    assert trace.runs[-1].config["gpu"] == Card().name
    # What began before the card was asked has no joules.
    assert done and all(r.gpu["joules"] > 0 for r in done if r.gpu and r.status == "ok")
    assert all(s.energy_j == pytest.approx(200 * s.period_ns / 1e9, rel=0.05, abs=1) for s in trace.gpu[1:])
    assert "GPU" not in said


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_driver_that_hangs_keeps_nobody(tmp_path: Path) -> None:
    """It sleeps for ten minutes in a call: requests are recorded, and the end comes when the program does."""
    with running(tmp_path, Script([Card(0, more=["slow nvmlDeviceGetPowerUsage 600000000"])])) as process:
        wait_until(lambda: sampled(tmp_path, 0) and load(tmp_path / "s.db").requests, "requests")
        time.sleep(0.5)
        stopped(process)
    trace = load(tmp_path / "s.db")
    assert not trace.gpu and trace.requests and not [r for r in trace.requests if r.gpu]
