"""Whose child a request's root is, in programs that hold the engine themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from stagetrace import load
from stagetrace.model import RequestRecord
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.conftest import Starter
from tests.engine.ways import DIRECT, IDS, OFFLINE, OFFLINE_CHAT, came_in
from tests.invariants import check_all

CURRENT = (f"{0xABC1:032x}", f"{0xDEF1:016x}")

OFFLINE_PROGRAM = """
import json, os, sys
from opentelemetry import trace
import stagetrace
stagetrace.instrument(store=sys.argv[2])
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
os.environ["traceparent"] = os.environ["TRACEPARENT"] = f"00-{'e' * 32}-{'e' * 16}-01"
mine = trace.SpanContext(0xABC1, 0xDEF1, False, trace.TraceFlags(0), trace.TraceState([("vendor", "1")]))
inside = lambda: trace.use_span(trace.NonRecordingSpan(mine))
with inside():
    llm.generate(sys.argv[3:], params)
llm.generate(sys.argv[3:4], params)
llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params)
with inside():
    llm.chat([{"role": "user", "content": sys.argv[3]}], params)
given = {"traceparent": f"00-{'a' * 32}-{'1' * 16}-01"}
llm.llm_engine.add_request("direct", sys.argv[3], params, trace_headers=given)
while llm.llm_engine.has_unfinished_requests():
    llm.llm_engine.step()
print("RESULT", json.dumps(type(trace.get_tracer_provider()).__name__))
"""

ASYNC_PROGRAM = """
import asyncio, json, sys, time
from opentelemetry import trace
import stagetrace
stagetrace.instrument(store=sys.argv[2])
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

async def ask(engine, name, prompt, headers, **more):
    params = SamplingParams(max_tokens=24, ignore_eos=True, **{"temperature": 0.0, **more})
    begun, outputs = time.monotonic(), []
    async for output in engine.generate(prompt, params, name, trace_headers=headers):
        outputs.append(time.monotonic() - begun)
    return name, outputs[0] * 1e3, outputs[-1] * 1e3

mine = trace.SpanContext(0xABC1, 0xDEF1, False, trace.TraceFlags(1))

def caller(digit):
    return {"traceparent": f"00-{digit * 32}-{digit * 16}-01", "tracestate": f"vendor={digit}"}

async def main():
    args = AsyncEngineArgs(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
    engine = AsyncLLM.from_engine_args(args)
    await ask(engine, "warm", sys.argv[3], None)
    digits = "123456"
    with trace.use_span(trace.NonRecordingSpan(mine)):
        # A task goes on in the span it was made in; headers go before it.
        inside = [asyncio.ensure_future(each) for each in (
            ask(engine, "inside", {"prompt_token_ids": [5, 6, 7, 8]}, None),
            ask(engine, "given", sys.argv[3], caller("c")),
        )]
    seen = await asyncio.gather(
        *inside,
        *(ask(engine, digit, sys.argv[3] + digit, caller(digit)) for digit in digits),
        ask(engine, "two", sys.argv[3], caller("a"), n=2, temperature=1.0),
        ask(engine, "unsound", sys.argv[3], {"traceparent": "00-zz"}),
    )
    try:
        await ask(engine, "refused", {"prompt_token_ids": [1] * 9000}, caller("b"))
    except Exception:
        pass
    engine.shutdown()
    print("RESULT", json.dumps(seen))

if __name__ == "__main__":
    asyncio.run(main())
"""


def run(program: str, starter: Starter, model: Path, folder: Path, name: str, *prompts: str) -> tuple[Any, Any]:
    """What the program printed as its result, and the records it left."""
    script, store = folder / "program.py", folder / "store.db"
    script.write_text(program)
    environment = {**os.environ, **starter.engine.environment(), **CONFIGURATIONS[name].environment()}
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(store), *prompts],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT ")), load(store).requests


def test_the_span_the_program_is_in(starter: Starter, model: Path, tmp_path: Path) -> None:
    prompts = starter.prompt(60, 1), starter.prompt(60, 2)
    provider, records = run(OFFLINE_PROGRAM, starter, model, tmp_path, "plain_inproc", *prompts)
    check_all(records, complete=True)
    assert provider == "ProxyTracerProvider", "the host's provider is not ours to set"
    first, second, outside, ids, chat, direct = sorted(records, key=lambda r: r.start_unix_ns)
    for record in (first, second):
        came_in([record], *OFFLINE, parent=CURRENT)
        assert record.caller_sampled is False
    assert first.span_id != second.span_id
    came_in([outside], *OFFLINE)
    assert outside.caller_sampled is None, "the environment is nobody's parent"
    came_in([ids], *OFFLINE, *IDS)
    came_in([chat], *OFFLINE_CHAT, parent=CURRENT)
    came_in([direct], *DIRECT, parent=("a" * 32, "1" * 16))


def test_trace_headers_of_concurrent_requests(starter: Starter, model: Path, tmp_path: Path) -> None:
    seen, records = run(ASYNC_PROGRAM, starter, model, tmp_path, "plain", starter.prompt(60, 1))
    check_all(records, complete=True)
    known: dict[str, list[RequestRecord]] = {}
    for record in records:
        known.setdefault(record.request_id, []).append(record)
    for digit in "123456":
        came_in(known[digit], *DIRECT, parent=(digit * 32, digit * 16))
        assert known[digit][0].caller_sampled
    came_in(known["warm"], *DIRECT)
    came_in(known["unsound"], *DIRECT)
    came_in(known["inside"], *DIRECT, *IDS, parent=CURRENT)
    came_in(known["given"], *DIRECT, parent=("c" * 32, "c" * 16))
    came_in(known["two"], *DIRECT, parent=("a" * 32, "a" * 16))
    assert [r.sequence for r in known["two"]] == [0, 1]
    late = []
    for name, first_ms, last_ms in seen:
        for record in known[name]:
            # The program sees an output when the event loop comes round to it: a little later, never before.
            assert record.e2e_ms is not None and record.ttft_ms is not None
            assert record.ttft_ms <= first_ms + 1 and record.e2e_ms <= last_ms + 1, (name, record)
            assert record.e2e_ms > record.ttft_ms
            late.append(last_ms - record.e2e_ms)
    assert median(late) < 250, late
    (refused,) = known[""]
    assert refused.status == "error", "refused at the engine's door"
    assert refused.error_type and refused.error_type.endswith("Error"), refused.error_type
