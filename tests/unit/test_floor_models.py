"""Public models, by their published configs: sizes against what their makers say, and rows that make sense."""

from __future__ import annotations

from typing import Any

import pytest

from stagetrace.floor import ConfigError, Request, floor_of, model_of
from tests.unit.test_floor import MODELS, ON_DEVICE, config, device, model

#: What makers publish of their models: all parameters, exactly, as their safetensors files sum up on huggingface.co.
#: Two differ on purpose. DeepSeek-V3: the paper's 671 B (arXiv 2412.19437), without the 14 B of its prediction layer,
#: which the files have. Gemma 3: the files' 4.3 B less the vision tower's 0.42 B (arXiv 2503.19786, table 1: 3,209 M
#: and 675 M of embedding), for the language model is what is counted.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-8b-instruct-fp8": 8_030_261_248,
    "llama-3.1-8b-instruct-w4a16": 8_030_261_248, "qwen2.5-7b": 7_615_616_512, "qwen2.5-7b-instruct-awq": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624, "mixtral-8x7b": 46_702_792_704, "mistral-7b-v0.1": 7_241_732_096,
    "deepseek-v2-lite": 15_706_484_224, "gemma-2-9b-it": 9_241_705_984, "phi-3-mini-4k-instruct": 3_821_079_552,
    "gpt-oss-20b": 20_914_757_184,
}  # fmt: skip
ROUNDED = {"deepseek-v3": 671e9, "gemma-3-4b-it": 3_884e6}
#: Parameters that a token needs, as published: to one in the last digit given, for some makers round and some cut.
#: OpenAI leave the embedding out, of which a token needs one row, and say so; DeepSeek's figures add up so, too.
ACTIVE = {
    "qwen3-30b-a3b": (3.3e9, 0.1e9, False), "deepseek-v2-lite": (2.4e9, 0.1e9, True),
    "deepseek-v3": (37e9, 1e9, True), "gpt-oss-20b": (3.61e9, 0.01e9, True), "mixtral-8x7b": (12.9e9, 0.1e9, False),
}  # fmt: skip
#: Bytes of the published files (``total_size`` of their safetensors index), where it is known to the byte: all of it
#: is weights and scales. W4A16: 5.74 GB on disk, which has an index for each input column besides.
WEIGHT_BYTES = {
    "llama-3.1-8b": 16_060_522_496, "llama-3.1-70b": 141_107_412_992, "qwen2.5-7b": 15_231_233_024,
    "qwen3-30b-a3b": 61_064_245_248, "mistral-7b-v0.1": 14_483_464_192, "mixtral-8x7b": 93_405_585_408,
    "gpt-oss-20b": 13_761_264_768,
}  # fmt: skip
#: Bytes that a token adds to the cache, by hand: layers × (keys and values) × heads × width × bytes.
CACHE = {
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2, "llama-3.1-70b": 80 * 2 * 8 * 128 * 2, "qwen2.5-7b": 28 * 2 * 4 * 128 * 2,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2, "phi-3-mini-4k-instruct": 32 * 2 * 32 * 96 * 2,
    "gemma-2-9b-it": 42 * 2 * 8 * 256 * 2, "gpt-oss-20b": 24 * 2 * 8 * 64 * 2, "deepseek-v2-lite": 27 * 576 * 2,
}  # fmt: skip


def test_ten_models_and_more_are_here() -> None:
    assert {path.stem for path in MODELS.glob("*.json")} == PARAMETERS.keys() | ROUNDED.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert model(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_published_in_round_figures(name: str) -> None:
    assert model(name).parameters == pytest.approx(ROUNDED[name], rel=0.002)


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_needs(name: str) -> None:
    published, digit, without_embedding = ACTIVE[name]
    shape = model(name)
    assert shape.active_parameters - without_embedding * shape.embedding_weights == pytest.approx(published, abs=digit)


@pytest.mark.parametrize("name", WEIGHT_BYTES)
def test_bytes_of_the_weights(name: str) -> None:
    assert model(name).weight_bytes == WEIGHT_BYTES[name]


def test_bytes_of_quantised_weights() -> None:
    plain = 2 * (128_256 * 4096 * 2 + 4096 * 65)  # embedding, head and norms stay in 16 bits
    quantised = 8_030_261_248 - plain // 2
    assert model("llama-3.1-8b-instruct-fp8").weight_bytes == plain + quantised
    assert model("llama-3.1-8b-instruct-w4a16").weight_bytes == plain + quantised * (4 + 20 / 128) / 8
    assert model("qwen2.5-7b-instruct-awq").weight_bytes == pytest.approx(5.57e9, rel=0.001)
    # 8 bits and a 32-bit scale for 128 × 128 weights.
    assert model("deepseek-v3").weight_bytes == pytest.approx(671e9 * (1 + 4 / 128**2) + 0.93e9 * 2, rel=0.001)


@pytest.mark.parametrize("name", CACHE)
def test_the_cache(name: str) -> None:
    shape = model(name)
    assert shape.kv_bytes_per_token == CACHE[name]
    assert model(name, kv_cache_dtype="fp8").kv_bytes_per_token == CACHE[name] / 2


@pytest.mark.parametrize("name", PARAMETERS.keys() | ROUNDED.keys())
def test_rows_make_sense(name: str) -> None:
    """On 8 H100s: prefill computes, decode reads, and a token costs about what its weights do."""
    shape = model(name)
    found = floor_of(shape, device("H100"), Request(4000, 100), gpus=8)
    rows = {r.key: r for r in found.rows}
    assert all((rows[key].floor_ms or 0) > 0 for key in ON_DEVICE)
    assert rows["prefill"].bound == "compute" and rows["decode"].bound == "memory"
    # The share of the document's formula that is really needed: no embedding, half of attention.
    assert 0.6 < (rows["prefill"].flop_exact or 0) / (rows["prefill"].flop or 1) < 1
    each = (rows["decode"].bytes_exact or 0) / 99
    reads = shape.active_bytes - shape.embedding_weights * 2 * (not shape.tied)
    assert reads < each < reads + 4100 * shape.kv_bytes_per_token + 2e6


# ---------------------------------------------------------------- configs in other shapes


def test_parts_beside_the_language_model_are_left_out() -> None:
    nested = {"model_type": "llava", "text_config": config("llama-3.1-8b"), "vision_config": {"hidden_size": 1024}}
    assert model_of(nested) == model("llama-3.1-8b")
    outer = config("llama-3.1-8b")
    dtype = outer.pop("torch_dtype")
    assert model_of({"model_type": "llava", "text_config": outer, "torch_dtype": dtype}) == model("llama-3.1-8b")


def test_dtype_under_its_new_name() -> None:
    renamed = config("llama-3.1-8b")
    renamed["dtype"] = f"torch.{renamed.pop('torch_dtype')}"
    assert model_of(renamed) == model("llama-3.1-8b")
    assert model("llama-3.1-8b", dtype="float32").weight_bytes == 2 * 16_060_522_496


def test_one_head_of_keys_for_all_queries() -> None:
    """Multi-query attention is grouped-query attention with one group; without any field each head has its own."""
    assert model("llama-3.1-8b", num_key_value_heads=1).kv_bytes_per_token == 32 * 2 * 128 * 2
    assert model("llama-3.1-8b", num_key_value_heads=None).kv_bytes_per_token == 32 * 2 * 32 * 128 * 2


def test_a_tied_head_counts_once_and_is_read() -> None:
    tied, free = model("llama-3.1-8b", tie_word_embeddings=True), model("llama-3.1-8b")
    assert free.parameters - tied.parameters == 128_256 * 4096
    assert tied.head_bytes == free.head_bytes and tied.layer_bytes == free.layer_bytes


def test_some_layers_are_dense() -> None:
    assert model("qwen3-30b-a3b", mlp_only_layers=[0, 1]).parameters == model("qwen3-30b-a3b").parameters - 2 * (
        128 * 3 * 2048 * 768 + 128 * 2048 - 3 * 2048 * 6144
    )
    every_other = model("qwen3-30b-a3b", decoder_sparse_step=2)
    experts = next(group for group in every_other.groups if group.part == "experts")
    assert experts.total == 24 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(
    ("quantised", "bits", "compute"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, "bf16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "bf16"),
        ({"quant_method": "gptq_marlin", "bits": 4, "group_size": 64}, 4 + 20 / 64, "bf16"),
        ({"quant_method": "awq", "w_bit": 4, "group_size": 64, "zero_point": False}, 4 + 16 / 64, "bf16"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, 8, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
         4 + 8 / 64 + 32 / 16384, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, "fp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int"}}}}, 8, "int8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}}}}, 4.125, "bf16"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float"}}}}, 4.5, "fp4"),
    ],
)  # fmt: skip
def test_bits_of_a_weight(quantised: dict[str, Any], bits: float, compute: str) -> None:
    found = model("llama-3.1-8b", quantization_config=quantised).precision
    assert found.bits_of("mlp") == found.bits_of("attention") == pytest.approx(bits)
    assert found.compute == compute and found.plain_bits == 16


def test_what_a_checkpoint_leaves_unquantised() -> None:
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    found = model("llama-3.1-8b", quantization_config=fp8)
    assert (found.precision.bits_of("attention"), found.precision.bits_of("mlp")) == (16, 8)
    assert found.wide_weights == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    # Single layers count as quantised: less is read, so the floor stays one.
    some = fp8 | {"modules_to_not_convert": ["model.layers.0.self_attn", "model.layers.31.mlp"]}
    assert model("llama-3.1-8b", quantization_config=some).wide_weights == 0
    with_head = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    assert model("llama-3.1-8b", quantization_config=with_head).head_bytes < found.head_bytes / 3


def test_the_cache_as_the_checkpoint_says() -> None:
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    quantised = config("llama-3.1-8b-instruct-fp8")["quantization_config"] | scheme
    assert model("llama-3.1-8b", quantization_config=quantised).kv_bytes_per_token == 65_536
    asked = model("llama-3.1-8b", quantization_config=quantised, kv_cache_dtype="bfloat16")
    assert asked.kv_bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama-3.1-8b", {"hidden_size": None}, "hidden_size is missing"),
        ("llama-3.1-8b", {"hidden_size": "4096"}, "hidden_size is '4096', not a whole number"),
        ("llama-3.1-8b", {"hidden_size": True}, "hidden_size is True"),
        ("llama-3.1-8b", {"hidden_size": 4096.5}, "hidden_size is 4096.5"),
        ("llama-3.1-8b", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama-3.1-8b", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ("llama-3.1-8b", {"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000, more than"),
        ("llama-3.1-8b", {"vocab_size": 10**30}, "vocab_size is 1000000000"),
        ("llama-3.1-8b", {"num_attention_heads": 31}, "not a multiple"),
        ("llama-3.1-8b", {"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple"),
        ("llama-3.1-8b", {"model_type": "mamba"}, "model_type mamba is not known; known are"),
        ("llama-3.1-8b", {"model_type": None}, "model_type is missing"),
        ("llama-3.1-8b", {"model_type": 3}, "model_type is 3, not a string"),
        ("llama-3.1-8b", {"torch_dtype": None}, "dtype is missing"),
        ("llama-3.1-8b", {"torch_dtype": "int3"}, "dtype int3 is not known"),
        ("llama-3.1-8b", {"kv_cache_dtype": "fp3"}, "kv_cache_dtype fp3 is not known"),
        ("llama-3.1-8b", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ("llama-3.1-8b", {"quantization_config": {"quant_method": "aqlm"}}, "quant_method aqlm is not known"),
        ("llama-3.1-8b", {"quantization_config": "fp8"}, "quantization_config is 'fp8', not an object"),
        ("llama-3.1-8b", {"quantization_config": {"quant_method": "compressed-tensors"}}, "says nothing of weights"),
        ("llama-3.1-8b", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}},
         "quantization_config.weight_block_size.rows is 0"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 24 layers"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "linear_attention is not known"),
        ("gpt-oss-20b", {"layer_types": "sliding"}, "layer_types is 'sliding', not a list"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ("mixtral-8x7b", {"num_local_experts": None}, "num_local_experts is missing"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_understood_names_the_field(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(name, **changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)
