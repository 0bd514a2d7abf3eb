"""How many requests fit: a bound, which windows, whole blocks and several GPUs have a say in."""

from __future__ import annotations

import pytest

from stagetrace.floor import Request
from stagetrace.floor.room import Room, room_of
from tests.unit.test_floor import LLAMA, device, model


def room(name: str, gpu: str, request: Request, gpus: int = 1) -> Room:
    found = room_of(model(name), device(gpu), request, gpus)
    assert found is not None
    return found


def test_a_window_bounds_what_a_request_keeps() -> None:
    mistral, each = model("mistral-7b-v0.1"), 4096 * model("mistral-7b-v0.1").kv_bytes_per_token
    for prompt in (32_000, 1_000_000):
        found = room("mistral-7b-v0.1", "H100", Request(prompt, 300))
        assert found.request_bytes == each == 536_870_912
        assert found.requests == int((80e9 - mistral.weight_bytes) / each) == 122
    short = room("mistral-7b-v0.1", "H100", Request(2000, 49))
    assert short.request_bytes == 2048 * mistral.kv_bytes_per_token


def test_layers_without_a_window_keep_all_of_it() -> None:
    gemma = model("gemma-3-4b-it")
    assert gemma.windows == ((None, 5), (1024, 29))
    found = room("gemma-3-4b-it", "L4", Request(130_000, 289))
    assert found.request_bytes == gemma.cache_bytes * (5 * 130_288 + 29 * 1024)
    assert found.request_bytes == pytest.approx(2.79e9, rel=0.01) and found.requests == 5


@pytest.mark.parametrize(
    ("block", "tokens", "fit"), [(1, 2299, 212), (16, 2304, 211), (1000, 3000, 162), (4096, 4096, 119)]
)
def test_a_cache_is_whole_blocks(block: int, tokens: int, fit: int) -> None:
    found = room("llama-3.1-8b", "H100", Request(2000, 300, block_size=block))
    assert (found.request_bytes, found.requests) == (tokens * 131_072, fit)


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "divided", "undivided"),
    [
        ("deepseek-v3", "H200", 8, 2809, 351), ("llama-3.1-8b", "H100", 16, 4185, 2092),
        ("llama-3.1-8b", "H100", 8, 2066, 2066), ("llama-3.1-8b", "H100", 1, 211, 211),
    ],
)  # fmt: skip
def test_tensor_parallelism_divides_whole_heads(name: str, gpu: str, gpus: int, divided: int, undivided: int) -> None:
    found = room(name, gpu, Request(2000, 300), gpus)
    assert (found.requests, found.undivided) == (divided, undivided)


def test_without_a_memory_there_is_no_answer() -> None:
    assert room_of(LLAMA, device("reference"), Request(2000, 300)) is None
