"""The floor's arithmetic: the worked example's figures, what a card does with them, and what must always hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace.floor import (
    DEVICES,
    Device,
    Floor,
    Model,
    Rates,
    Request,
    Row,
    Work,
    decode_pass,
    embedding,
    find_device,
    floor_of,
    lm_head,
    model_of,
    prefill,
    sample,
)
from stagetrace.floor.rows import document_pass_bytes
from stagetrace.floor.work import attended, logits_bytes
from stagetrace.report.stopwatch import REFERENCE_MS
from stagetrace.stages import STAGES

MODELS = Path(__file__).parents[1] / "data" / "models"
GIB = 1 << 30
#: The stages that a device's rates bound.
ON_DEVICE = ("embedding", "prefill", "lm_head", "sample", "decode")


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return found


def model(name: str, **changes: Any) -> Model:
    return model_of(config(name) | changes)


def device(name: str) -> Device:
    found = find_device(name)
    assert found is not None, name
    return found


def row(found: Floor, key: str) -> Row:
    return next(row for row in found.rows if row.key == key)


LLAMA = model("llama-3.1-8b")
#: The worked example: an idle server, 2,000 prompt tokens, 300 output tokens.
ASKED = Request(2000, 300)


def test_the_worked_example() -> None:
    found = floor_of(LLAMA, device("reference"), ASKED)
    assert found.parameters == 8_030_261_248 and found.weight_bytes == 16_060_522_496  # as in its safetensors index
    assert found.kv_bytes_per_token == 128 * 1024 == 2 * 32 * 8 * 128 * 2
    assert found.kv_blocks == 125
    stage = row(found, "prefill")
    assert stage.flop == 2 * 8_030_261_248 * 2000 + 4 * 32 * 4096 * 2000**2
    assert f"{stage.flop / 1e12:.1f}" == "34.2"
    head = row(found, "lm_head")
    assert head.flop == 2 * 4096 * 128_256 and f"{head.flop / 1e9:.2f}" == "1.05"
    assert stage.flop_exact and head.flop_exact
    assert f"{(stage.flop_exact + head.flop_exact) / 1e12:.1f}" == "29.0"
    written = row(found, "kv_allocate").bytes
    assert written == 2000 * 128 * 1024 and f"{written / GIB:.2f}" == "0.24"
    assert f"{128 * 1024 * 128 * 1024 / GIB:.0f}" == "16"  # of 128k tokens
    assert f"{logits_bytes(128_256, 8192) / GIB:.1f}" == "3.9"
    assert found.ridge_batch == 148
    assert floor_of(LLAMA, device("H100"), ASKED).ridge_batch == 295


def test_the_worked_examples_own_decode() -> None:
    """All weights and the cache, over the bandwidth; the floor leaves out what a pass need not read."""
    found = row(floor_of(LLAMA, device("reference"), ASKED), "decode")
    passes = [16_060_522_496 + 131_072 * context for context in range(2001, 2300)]
    assert found.bytes == sum(passes)
    assert sum(passes) / 2.68e12 * 1e3 == pytest.approx(1823.3, abs=0.1)
    # One row of the embedding, as large as the last norm, which the floor leaves out; and the logits.
    read = [size - 128_256 * 4096 * 2 + 128_256 * 4 for size in passes]
    assert found.bytes_exact == sum(read)
    assert found.floor_ms == pytest.approx(sum(read) / 2.68e12 * 1e3)


def test_no_stage_of_the_worked_example_is_faster_than_its_floor_but_the_head() -> None:
    """Reading the head takes 0.39 ms at the document's own bandwidth; it says 0.1 ms."""
    rows = floor_of(LLAMA, device("reference"), ASKED).rows
    faster = [r.key for r in rows if r.floor_ms is not None and REFERENCE_MS[r.key] < r.floor_ms]
    assert faster == ["lm_head"]
    assert row(floor_of(LLAMA, device("reference"), ASKED), "lm_head").floor_ms == pytest.approx(0.392, abs=1e-3)


def test_at_128k_tokens_of_context_a_pass_takes_about_twice_as_long() -> None:
    rates = Rates.of(device("reference"), LLAMA)
    assert rates.ms(decode_pass(LLAMA, 128 * 1024)) / rates.ms(decode_pass(LLAMA, 1)) == pytest.approx(2.14, abs=0.01)


def test_a_warm_prompt_costs_what_it_computes() -> None:
    cold, warm = (row(floor_of(LLAMA, device("reference"), Request(2000, 1, n)), "prefill") for n in (0, 1900))
    assert cold.floor_ms and warm.floor_ms
    # 1.5 TFLOP take less time than the weights do: memory bounds it, which is 14 GB in 5.2 ms.
    assert warm.bound == "memory" and warm.floor_ms == pytest.approx(5.3, abs=0.1) and cold.bound == "compute"
    assert warm.bytes_exact == round(LLAMA.layer_bytes) + 2000 * 131_072


def test_every_stage_is_listed_and_the_host_has_no_floor() -> None:
    found = floor_of(LLAMA, device("H100"), ASKED)
    assert [(r.number, r.key) for r in found.rows] == [(s.number, s.key) for s in STAGES]
    assert [r.key for r in found.rows if r.floor_ms is not None] == list(ON_DEVICE)
    assert all(r.why for r in found.rows if r.floor_ms is None)
    assert all(r.bound in ("compute", "memory") for r in found.rows if r.floor_ms is not None)


def test_one_token_is_not_decoded() -> None:
    found = row(floor_of(LLAMA, device("H100"), Request(10, 1)), "decode")
    assert (found.flop, found.bytes, found.floor_ms, found.bound) == (0, 0, 0.0, None) and found.why


def test_a_batch_reads_weights_once_and_each_ones_cache() -> None:
    one, eight = (row(floor_of(LLAMA, device("H100"), Request(2000, 2, batch=n)), "decode") for n in (1, 8))
    assert one.bytes_exact and eight.bytes_exact and one.flop_exact and eight.flop_exact
    own = 2001 * 131_072 + 4096 * 2 + 128_256 * 4
    assert eight.bytes_exact - one.bytes_exact == 7 * own
    assert eight.flop_exact == 8 * one.flop_exact


def test_at_the_ridge_a_pass_computes_as_long_as_it_reads() -> None:
    """The cache left out: it is what keeps a real batch from ever getting there."""
    for name in ("llama-3.1-8b", "llama-3.1-8b-instruct-w4a16", "llama-3.1-8b-instruct-fp8", "qwen3-30b-a3b"):
        shape = model(name)
        rates = Rates.of(device("H100"), shape)
        batch = floor_of(shape, device("H100"), ASKED).ridge_batch
        work = decode_pass(shape, 1, mates=batch - 1, sequences=batch)
        computing = work.narrow / rates.narrow + work.wide / rates.wide
        reading = (shape.all_layer_bytes + shape.head_bytes) / rates.bytes
        assert computing / reading == pytest.approx(1, rel=0.01), name


def test_several_gpus_share_a_pass() -> None:
    one, four = (floor_of(LLAMA, device("H100"), ASKED, gpus) for gpus in (1, 4))
    assert four.total_ms == pytest.approx(one.total_ms / 4)
    assert (four.ridge_batch, four.weight_bytes) == (one.ridge_batch, one.weight_bytes)


def test_a_window_bounds_what_is_looked_at() -> None:
    mistral, whole = model("mistral-7b-v0.1"), model("mistral-7b-v0.1", sliding_window=None)
    below, beyond = decode_pass(mistral, 4096), decode_pass(mistral, 100_000)
    assert below == decode_pass(whole, 4096)
    assert beyond == below  # as many positions are read and written as are attended to
    own = 4096 * mistral.kv_bytes_per_token + mistral.row_bytes + 4 * mistral.vocabulary
    assert beyond.bytes == mistral.pass_bytes + own
    assert prefill(mistral, 1, cached=31_999).bytes == mistral.layer_bytes + 4096 * mistral.kv_bytes_per_token
    gemma = model("gemma-2-9b-it")
    assert gemma.windows == ((None, 21), (4096, 21))
    assert decode_pass(gemma, 8193).bytes - decode_pass(gemma, 8192).bytes == gemma.kv_bytes_per_token / 2


def test_latent_attention_caches_one_vector_and_reads_it() -> None:
    shape = model("deepseek-v3")
    assert shape.kv_bytes_per_token == (512 + 64) * 2 * 61
    one, two = decode_pass(shape, 1000), decode_pass(shape, 1001)
    assert two.flop - one.flop == 61 * 2 * 128 * (576 + 512)
    assert prefill(shape, 2).flop - 2 * prefill(shape, 1).flop == 61 * 2 * 128 * (192 + 128)


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"), ("nvidia l4", "L4"), ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("Tesla T4", "T4"), ("h200", "H200"), ("NVIDIA B200", "B200"),
    ],
)  # fmt: skip
def test_a_live_card_finds_its_row(name: str, which: str) -> None:
    assert device(name).name == which


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H800",
        "NVIDIA GeForce RTX 4090 D",
        "A100",
        "NVIDIA",
        "",
        "cpu",
        None,
    ],
)
def test_what_only_looks_like_a_card_is_none(name: str | None) -> None:
    assert find_device(name) is None


def test_the_table_is_sound() -> None:
    names = [name for d in DEVICES for name in (d.name, *d.reported)]
    assert all(find_device(name) is d for d in DEVICES for name in (d.name, *d.reported))
    assert len({d.name for d in DEVICES}) == len(DEVICES) and len(names) == len(set(names))
    for d in DEVICES:
        peaks = d.tflops
        assert d.gb_per_s > 0 and set(peaks) <= {"fp32", "bf16", "fp8", "int8", "fp4"}
        # Narrower numbers are never slower, and no card has more than four times the rate of twice the width.
        assert peaks.get("fp32", 0) <= peaks["bf16"] <= peaks.get("fp8", 1e9) <= peaks.get("fp4", 1e9), d.name
        assert peaks.get("int8", peaks["bf16"]) <= 4.1 * peaks["bf16"], d.name


def test_every_device_is_in_the_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "floor.md").read_text()
    missing = [d.name for d in DEVICES if f"| {d.name} |" not in page]
    assert not missing
    for d in DEVICES:
        line = next(line for line in page.splitlines() if line.startswith(f"| {d.name} |"))
        cells = [cell.strip().replace(",", "") for cell in line.split("|")]
        kinds = ("fp32", "bf16", "fp8", "int8", "fp4")
        told = [f"{d.tflops[kind]:g}" if kind in d.tflops else "—" for kind in kinds]
        assert cells[2:8] == [*told, f"{d.gb_per_s:g}"], d.name


def test_a_card_without_fp8_computes_it_in_bf16() -> None:
    shape = model("llama-3.1-8b-instruct-fp8")
    old, new = Rates.of(device("A100-80GB"), shape), Rates.of(device("H100"), shape)
    assert old.narrow == old.wide == 312e12
    assert (new.narrow, new.wide) == (1979e12, 989e12)


# ---------------------------------------------------------------- what always holds

names = st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json")))
devices = st.sampled_from(DEVICES)
few, many = st.integers(1, 40), st.integers(1, 20_000)


@settings(deadline=None, max_examples=60)
@given(names, devices, many, few, st.integers(0, 5_000), st.sampled_from([1, 2, 8]))
def test_more_never_costs_less(name: str, card: Device, prompt: int, output: int, more: int, gpus: int) -> None:
    shape = SHAPES[name]
    base = floor_of(shape, card, Request(prompt, output), gpus)
    for longer in (
        Request(prompt + more, output), Request(prompt, output + more % 40), Request(prompt, output, batch=1 + more),
    ):  # fmt: skip
        found = floor_of(shape, card, longer, gpus)
        for small, large in zip(base.rows, found.rows, strict=True):
            for figure in ("flop", "bytes", "floor_ms", "flop_exact", "bytes_exact"):
                assert (getattr(small, figure) or 0) <= (getattr(large, figure) or 0) * (1 + 1e-12), (small, large)
    if prompt > 1:
        warm = floor_of(shape, card, Request(prompt, output, cached=more % prompt), gpus)
        assert row(warm, "prefill").flop_exact <= row(base, "prefill").flop_exact  # type: ignore[operator]
        assert row(warm, "prefill").floor_ms <= row(base, "prefill").floor_ms * (1 + 1e-12)  # type: ignore[operator]


@settings(deadline=None, max_examples=60)
@given(names, devices, many, few, st.integers(1, 64))
def test_sums_are_sums_and_floors_stay_below_the_document(
    name: str, card: Device, prompt: int, output: int, batch: int
) -> None:
    shape = SHAPES[name]
    found = floor_of(shape, card, Request(prompt, output, batch=batch))
    assert found.total_ms == pytest.approx(sum(r.floor_ms or 0 for r in found.rows))
    assert found.ttft_ms == pytest.approx(found.total_ms - (row(found, "decode").floor_ms or 0))
    for key in ("prefill", "lm_head", "embedding"):
        stage = row(found, key)
        assert stage.flop is not None and stage.flop_exact is not None and stage.flop_exact <= stage.flop
    assert found.active_parameters <= found.parameters and shape.active_bytes <= found.weight_bytes


@settings(deadline=None, max_examples=60)
@given(names, st.integers(1, 9_000), st.lists(st.integers(1, 3_000), max_size=5))
def test_chunks_of_a_prompt_do_its_work(name: str, first: int, rest: list[int]) -> None:
    """However it is cut: the same FLOP, the same cache written; weights are read again for each chunk."""
    shape = SHAPES[name]
    done, total = 0, Work(0, 0, 0)
    for tokens in (first, *rest):
        total, done = total + prefill(shape, tokens, cached=done), done + tokens
    whole = prefill(shape, done)
    assert total.flop == pytest.approx(whole.flop)
    assert total.bytes >= whole.bytes + len(rest) * shape.layer_bytes - 1


@settings(deadline=None, max_examples=60)
@given(names, st.integers(1, 50_000), st.integers(1, 8), st.integers(0, 600), st.integers(1, 64))
def test_a_decode_pass_is_the_sum_of_its_parts(name: str, context: int, tokens: int, mates: int, batch: int) -> None:
    """It is a prefill of its tokens behind its context, but for latent attention, with the embedding and the ends."""
    shape, tokens = SHAPES[name], min(tokens, context)
    parts = prefill(shape, tokens, context - tokens, mates) + embedding(shape, tokens + mates)
    parts += lm_head(shape, batch) + sample(shape, batch)
    found, latent = decode_pass(shape, context, tokens, mates, batch), name.startswith("deepseek")
    assert found.bytes == pytest.approx(parts.bytes) and found.narrow == parts.narrow
    assert found.wide == pytest.approx(parts.wide) or (latent and found.wide > parts.wide)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 300), st.integers(0, 300), st.none() | st.integers(1, 400))
def test_pairs_are_counted_one_by_one(start: int, more: int, window: int | None) -> None:
    expected = sum(min(p + 1, window or p + 1) for p in range(start, start + more))
    assert attended(start, start + more, window) == expected


@settings(deadline=None, max_examples=60)
@given(names, st.integers(1, 100_000), st.floats(1, 1e4), st.floats(1, 1e4))
def test_a_better_card_is_never_slower(name: str, context: int, tflops: float, gb_per_s: float) -> None:
    shape, work = SHAPES[name], decode_pass(SHAPES[name], context)
    card = Device("card", {"bf16": tflops}, gb_per_s)
    here = Rates.of(card, shape).ms(work)
    assert Rates.of(replace(card, gb_per_s=gb_per_s * 2), shape).ms(work) <= here
    assert Rates.of(replace(card, tflops={"bf16": tflops * 2}), shape).ms(work) <= here
    assert here >= work.bytes / gb_per_s / 1e6 * (1 - 1e-9)


def test_the_document_formula_counts_active_weights_of_a_mixture() -> None:
    shape = model("mixtral-8x7b")
    assert document_pass_bytes(shape, 0) == round(shape.active_parameters * 2)


SHAPES = {path.stem: model(path.stem) for path in MODELS.glob("*.json")}
