"""Whose child a request's root is, in programs that hold the engine themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stagetrace import load
from stagetrace.model import RequestRecord
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.conftest import Starter
from tests.invariants import check_all

OFFLINE = """
import json, os, sys
from opentelemetry import context, trace
import stagetrace
stagetrace.instrument(store=sys.argv[2])
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
os.environ["traceparent"] = os.environ["TRACEPARENT"] = f"00-{'e' * 32}-{'e' * 16}-01"
mine = trace.SpanContext(0xABC1, 0xDEF1, False, trace.TraceFlags(0), trace.TraceState([("vendor", "1")]))
with trace.use_span(trace.NonRecordingSpan(mine)):
    llm.generate(sys.argv[3:], params)
llm.generate(sys.argv[3:4], params)
given = {"traceparent": f"00-{'a' * 32}-{'1' * 16}-01"}
llm.llm_engine.add_request("direct", sys.argv[3], params, trace_headers=given)
while llm.llm_engine.has_unfinished_requests():
    llm.llm_engine.step()
print("RESULT", json.dumps(type(trace.get_tracer_provider()).__name__))
"""

DIRECT = """
import asyncio, json, sys, time
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

def caller(digit):
    return {"traceparent": f"00-{digit * 32}-{digit * 16}-01", "tracestate": f"vendor={digit}"}

async def main():
    args = AsyncEngineArgs(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
    engine = AsyncLLM.from_engine_args(args)
    await ask(engine, "warm", sys.argv[3], None)
    digits = "123456"
    seen = await asyncio.gather(
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


def not_applicable(record: RequestRecord) -> list[int]:
    return [stage.number for stage in record.stages if stage.state == "not_applicable"]


def test_the_span_the_program_is_in(starter: Starter, model: Path, tmp_path: Path) -> None:
    prompts = starter.prompt(60, 1), starter.prompt(60, 2)
    provider, records = run(OFFLINE, starter, model, tmp_path, "plain_inproc", *prompts)
    check_all(records, complete=True)
    assert provider == "ProxyTracerProvider", "the host's provider is not ours to set"
    first, second, outside, direct = sorted(records, key=lambda r: r.start_unix_ns)
    for record in (first, second):
        assert (record.trace_id, record.parent_span_id) == (f"{0xABC1:032x}", f"{0xDEF1:016x}")
        assert record.caller_sampled is False
    assert first.span_id != second.span_id
    assert (outside.parent_span_id, outside.caller_sampled) == (None, None), "the environment is nobody's parent"
    assert (direct.trace_id, direct.parent_span_id, direct.status) == ("a" * 32, "1" * 16, "ok")
    assert not_applicable(direct) == [1, 2]


def test_trace_headers_of_concurrent_requests(starter: Starter, model: Path, tmp_path: Path) -> None:
    seen, records = run(DIRECT, starter, model, tmp_path, "plain", starter.prompt(60, 1))
    check_all(records, complete=True)
    known: dict[str, list[RequestRecord]] = {}
    for record in records:
        known.setdefault(record.request_id, []).append(record)
        assert not_applicable(record)[:2] == [1, 2]
    for digit in "123456":
        (record,) = known[digit]
        assert (record.trace_id, record.parent_span_id) == (digit * 32, digit * 16)
        assert record.caller_sampled and record.status == "ok"
        assert {s.state for s in record.stages[2:]} == {"measured"}, [(s.key, s.state) for s in record.stages]
    assert all(r.parent_span_id is None for name in ("warm", "unsound") for r in known[name])
    assert [(r.trace_id, r.sequence) for r in known["two"]] == [("a" * 32, 0), ("a" * 32, 1)]
    assert len({r.span_id for r in known["two"]}) == 1
    for name, first_ms, last_ms in seen:
        for record in known[name]:
            # The program sees an output when the event loop comes round to it: a little later, never before.
            assert record.e2e_ms is not None and record.ttft_ms is not None
            assert record.ttft_ms <= first_ms + 1 and record.e2e_ms <= last_ms + 1, (name, record)
            assert last_ms - record.e2e_ms < 250 and record.e2e_ms > record.ttft_ms
    (refused,) = known[""]
    assert refused.status == "error", "refused at the engine's door"
    assert refused.error_type and refused.error_type.endswith("Error"), refused.error_type
