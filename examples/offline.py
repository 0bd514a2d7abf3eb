"""Offline inference: `instrument()` before the engine is built, then vLLM as ever.

python offline.py MODEL
"""

from __future__ import annotations

import sys

import stagetrace


def main() -> None:
    stagetrace.instrument(store="traces.db")

    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], max_model_len=1024)
    llm.generate(["Hello", "Good evening"], SamplingParams(max_tokens=16))
    stagetrace.flush()
    for request in stagetrace.load("traces.db").requests:
        prefill = request.stage("prefill")
        print(request.request_id, request.status, f"e2e {request.e2e_ms:.1f} ms, prefill {prefill.duration_ms} ms")


if __name__ == "__main__":  # the engine may start its processes by importing this file again
    main()
