"""What the parts launch their steps on: the GPU, or, to rehearse, a device on paper."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from stagetrace_vllm import worker_events
from tests.engine.gpupath.plugin.gpu_default_path.device import StrictEvent
from tests.gpu.part import NotHere, Part


def torch_with_a_gpu() -> Any:
    """PyTorch; :class:`NotHere` without one, or without a GPU."""
    try:
        import torch
    except ImportError as error:
        raise NotHere("PyTorch is not installed here") from error
    if not torch.cuda.is_available():
        raise NotHere("PyTorch sees no GPU here")
    return torch


class Gpu:
    """A small model's step: some layers of matrix products, a head, a draw; each as heavy as ``size`` makes it."""

    def __init__(self, size: int = 4096, layers: int = 24, rows: int = 256) -> None:
        self.torch = torch = torch_with_a_gpu()

        def made(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

        self.layers, self.vocabulary = [made(size, size) for _ in range(layers)], made(size, 8 * size)
        self.inputs, self.hidden = made(rows, size), made(rows, size)
        self.logits, self.drawn = made(rows, 8 * size), None
        self.pinned = torch.empty(rows, dtype=torch.int64, pin_memory=True)
        self.copies = torch.cuda.Stream()

    def forward(self) -> None:
        hidden = self.inputs
        for layer in self.layers:
            hidden = self.torch.relu(hidden @ layer)
        self.hidden.copy_(hidden)

    def head(self) -> None:
        self.logits = self.hidden @ self.vocabulary

    def sample(self) -> None:
        self.drawn = self.torch.argmax(self.logits, dim=-1)

    def result(self) -> Any:
        """Have the draw copied, as vLLM does; what is returned is waited for with ``synchronize``."""
        event, stream = self.torch.cuda.Event(blocking=True), self.torch.cuda.current_stream()
        with self.torch.cuda.stream(self.copies):
            self.copies.wait_stream(stream)
            self.pinned.copy_(self.drawn, non_blocking=True)
            event.record(self.copies)
        return event

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def captured(self, inside: Callable[[], None]) -> Callable[[], None]:
        """The forward as a graph; returns what replays it. ``inside`` is called while it is being captured."""
        self.forward()
        self.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            inside()
            self.forward()
        return graph.replay  # type: ignore[no-any-return]

    def refusing_to_wait(self) -> AbstractContextManager[None]:
        """PyTorch raises at whatever waits for the device."""
        return _SyncDebug(self.torch)


class _SyncDebug:
    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def __enter__(self) -> None:
        self.torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        self.torch.cuda.set_sync_debug_mode("default")


class Paper:
    """The same, on a device that is none."""

    def __init__(self, *_: int) -> None:
        self.device = StrictEvent.device

    def forward(self) -> None:
        self.device.busy_until = max(self.device.busy_until, self.device.clock()) + 2_000_000

    def head(self) -> None:
        pass

    sample = head

    def result(self) -> Any:
        event = StrictEvent(blocking=True)
        event.record()
        return event

    def synchronize(self) -> None:
        event = StrictEvent()
        event.record()
        event.synchronize()

    def captured(self, inside: Callable[[], None]) -> Callable[[], None]:
        self.device.capturing = True
        inside()
        self.device.capturing = False
        return self.forward

    def refusing_to_wait(self) -> AbstractContextManager[None]:
        return nullcontext()


def device(part: Part, *size: int) -> Gpu | Paper:
    """What this part runs on."""
    if not part.rehearsal:
        return Gpu(*size)
    worker_events._event = lambda: StrictEvent(enable_timing=True)
    worker_events._capturing = StrictEvent.device.is_capturing
    return Paper()


now = time.monotonic_ns
