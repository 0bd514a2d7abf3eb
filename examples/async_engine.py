"""Your own service around AsyncLLM: each request's caller is handed to the engine as `trace_headers`.

    python async_engine.py MODEL

Without them, a request's parent is the OpenTelemetry span its task is in, if there is one.
"""

from __future__ import annotations

import asyncio
import sys

import stagetrace

CALLERS = (
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
)


async def main() -> None:
    stagetrace.instrument(store="traces.db")

    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(sys.argv[1], max_model_len=1024))

    async def answer(number: int, headers: dict[str, str]) -> None:
        params = SamplingParams(max_tokens=16)
        async for _ in engine.generate("Hello", params, f"request-{number}", trace_headers=headers):
            pass

    await asyncio.gather(*(answer(number, headers) for number, headers in enumerate(CALLERS)))
    stagetrace.flush()
    engine.shutdown()
    for request in stagetrace.load("traces.db").requests:
        print(request.request_id, request.trace_id, request.parent_span_id, f"{request.ttft_ms:.1f} ms")


if __name__ == "__main__":  # the engine starts its processes by importing this file again
    asyncio.run(main())
