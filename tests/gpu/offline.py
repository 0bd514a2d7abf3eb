"""Test only: answer some prompts with vLLM, and print the answers and how long they took. In a process of its own."""

from __future__ import annotations

import json
import sys
import time


def main(model: str, options: str) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(options)
    prompts = [[{"role": "user", "content": text}] for text in asked.pop("prompts")]
    llm = LLM(model, **asked.pop("engine"))
    params = SamplingParams(temperature=0.0, max_tokens=asked.pop("tokens"), ignore_eos=True)
    llm.chat(prompts[:1], params, use_tqdm=False)
    spent, answers = [], []
    for _ in range(asked.pop("rounds")):
        begun = time.perf_counter()
        answers = [output.outputs[0].text for output in llm.chat(prompts, params, use_tqdm=False)]
        spent.append(time.perf_counter() - begun)
    print("ANSWERS", json.dumps({"answers": answers, "seconds": spent}))


if __name__ == "__main__":
    main(*sys.argv[1:])
