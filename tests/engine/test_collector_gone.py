"""Nobody reads what a real engine records any more: `stagetrace run`, or the collector beside it, is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stagetrace import load, session
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.conftest import Starter, serial_bodies
from tests.engine.serving import ClientResult, run_many, send
from tests.invariants import violations
from tests.receivers import silent

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import stagetrace
from stagetrace import session
stagetrace.instrument(store=sys.argv[2])
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
ask = lambda: llm.generate([sys.argv[3]], params)[0].outputs[0].text
before = ask()
stagetrace.flush()
directory = Path(os.environ[session.ENV])
os.kill(session.owner(directory), signal.SIGKILL)
same = [ask() == before for _ in range(5)]
print("RESULT", json.dumps({"same": same, "flushed": stagetrace.flush(0.5), "session": str(directory)}))
"""


def within(seconds: float, condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"still not after {seconds:.0f} s: {what}"
        time.sleep(0.1)


def test_a_server_serves_on_without_stagetrace_run(starter: Starter) -> None:
    """Streams that run when it is killed, and all that come later; what it had stored can be read."""
    with silent() as nowhere:
        serving = starter.start("plain", traced=True, OTEL_EXPORTER_OTLP_ENDPOINT=nowhere)
        live = next(serving)
        try:
            bodies = serial_bodies(live)
            before = run_many(live.port, bodies, 1)
            live.records(before)
            directory = live.session
            running: list[ClientResult] = []
            long = [live.body(50, 400, seed=n) for n in range(4)]
            clients = threading.Thread(target=lambda: running.extend(run_many(live.port, long, 4)))
            clients.start()
            within(30, lambda: len(load(live.store).requests) > len(bodies), "streams are running")
            live.server.signal(signal.SIGKILL)
            assert live.server.wait(10) == -signal.SIGKILL
            clients.join(120)
            assert [(r.status, r.error, r.finish_reasons) for r in running] == [(200, None, {0: "length"})] * 4
            assert [r.text for r in run_many(live.port, bodies, 1)] == [r.text for r in before]
            stored = load(live.store).requests
            assert [said for record in stored for said in violations(record)] == []
            assert len({(r.trace_id, r.span_id) for r in stored}) == len(stored), "one root each"
            assert {r.request_id for r in stored if r.status != "in_flight"} == {r.response_id for r in before}
            left = {r.request_id for r in stored if r.status == "in_flight"}
            assert left and left <= {r.response_id for r in running}, "as far as they had come"

            again = [sys.executable, "-m", "stagetrace", "run", "--no-store", "--", "true"]
            assert subprocess.run(again, timeout=60).returncode == 0
            assert directory.is_dir(), "the server still writes there"
            assert send(live.port, live.body(20, 5)).status == 200
            (api,) = [pid for pid, name in live.server.processes().items() if "api_server" in name]
            os.kill(api, signal.SIGTERM)
            within(30, lambda: not live.server.processes(), "the server has gone")
            assert subprocess.run(again, timeout=60).returncode == 0
            assert not directory.exists(), "nobody is left to write there"
        finally:
            serving.close()


def test_a_program_goes_on_without_its_collector(starter: Starter, model: Path, tmp_path: Path) -> None:
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
    assert seen["same"] == [True] * 5
    assert not seen["flushed"], "nobody is there to do it"
    assert [record.status for record in load(store).requests] == ["ok"]
    session.remove_stale()
    assert not Path(seen["session"]).exists()
