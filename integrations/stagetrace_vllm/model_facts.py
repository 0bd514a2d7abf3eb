"""How the engine's model is built: fields of its config from an allow-list, for the floors of its stages.

Numbers, truth values, short words, and lists of these: never a path, an argument or a whole config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

#: What sizes follow from, under the names that the models' own configs have.
FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "layer_types",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "experts_per_token",
    "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
    "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "topk_method", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
#: Of a quantised checkpoint; what is nested keeps its place.
QUANTISED = (
    "quant_method", "bits", "w_bit", "group_size", "zero_point", "lm_head", "weight_block_size", "load_in_8bit",
    "load_in_4bit", "bnb_4bit_use_double_quant", "quant_algo", "kv_cache_quant_algo",
)  # fmt: skip
#: Modules that it leaves as they were, where these are whole kinds of them: names without a layer's number.
_LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
_SCHEME = ("num_bits", "type", "group_size", "symmetric")
_WORD, _LIST = 64, 1024
#: A setting is at most 512 bytes long, its name included.
PIECE = 480


def model_facts(config: Any) -> Iterator[tuple[str, str]]:
    """The config of the model that ``config``, the engine's, is about: JSON in numbered pieces."""
    text = json.dumps(model_config(config), separators=(",", ":"))
    for index, at in enumerate(range(0, len(text), PIECE)):
        yield f"model_config.{index}", text[at : at + PIECE]


def model_config(config: Any) -> dict[str, Any]:
    """The allow-listed fields, what the checkpoint's quantisation says, and the formats the engine has chosen."""
    model = config.model_config
    text = model.hf_text_config
    found = {key: value for key in FIELDS if _plain(value := getattr(text, key, None))}
    found["dtype"] = str(model.dtype)
    found["kv_cache_dtype"] = str(config.cache_config.cache_dtype)
    quantised = _mapping(getattr(model.hf_config, "quantization_config", None)) or _mapping(
        getattr(text, "quantization_config", None)
    )
    if quantised:
        found["quantization_config"] = _quantised(quantised)
    elif getattr(model, "quantization", None):
        found["quantization"] = str(model.quantization)[:_WORD]
    return found


def _quantised(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: given[key] for key in QUANTISED if _plain(given.get(key))}
    for key in _LEFT_OUT:
        names = given.get(key)
        if isinstance(names, list):
            words = [name for name in names if isinstance(name, str) and _plain(name)]
            whole = [name for name in words if not any(part.isdigit() for part in name.split("."))]
            found[key] = whole[:20]
    groups = _mapping(given.get("config_groups"))
    if groups:
        first = _mapping(next(iter(groups.values())))
        found["config_groups"] = {"group_0": {
            part: _chosen(first.get(part)) for part in ("weights", "input_activations")
        }}  # fmt: skip
    if given.get("kv_cache_scheme"):
        found["kv_cache_scheme"] = _chosen(given["kv_cache_scheme"])
    return found


def _chosen(scheme: Any) -> dict[str, Any] | None:
    values = _mapping(scheme)
    return {key: values[key] for key in _SCHEME if _plain(values.get(key))} or None


def _mapping(value: Any) -> Mapping[str, Any]:
    """A config's part, which may be a dict or an object that can be made one."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    return value if isinstance(value, Mapping) else {}


def _plain(value: Any) -> bool:
    """Whether a value is of the kind that may leave: a number, a truth value, a word, or a list of these."""
    if isinstance(value, list | tuple):
        return len(value) <= _LIST and all(isinstance(item, str | int) and _plain(item) for item in value)
    if isinstance(value, str):
        return len(value) <= _WORD and "/" not in value
    return isinstance(value, bool | int | float)
