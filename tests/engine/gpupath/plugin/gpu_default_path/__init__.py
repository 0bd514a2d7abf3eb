"""Let vLLM's CPU build take the path it takes on a GPU. For tests; see ../../README.md."""

from __future__ import annotations

import os
import time
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
        wrapt.register_post_import_hook(_timed_events, "vllm.v1.worker.cpu.shm")
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


class TimedEvent:
    """A device event whose work is always finished; two of them give a time, as enabled CUDA events do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: float | None = None

    def record(self, *args: Any) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, *args: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: TimedEvent) -> float:
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) * 1e3


def _timed_events(shm: Any) -> None:
    import torch

    shm._EventPlaceholder = TimedEvent
    torch.Event = torch.cuda.Event = TimedEvent  # type: ignore[misc, assignment]
    torch.cuda.is_current_stream_capturing = lambda: False  # a CPU build raises instead of answering


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
