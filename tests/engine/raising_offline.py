"""Runs offline with one hook after the other raising, in one process: `raising_offline.py CONTROL MODEL CASES`.

On stdout a JSON line per case: when it began, and the texts that were generated; on stderr a line before each. Hooks
that are called while an engine is built come first: they get an engine each.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

BUILDS = ("Scheduler.__init__", "LLMEngine.__init__", "Worker.load_model")
#: So little room that the second of two sequences is evicted when the first one grows beyond its block.
BLOCKS, LENGTH = 4, 126
MAX_LENGTH = 256


def build(model: str) -> Any:
    from vllm import LLM

    return LLM(model, dtype="float32", enforce_eager=True, max_model_len=MAX_LENGTH, num_gpu_blocks_override=BLOCKS)


def generate(llm: Any) -> list[str]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + i + n % 90 for n in range(LENGTH)]} for i in range(2)]
    found = [*llm.generate(["hello"], params), *llm.chat([[{"role": "user", "content": "hello"}]], params)]
    found += llm.generate(prompts, params)
    for prompt, wrong in (("hello " * 2 * MAX_LENGTH, params), ("hello", SamplingParams(logprobs=999))):
        try:  # the one is refused by the tokenizer, the other at the engine's door
            llm.generate([prompt], wrong)
        except Exception as error:
            assert type(error).__name__ == "VLLMValidationError", error
        else:
            raise AssertionError("it was not refused")
    return [each.outputs[0].text for each in found]


def main() -> None:
    from saboteur_control import Control

    control, model, cases = Control(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    llm = None
    for hook, part in sorted(cases, key=lambda case: not case[0].endswith(BUILDS)):
        fresh = llm is None or hook.endswith(BUILDS) or hook == ""
        if fresh:
            llm = None
            gc.collect()
        control.order(hook, part)
        print(f"CASE {hook} {part}", file=sys.stderr, flush=True)
        llm = build(model) if fresh else llm
        began = time.time_ns()
        print(json.dumps({"case": [hook, part], "began": began, "texts": generate(llm)}), flush=True)


if __name__ == "__main__":
    main()
