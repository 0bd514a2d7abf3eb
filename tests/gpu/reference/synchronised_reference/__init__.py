"""Test only: times every forward of vLLM by a host that waits for the device before and after it.

A line for each goes to ``REFERENCE_FILE``: start and end, monotonic ns. It makes the server slow, and is for nothing
but to be compared with what the device's events say of the very same forwards.
"""

from __future__ import annotations

import os
import time
from typing import Any

_begun: list[int] = []


def install() -> None:
    """Entry point ``vllm.general_plugins``."""
    if not os.environ.get("REFERENCE_FILE"):
        return
    import wrapt

    wrapt.register_post_import_hook(_v1, "vllm.v1.worker.gpu_model_runner")
    wrapt.register_post_import_hook(_v2_start, "vllm.v1.worker.gpu.async_utils")
    wrapt.register_post_import_hook(_v2_end, "vllm.v1.worker.gpu.model_runner")


def _waited() -> int:
    import torch

    torch.cuda.synchronize()
    return time.monotonic_ns()


def _write(begun: int) -> None:
    ended = _waited()
    with open(os.environ["REFERENCE_FILE"], "a") as file:
        file.write(f"{begun} {ended}\n")


def _v1(module: Any) -> None:
    original = module.GPUModelRunner._model_forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = _waited()
        result = original(self, *args, **kwargs)
        _write(begun)
        return result

    module.GPUModelRunner._model_forward = forward


def _v2_start(module: Any) -> None:
    original = module.StepTimingCollector.forward_start

    def forward_start(self: Any) -> None:
        original(self)
        _begun[:] = [_waited()]

    module.StepTimingCollector.forward_start = forward_start


def _v2_end(module: Any) -> None:
    original = module.GPUModelRunner.execute_model

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _begun:
            _write(_begun.pop())
        return result

    module.GPUModelRunner.execute_model = execute_model
