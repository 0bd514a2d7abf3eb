"""``instrument(tracer_provider=...)``: roots are live spans of the host's own provider, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagetrace import load
from stagetrace.model import RequestRecord
from stagetrace.stages import STAGES
from tests.engine.configurations import CONFIGURATIONS
from tests.engine.conftest import Starter
from tests.invariants import check_all

ALL = [stage.key for stage in STAGES]
#: What programs say, beside their spans; the engine writes to the same place.
SAID = ("AFTER", "ANSWERS", "FLUSHED", "GLOBAL", "PIECES", "STATE")
#: A host with a provider of its own. SPAN lines are what it has exported.
HOST = """
import asyncio, json, os, sys, threading
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
import stagetrace

class Printing(SpanExporter):
    def export(self, spans):
        for span in spans:
            say("SPAN", {
                "name": span.name, "kind": span.kind.name, "trace": f"{span.context.trace_id:032x}",
                "id": f"{span.context.span_id:016x}", "parent": f"{span.parent.span_id:016x}" if span.parent else None,
                "start": span.start_time, "end": span.end_time, "scope": span.instrumentation_scope.name,
                "status": span.attributes.get("stagetrace.status"), "service": span.resource.attributes["service.name"],
            })
        return SpanExportResult.SUCCESS

provider = TracerProvider(resource=Resource.create({"service.name": "host"}))
provider.add_span_processor(SimpleSpanProcessor(Printing()))
tracer = provider.get_tracer("host")

def say(what, value):
    os.write(1, f"{what} {json.dumps(value)}\\n".encode())  # whole, whichever thread else writes

def state():
    found = {name: value for name, value in stagetrace.status().items() if name != "hooks"}
    return found | {"threads": [t.name for t in threading.enumerate()]}
"""

#: The engine's own server, built in this program and called without a socket.
SERVER = """
import httpx

class Mine:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        with tracer.start_as_current_span("host middleware"):
            await self.app(scope, receive, send)

async def main():
    stagetrace.instrument(store=sys.argv[2], tracer_provider=provider)
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = ["--model", sys.argv[1], "--served-model-name", "m", "--dtype", "float32", "--enforce-eager"]
    given += ["--max-model-len", "2560", "--middleware", "__main__.Mine"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    async with build_async_engine_client(args) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host", timeout=120) as http:
            await ask(http)
        say("PIECES", await pieces(engine))
        say("STATE", state())
        say("FLUSHED", stagetrace.flush(20))

async def pieces(engine):
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    async def spoken():
        for ids in ([5, 6, 7], [8], [9, 10]):
            yield StreamingInput({"prompt_token_ids": ids})
            await asyncio.sleep(1)
    with tracer.start_as_current_span("host session"):
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        outputs = [output async for output in engine.generate(spoken(), params, "pieces")]
    return sum(len(output.outputs[0].token_ids) for output in outputs if output.outputs)

async def ask(http):
    body = {"model": "m", "max_tokens": 8, "ignore_eos": True, "stream": True}
    chat = body | {"messages": [{"role": "user", "content": sys.argv[3]}]}
    text = body | {"prompt": sys.argv[3], "stream": False}
    caller = lambda digit, flag: {"traceparent": f"00-{digit * 32}-{digit * 16}-0{flag}"}
    answers = await asyncio.gather(
        http.post("/v1/chat/completions", json=chat, headers=caller("a", 1)),
        http.post("/v1/chat/completions", json=chat, headers=caller("b", 0)),
        http.post("/v1/completions", json=text),
        http.post("/v1/completions", json=text | {"max_tokens": 10**6}, headers=caller("c", 1)),
    )
    with tracer.start_as_current_span("host client"):
        answers.append(await http.post("/v1/completions", json=text | {"n": 2, "temperature": 1.0}))
    say("ANSWERS", [answer.status_code for answer in answers])

if __name__ == "__main__":
    asyncio.run(main())
"""

DIRECT = """
async def ask(engine, name, prompt=sys.argv[3], headers=None, **more):
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **more})
    async for output in engine.generate(prompt, params, name, trace_headers=headers):
        pass
    return len(output.outputs[0].token_ids)

async def main():
    stagetrace.instrument(store=sys.argv[2], tracer_provider=provider)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
    )
    caller = {"traceparent": f"00-{'a' * 32}-{'1' * 16}-01"}
    with tracer.start_as_current_span("host task"):
        await asyncio.gather(
            ask(engine, "called", headers=caller), ask(engine, "current"), ask(engine, "two", n=2, temperature=1.0)
        )
    say("FLUSHED", stagetrace.flush(20))
    say("STATE", state() | {"method": os.environ["VLLM_WORKER_MULTIPROC_METHOD"]})
    running = asyncio.create_task(ask(engine, "unfinished", max_tokens=2000))
    await asyncio.sleep(2)
    stagetrace.uninstrument()
    say("AFTER", state())
    running.cancel()
    await ask(engine, "unseen")
    engine.shutdown()

if __name__ == "__main__":
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    asyncio.run(main())
"""

#: It ends without a word to us.
OFFLINE = """
if __name__ == "__main__":
    stagetrace.instrument(store=sys.argv[2], tracer_provider=provider)
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2560)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with tracer.start_as_current_span("host batch"):
        llm.generate([sys.argv[3], sys.argv[3] + " and"], params)
    llm.generate([sys.argv[3] + " last"], params)
    say("GLOBAL", type(trace.get_tracer_provider()).__name__)
"""


@dataclass
class Seen:
    """What a program said, and what it left."""

    said: dict[str, Any]
    spans: list[dict[str, Any]]
    records: list[RequestRecord]
    log: str

    def one(self, name: str) -> dict[str, Any]:
        (found,) = [span for span in self.spans if span["name"] == name]
        return found

    def below(self, span_id: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["parent"] == span_id]

    def root(self, record: RequestRecord) -> dict[str, Any]:
        """The one root of a record's trace id and span id; its times are the record's."""
        (found,) = [span for span in self.spans if span["id"] == record.span_id]
        assert (found["trace"], found["parent"], found["kind"]) == (record.trace_id, record.parent_span_id, "SERVER")
        assert (found["scope"], found["service"]) == ("stagetrace", "host")
        assert found["start"] == record.start_unix_ns
        assert found["status"] == record.status
        return found


def run(program: str, starter: Starter, model: Path, folder: Path, name: str) -> Seen:
    script, store = folder / "program.py", folder / "store.db"
    script.write_text(HOST + program)
    environment = {**os.environ, **starter.engine.environment(), **CONFIGURATIONS[name].environment()}
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(store), starter.prompt(60, 1)],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    said: dict[str, Any] = {}
    spans = []
    for line in done.stdout.splitlines():
        word, _, text = line.partition(" ")
        if word == "SPAN":
            spans.append(json.loads(text))
        elif word in SAID:
            said[word] = json.loads(text)
    return Seen(said, spans, load(store).requests, done.stderr)


def check_stages(seen: Seen, above: str, record: RequestRecord, keys: Sequence[str]) -> None:
    """Of a span, exactly those stages among ``keys`` are children that the record has times for, at these times."""
    timed = {row.key: row for row in record.stages if row.duration_ms is not None and row.key in keys}
    found = {span["name"]: span for span in seen.below(above) if span["name"] in keys}
    assert found.keys() == timed.keys()
    for key, span in found.items():
        start = timed[key].start_ms
        assert start is not None and span["start"] == record.start_unix_ns + round(start * 1e6)


@pytest.fixture(scope="module")
def server(starter: Starter, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run(SERVER, starter, model, tmp_path_factory.mktemp("server"), "plain")


def test_the_engine_s_server_in_the_host_s_process(server: Seen) -> None:
    seen = server
    check_all(seen.records, complete=True)
    assert seen.said["ANSWERS"] == [200, 200, 200, 400, 200] and seen.said["FLUSHED"] is True
    assert seen.said["STATE"]["collector"] == "thread"
    assert seen.said["STATE"]["threads"].count("stagetrace-collector") == 1
    over_http = [record for record in seen.records if record.request_id != "pieces"]
    by_trace = {record.trace_id: record for record in over_http if record.sequence == 0}
    assert len(over_http) == 6 and len(by_trace) == 5
    called, unsampled, refused = (by_trace[digit * 32] for digit in "abc")
    assert (called.parent_span_id, unsampled.parent_span_id) == ("a" * 16, "b" * 16)
    root = seen.root(called)
    check_stages(seen, root["id"], called, ALL)
    assert len(seen.below(root["id"])) == 13, "twelve stages and the host's own span"
    assert {span["name"] for span in seen.spans if span["trace"] == unsampled.trace_id} == set(), "its sampler's word"
    assert {stage.state for stage in unsampled.stages} == {"measured"}, "the store sees it all the same"
    check_stages(seen, seen.root(refused)["id"], refused, ALL)
    assert refused.status == "error"
    client = seen.one("host client")
    two = [record for record in seen.records if record.trace_id == client["trace"]]
    assert [record.sequence for record in two] == [0, 1]
    root = seen.root(two[0])
    assert root["parent"] == client["id"]
    for record in two:
        (above,) = [s for s in seen.below(root["id"]) if s["name"] == f"sequence {record.sequence}"]
        check_stages(seen, above["id"], record, ALL[3:])
    middleware = {span["trace"]: span for span in seen.spans if span["name"] == "host middleware"}
    assert {trace: span["parent"] for trace, span in middleware.items()} == {
        record.trace_id: record.span_id for record in by_trace.values() if record is not unsampled
    }
    assert len([span for span in seen.spans if span["kind"] == "SERVER"]) == 5, "that of the pieces, too"


def test_a_request_that_comes_in_pieces_is_one(server: Seen) -> None:
    (record,) = [record for record in server.records if record.request_id == "pieces"]
    root = server.root(record)
    assert root["parent"] == server.one("host session")["id"]
    check_stages(server, root["id"], record, ALL)
    assert (record.status, record.prompt_tokens) == ("ok", 3), "the first piece is what was waited for"
    assert record.output_tokens == len(record.token_times_ms) == server.said["PIECES"] == 12
    assert record.ttft_ms is not None and record.e2e_ms is not None
    assert record.ttft_ms < 1000 < 3000 <= record.e2e_ms


def test_asyncllm_in_the_host_s_process_under_fork(starter: Starter, model: Path, tmp_path: Path) -> None:
    """The engine's process is forked from one that has our thread."""
    seen = run(DIRECT, starter, model, tmp_path, "v2_async_uni_fork")
    assert seen.said["FLUSHED"] is True
    assert seen.said["STATE"]["method"] == "fork", "vLLM changes it where it must not be"
    assert (seen.said["STATE"]["collector"], seen.said["AFTER"]["collector"]) == ("thread", None)
    assert "stagetrace-collector" not in seen.said["AFTER"]["threads"]
    known = {record.request_id: record for record in seen.records if record.sequence == 0}
    assert set(known) == {"called", "current", "two", "unfinished"}
    done = [record for record in seen.records if record.request_id != "unfinished"]
    check_all(done)
    for name in ("called", "current"):
        root = seen.root(known[name])
        check_stages(seen, root["id"], known[name], ALL)
        assert {span["name"] for span in seen.below(root["id"])} == set(ALL[2:]), "measured, from the tokenizer on"
    task = seen.one("host task")
    assert (known["called"].trace_id, known["called"].parent_span_id) == ("a" * 32, "1" * 16)
    assert {known[name].parent_span_id for name in ("current", "two")} == {task["id"]}
    assert len([s for s in seen.below(known["two"].span_id) if s["name"].startswith("sequence")]) == 2
    unfinished = seen.root(known["unfinished"])
    assert unfinished["status"] == "in_flight"
    assert len([span for span in seen.spans if span["kind"] == "SERVER"]) == 4


def test_offline_and_gone(starter: Starter, model: Path, tmp_path: Path) -> None:
    """In one process with the engine. At the interpreter's end, everything is there."""
    seen = run(OFFLINE, starter, model, tmp_path, "plain_inproc")
    check_all(seen.records, complete=True)
    assert seen.said["GLOBAL"] == "ProxyTracerProvider", "the host's provider is not ours to set"
    batch = seen.one("host batch")
    assert [r.parent_span_id for r in sorted(seen.records, key=lambda r: r.start_unix_ns)] == [batch["id"]] * 2 + [None]
    for record in seen.records:
        root = seen.root(record)
        check_stages(seen, root["id"], record, ALL)
        assert {span["name"] for span in seen.below(root["id"])} == set(ALL[2:])
    assert len([span for span in seen.spans if span["kind"] == "SERVER"]) == 3
