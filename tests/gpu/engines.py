"""The real vLLM: both model runners, eager and captured, with and without recording, and against a host that waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu.devices import torch_with_a_gpu
from tests.gpu.part import NotHere, Part

REPO = Path(__file__).resolve().parents[2]
REFERENCE = str(Path(__file__).parent / "reference")
#: No engine starts within this of the end: it takes a minute, and captures graphs.
START_S = 75.0
#: Large enough that a step is not all launching, small enough to start at once: 1.2 billion random weights.
SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
#: Tokens of each prompt, all of them at once; of each answer; and how often. An interpreter of kernels gets less to do.
PROMPTS, TOKENS, ROUNDS = (100, 600, 2000), 64, 4
REHEARSED = (100, 300), 6, 2
ON_DEVICE = ("prefill", "lm_head", "sample")


@dataclass
class Run:
    """One start of the engine: how, and what came of it."""

    part: Part
    eager: bool
    runner: str
    variables: dict[str, str] = field(default_factory=dict)
    store: Path | None = None

    def answers(self, folder: Path) -> dict[str, Any]:
        """Start it, ask, and return what it printed; AssertionError with the end of its log if it failed."""
        if time.monotonic() + START_S > self.part.until:
            raise NotHere("no time left for another start of the engine")
        lengths, tokens, rounds = size(self.part)
        model, command = model_in(folder, self.part.rehearsal), [sys.executable, "-m", "tests.gpu.offline"]
        if self.store is not None:
            command = [sys.executable, "-m", "stagetrace", "run", "--store", str(self.store), "--", *command]
        options = {"prompts": prompts(model, lengths), "tokens": tokens, "rounds": rounds, "engine": self.engine()}
        code, said = finished(
            [*command, str(model), json.dumps(options)], self.environment(), self.part.until - time.monotonic()
        )
        line = next((line for line in said.splitlines() if line.startswith("ANSWERS ")), None)
        assert code == 0 and line, f"the engine ended with {code}: {said[-1500:]}"
        found: dict[str, Any] = json.loads(line.removeprefix("ANSWERS "))
        # vLLM's own watch over what waits for the device: how often it has warned.
        return found | {"warned": said.count("GPU<->CPU sync detected")}

    def engine(self) -> dict[str, Any]:
        options: dict[str, Any] = {"max_model_len": 2560, "max_num_seqs": 16}
        if self.part.rehearsal:
            return {**options, "dtype": "float32", "enforce_eager": True}
        return {
            **options,
            "dtype": "bfloat16",
            "enforce_eager": self.eager,
            "load_format": "dummy",
            "gpu_memory_utilization": 0.5,
        }

    def environment(self) -> dict[str, str]:
        here = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        base = {name: value for name, value in os.environ.items() if not name.startswith("STAGETRACE")}
        if not self.part.rehearsal:
            chosen = {"VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "V2" else "0"}
            return {**base, **here, **chosen, "VLLM_GPU_SYNC_CHECK": "warn", **self.variables}
        from tests.engine.configurations import CONFIGURATIONS

        as_on_a_gpu = CONFIGURATIONS["v1_async_uni" if self.runner == "V1" else "v2_async_inproc"].environment()
        path = os.pathsep.join(
            filter(None, [self.variables.get("PYTHONPATH"), as_on_a_gpu["PYTHONPATH"], base.get("PYTHONPATH")])
        )
        return {**base, **here, "VLLM_CPU_KVCACHE_SPACE": "1", **as_on_a_gpu, **self.variables, "PYTHONPATH": path}


def finished(command: list[str], environment: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """The exit code of ``command`` and all it said; after ``timeout_s`` it and whatever it has started are killed."""
    with subprocess.Popen(
        command, cwd=REPO, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def size(part: Part) -> tuple[tuple[int, ...], int, int]:
    """Prompts' lengths, tokens of an answer, rounds."""
    return REHEARSED if part.rehearsal else (PROMPTS, TOKENS, ROUNDS)


@cache
def model_in(folder: Path, rehearsal: bool) -> Path:
    """A model with a real tokenizer and random weights."""
    from stagetrace_vllm.demo_server import DemoServer

    made = DemoServer().make_model(folder / "model")
    if not rehearsal:
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, **SIZES}))
        for weights in made.glob("*.safetensors"):
            weights.unlink()
    return made


@cache
def prompts(model: Path, lengths: tuple[int, ...]) -> list[str]:
    """Of so many tokens each."""
    from stagetrace_vllm.demo_server import DemoServer

    return [DemoServer().prompt_of(model, tokens, tokens) for tokens in lengths]


def needed(part: Part) -> None:
    """:class:`NotHere` unless vLLM can be started."""
    if find_spec("vllm") is None:
        raise NotHere("vLLM is not installed here")
    if missing := [name for name in ("wrapt", "typer", "rich", "opentelemetry") if find_spec(name) is None]:
        raise NotHere(f"what records is not installed here: no {', '.join(missing)}")
    if not any(entry.name == "stagetrace" for entry in entry_points(group="vllm.general_plugins")):
        raise NotHere("vLLM would load no hooks: stagetrace itself is not installed here (its wheel belongs in WHEELS)")
    if not part.rehearsal:
        torch_with_a_gpu()


def recorded(part: Part, runner: str, eager: bool) -> None:
    """Every request's prefill, head and draw are timed by the device, and the answers are those without us."""
    needed(part)
    from stagetrace import load
    from tests.invariants import violations

    lengths, _, rounds = size(part)
    with tempfile.TemporaryDirectory(prefix="stagetrace-gpu-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        plain = Run(part, eager, runner).answers(place)
        store = place / "traced.db"
        traced = Run(part, eager, runner, store=store).answers(place)
        records = load(store).requests
    part.hold("requests without a record", len(lengths) * rounds + 1 - len(records), 0, "requests")
    part.hold(
        "answers that differ",
        sum(a != b for a, b in zip(plain["answers"], traced["answers"], strict=True)),
        0,
        "answers",
    )
    broken = [record for record in records if violations(record)]
    part.hold("records that break a rule", len(broken), 0, "records")
    by_host = [r for r in records if any(r.stage(key).source != "cuda_event" for key in ON_DEVICE)]
    part.hold("records not timed by the device", len(by_host), 0, "records")
    part.hold("warnings of waits that were not there before", traced["warned"] - plain["warned"], 0, "warnings")
    for key in ON_DEVICE:
        part.figures[f"{key}_ms"] = round(median(r.stage(key).duration_ms or 0.0 for r in records), 4)
    part.figures["round_s"] = {
        "with": round(median(traced["seconds"]), 4),
        "without": round(median(plain["seconds"]), 4),
    }
    part.figures["overhead_percent"] = round(100 * (median(traced["seconds"]) / median(plain["seconds"]) - 1), 2)


def waiting(part: Part, runner: str) -> None:
    """The same forwards by the device's events and by a host that waits before and after each."""
    needed(part)
    from stagetrace import load

    with tempfile.TemporaryDirectory(prefix="stagetrace-gpu-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        store, lines = place / "traced.db", place / "reference.txt"
        variables = {"REFERENCE_FILE": str(lines), "PYTHONPATH": os.pathsep.join(
            filter(None, [REFERENCE, "" if part.rehearsal else os.environ.get("PYTHONPATH")])
        )}  # fmt: skip
        Run(part, True, runner, variables, store).answers(place)
        steps = [step for step in load(store).steps if step.tokens and step.device_timed and step.forward_ns]
        theirs = [tuple(map(int, line.split())) for line in lines.read_text().splitlines()]
    apart, placed = [], []
    for step in steps:
        assert step.forward_ns and step.execute_ns
        inside = [span for span in theirs if step.execute_ns[0] <= span[0] <= step.execute_ns[1]]
        if len(inside) == 1:
            ((begun, ended),) = inside
            apart.append(abs((step.forward_ns[1] - step.forward_ns[0]) - (ended - begun)) / 1e3)
            placed.append(abs(step.forward_ns[1] - ended) / 1e3)
    part.hold("steps without a reference", len(steps) - len(apart), 0, "steps")
    assert apart, "no step was timed by both"
    part.figures = {"steps": len(apart), "forward_us": round(median(e - b for b, e in theirs) / 1e3, 1)}
    part.hold("forward: the two apart (median)", median(apart), 100.0 + 0.02 * part.figures["forward_us"], "µs")
    part.hold("end of the forward: the two apart (median)", median(placed), 400.0, "µs")


PARTS: dict[str, Callable[[Part], None]] = {
    "vllm-V2-graphs": partial(recorded, runner="V2", eager=False),
    "vllm-V2-against-waiting": partial(waiting, runner="V2"),
    "vllm-V1-graphs": partial(recorded, runner="V1", eager=False),
    "vllm-V1-against-waiting": partial(waiting, runner="V1"),
}
