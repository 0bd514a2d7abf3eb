"""Let vLLM's CPU build take the path it takes on a GPU. For tests; see ../../README.md."""

from __future__ import annotations

import os
from typing import Any

_installed = False


def flags() -> frozenset[str]:
    """Return the flags of ``GPU_DEFAULT_PATH``."""
    return frozenset(filter(None, os.environ.get("GPU_DEFAULT_PATH", "").split(",")))


def install() -> None:
    """Be the plug-in function: called in every process, once or more, before the configuration is made."""
    global _installed
    if _installed:
        return
    _installed = True
    _keep_choices()
    import wrapt

    if "events" in flags():
        wrapt.register_post_import_hook(_device_events, "vllm.v1.worker.cpu.shm")
    if os.environ.get("TRITON_INTERPRET") == "1":
        wrapt.register_post_import_hook(_torch_top_k, "vllm.v1.sample.ops.topk_topp_sampler")
        wrapt.register_post_import_hook(_bool_masks, "triton.runtime.interpreter")


def _keep_choices() -> None:
    """Put back what the configuration had decided, as on a GPU, before the CPU platform overrode it."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        executor = vllm_config.parallel_config.distributed_executor_backend
        original(cls, vllm_config)
        wanted = flags()
        if "async" in wanted:
            vllm_config.scheduler_config.async_scheduling = asynchronous
        if "uni" in wanted:
            vllm_config.parallel_config.distributed_executor_backend = executor
        if "fork" in wanted:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]


def _device_events(shm: Any) -> None:
    """Put a device on paper behind the events, where the CPU build has nothing; ``GPU_DEVICE_FAILS`` makes it fail."""
    import torch

    from .device import StrictEvent

    device = StrictEvent.device
    device.failing.update(filter(None, os.environ.get("GPU_DEVICE_FAILS", "").split(",")))
    shm._EventPlaceholder = StrictEvent
    torch.Event = torch.cuda.Event = StrictEvent  # type: ignore[misc, assignment]
    torch.cuda.is_current_stream_capturing = device.is_capturing  # a CPU build raises instead of answering
    torch.cuda.synchronize = device.synchronize


def _torch_top_k(sampler: Any) -> None:
    """The top-k/top-p kernel is beyond the interpreter; vLLM has the same in PyTorch."""
    sampler.HAS_TRITON = False


def _bool_masks(interpreter: Any) -> None:
    """The interpreter wants boolean masks, the grammar kernel's are integers."""

    def cast(name: str, position: int) -> None:
        original = getattr(interpreter.InterpreterBuilder, name)

        def call(self: Any, *args: Any) -> Any:
            mask = args[position]
            mask.data = mask.data.astype(bool, copy=False)
            return original(self, *args)

        setattr(interpreter.InterpreterBuilder, name, call)

    cast("create_masked_load", 1)
    cast("create_masked_store", 2)
