"""``stagetrace.instrument()`` in the program that builds the engine: no ``stagetrace run`` around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from stagetrace import load
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.conftest import Starter
from tests.engine.ways import OFFLINE, came_in

PROGRAM = """
import json, os, sys
import stagetrace
stagetrace.instrument(store=sys.argv[2])
stagetrace.instrument(store=sys.argv[2])
from vllm import LLM, SamplingParams
import vllm.v1.core.sched.scheduler as scheduler
import vllm.entrypoints.llm as entry
before = stagetrace.status()
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
text = llm.generate([sys.argv[3]], params)[0].outputs[0].text
flushed = stagetrace.flush()
stored = len(stagetrace.load(sys.argv[2]).requests)
during = stagetrace.status()
wrapped = type(scheduler.Scheduler.__dict__["schedule"]).__name__
session = os.environ["STAGETRACE_SESSION"]
stagetrace.uninstrument()
restored = type(scheduler.Scheduler.__dict__["schedule"]).__name__
again = llm.generate([sys.argv[3]], params)[0].outputs[0].text
print("RESULT", json.dumps({
    "before": before, "during": during, "stored": stored, "flushed": flushed, "wrapped": wrapped,
    "restored": restored, "same": text == again, "session": session,
}))
"""


def test_instrument(starter: Starter, model: Path, tmp_path: Path) -> None:
    program, store = tmp_path / "program.py", tmp_path / "store.db"
    program.write_text(PROGRAM)
    environment = {**os.environ, **starter.engine.environment(), **CONFIGURATIONS["plain_inproc"].environment()}
    done = subprocess.run(
        [sys.executable, str(program), str(model), str(store), starter.prompt(60, 1)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    seen = json.loads(line.removeprefix("RESULT "))
    assert not seen["before"]["recording"], "nothing may be started before an engine is built"
    assert seen["before"]["session"] is None
    assert seen["during"]["recording"]
    assert seen["flushed"]
    assert seen["stored"] == 1
    assert (seen["wrapped"], seen["restored"]) == ("FunctionWrapper", "function")
    assert seen["same"]
    (record,) = load(store).requests
    came_in([record], *OFFLINE)
    assert record.output_tokens == 8
    assert not Path(seen["session"]).exists(), "the collector ends after the last writer and tidies up"


def test_a_plain_process_is_left_alone(tmp_path: Path) -> None:
    """Without a session the plug-in does nothing at all; with one, a process that is no engine opens no ring."""
    code = (
        "import sys, threading, stagetrace_vllm; stagetrace_vllm.plugin(); import fastapi.applications as f; "
        "print(type(f.FastAPI.__dict__['build_middleware_stack']).__name__, threading.active_count())"
    )
    bare = {k: v for k, v in os.environ.items() if not k.startswith("STAGETRACE")}
    out = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["function", "1"]
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    named = {**bare, "STAGETRACE_SESSION": str(session)}
    out = subprocess.run([sys.executable, "-c", code], env=named, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["FunctionWrapper", "1"]
    assert list(session.iterdir()) == []


SWITCHED_ON = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
llm.generate([sys.argv[2]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
"""


def test_a_variable_switches_it_on(starter: Starter, model: Path, tmp_path: Path) -> None:
    """``STAGETRACE=1`` and a program that knows nothing of us: the store is in its working directory."""
    program = tmp_path / "program.py"
    program.write_text(SWITCHED_ON)
    environment = {**os.environ, **starter.engine.environment(), **CONFIGURATIONS["plain_inproc"].environment()}
    done = subprocess.run(
        [sys.executable, str(program), str(model), starter.prompt(40, 1)],
        env={**environment, "STAGETRACE": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    until = time.monotonic() + 20  # the collector ends after the program has
    while (tmp_path / "stagetrace.db-lock").exists() or not (tmp_path / "stagetrace.db").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    (record,) = load(tmp_path / "stagetrace.db").requests
    came_in([record], *OFFLINE)
    assert record.output_tokens == 8
