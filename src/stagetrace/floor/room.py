"""How many requests' caches the memory holds beside a model's weights, at most."""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Device
from .model import Model
from .rows import Request


@dataclass(frozen=True)
class Room:
    """Bytes of all GPUs' memory and of one request's cache, and so many such requests fit at most.

    ``undivided`` are those that fit with tensor parallelism alone, which gives each GPU whole heads of the cache; as
    many as ``requests`` where its heads divide evenly.
    """

    memory_bytes: float
    request_bytes: float
    requests: int
    undivided: int


def room_of(model: Model, device: Device, request: Request, gpus: int = 1) -> Room | None:
    """What fits into ``gpus`` of ``device``; None where its memory is not known."""
    if device.memory_gb is None:
        return None
    memory = device.memory_gb * gpus * 1e9
    left, each, heads = max(memory - model.weight_bytes, 0.0), request_bytes(model, request), model.attention.kv_heads
    # Each GPU holds so many of the cache's heads, and at least one: so many copies are kept of it, in all.
    copies = -(-heads // gpus) * gpus / heads
    return Room(memory, each, int(left // each), int(left // (each * copies)))


def request_bytes(model: Model, request: Request) -> float:
    """A request's cache when its last token is drawn, which itself is not in it: of a window, what it looks back at.

    In whole blocks, for no two requests share one that is half full.
    """
    tokens, block = request.prompt + request.output - 1, request.block_size
    blocks = sum(
        layers * -(-(tokens if window is None else min(tokens, window)) // block) for window, layers in model.windows
    )
    return model.cache_bytes * blocks * block
