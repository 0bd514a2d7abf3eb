"""From a config to a :class:`Model`: what the known architectures are made of.

A family is what its ``model_type`` implies and the config does not say. Counted are the language model's weights
only: no vision or audio tower, and none of the layers that a checkpoint carries for speculative decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import ConfigError, Fields, language_part
from .model import Attention, Group, Model
from .precision import precision_of

MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Family:
    """``norms`` are vectors of the hidden width in a layer, ``qk_norm`` those on queries and keys: by head, or whole.

    ``window`` says which layers look back at ``sliding_window`` positions only, where no ``layer_types`` says so:
    all, every other one, all but every sixth, or if asked for, those from ``max_window_layers`` on.
    """

    norms: int = 2
    qkv_bias: bool = False
    qk_norm: str | None = None
    tied: bool = False
    window: str = "none"
    experts: str | None = None
    latent: bool = False
    sinks: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)


_LLAMA = Family()
_WINDOWED = Family(window="all")
_QWEN2 = Family(qkv_bias=True, window="late")
_QWEN3 = Family(qk_norm="head", window="late")
_QWEN3_MOE = Family(qk_norm="head", window="late", experts="qwen")
_GEMMA2 = Family(norms=4, tied=True, window="other")
_GEMMA3 = Family(
    norms=4, tied=True, window="five_of_six", qk_norm="head",
    # Published configs leave out what the class has as its default.
    defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208},
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA, "mistral": _WINDOWED, "phi3": _WINDOWED, "granite": _LLAMA, "smollm3": _LLAMA,
    "olmo2": Family(qk_norm="whole"), "gemma": Family(tied=True), "gemma2": _GEMMA2, "gemma3_text": _GEMMA3,
    "qwen2": _QWEN2, "qwen2_vl": _QWEN2, "qwen2_vl_text": _QWEN2, "qwen2_5_vl": _QWEN2, "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3, "qwen3_vl_text": _QWEN3, "qwen3_moe": _QWEN3_MOE, "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen2_moe": Family(qkv_bias=True, window="late", experts="qwen"),
    "mixtral": Family(window="all", experts="mixtral"),
    "gpt_oss": Family(window="other", experts="gpt_oss", sinks=True),
    "deepseek_v2": Family(experts="deepseek", latent=True), "deepseek_v3": Family(experts="deepseek", latent=True),
    "kimi_k2": Family(experts="deepseek", latent=True),
}  # fmt: skip


def model_of(config: Mapping[str, Any]) -> Model:
    """The model that ``config`` describes; ConfigError names the field that is missing, or not understood."""
    part = language_part(config)
    kind = Fields(part).text("model_type")
    if kind is None:
        raise ConfigError("model_type is missing")
    family = FAMILIES.get(kind)
    if family is None:
        raise ConfigError(f"model_type {kind} is not known; known are {', '.join(sorted(FAMILIES))}")
    c = Fields({**family.defaults, **{key: value for key, value in part.items() if value is not None}})
    layers = c.count("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    hidden = c.count("hidden_size")
    sparse = _sparse_layers(c, family, layers)
    attention, weights, vectors = _latent(c) if family.latent else _grouped(c, family)
    mlp, experts = _feed_forward(c, family, layers, sparse)
    other = layers * (vectors + family.norms * hidden)
    groups = [
        Group("attention", layers * weights, layers * weights),
        *mlp,
        *experts,
        Group("other", other, other, False),
    ]
    routed = _routing(c) if sparse else None
    return Model(
        kind, layers, hidden, c.count("vocab_size"), c.flag("tie_word_embeddings", family.tied), attention,
        _windows(c, family, layers), tuple(g for g in groups if g.total), precision_of(c), routed,
    )  # fmt: skip


def _grouped(c: Fields, family: Family) -> tuple[Attention, int, int]:
    """Multi-head, grouped-query or multi-query attention of a layer: its matrices' weights, and its vectors'."""
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    kv_heads = c.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if c.values.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and no head_dim")
    width = c.count("head_dim", default=hidden // heads)
    queries, keys = heads * width, kv_heads * width
    vectors = 0
    if family.qkv_bias or c.flag("attention_bias"):
        vectors += queries + 2 * keys
    if c.flag("attention_bias") and not family.qkv_bias:
        vectors += hidden  # the output projection's, too
    vectors += {None: 0, "head": 2 * width, "whole": queries + keys}[family.qk_norm]
    vectors += heads if family.sinks else 0
    return Attention(heads, width, width, width, width, 2 * keys, kv_heads), 2 * hidden * (queries + keys), vectors


def _latent(c: Fields) -> tuple[Attention, int, int]:
    """Multi-head latent attention: what is cached is one latent vector and one rotary key, for all heads."""
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    rank, rotary = c.count("kv_lora_rank"), c.count("qk_rope_head_dim")
    plain, value = c.count("qk_nope_head_dim"), c.count("v_head_dim")
    compressed = c.optional("q_lora_rank")
    queries = heads * (plain + rotary)
    weights = hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
    weights += compressed * (hidden + queries) if compressed else hidden * queries
    attention = Attention(heads, plain + rotary, value, rank + rotary, rank, rank + rotary, 1)
    return attention, weights, rank + (compressed or 0)


def _feed_forward(c: Fields, family: Family, layers: int, sparse: int) -> tuple[list[Group], list[Group]]:
    """Dense and shared weights, and those of experts, over all layers."""
    hidden, dense = c.count("hidden_size"), layers - sparse
    groups: list[Group] = []
    if dense:
        width = c.count("intermediate_size")
        count = dense * 3 * hidden * width
        groups.append(Group("mlp", count, count))
        bias = dense * (2 * width + hidden) if c.flag("mlp_bias") else 0
        groups.append(Group("other", bias, bias, False))
    if not sparse:
        return groups, []
    total, active = _routing(c)
    width = c.count("moe_intermediate_size", "intermediate_size")
    shared = sparse * 3 * hidden * _shared_width(c, family, width)
    router = sparse * (hidden * total + (hidden if family.experts == "qwen" and shared else 0))
    bias = 2 * width + hidden if family.experts == "gpt_oss" else 0
    router_bias = total if family.experts == "gpt_oss" or c.text("topk_method") == "noaux_tc" else 0
    each = 3 * hidden * width
    groups.append(Group("mlp", shared, shared))
    return groups, [
        Group("router", router, router),
        Group("experts", sparse * total * each, sparse * active * each),
        Group("other", sparse * (total * bias + router_bias), sparse * (active * bias + router_bias), False),
    ]


def _routing(c: Fields) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token goes to."""
    total = c.count("num_local_experts", "n_routed_experts", "num_experts")
    active = c.count("num_experts_per_tok", "experts_per_token")
    if active > total:
        raise ConfigError(f"num_experts_per_tok {active} of {total} experts")
    return total, active


def _shared_width(c: Fields, family: Family, width: int) -> int:
    """The width of what every token goes through beside its experts."""
    if family.experts == "deepseek":
        return width * (c.optional("n_shared_experts") or 0)
    return c.optional("shared_expert_intermediate_size") or 0 if family.experts == "qwen" else 0


def _sparse_layers(c: Fields, family: Family, layers: int) -> int:
    """How many layers have experts."""
    if family.experts in ("mixtral", "gpt_oss"):
        return layers
    if family.experts == "qwen":
        step, dense = c.count("decoder_sparse_step", default=1), c.items("mlp_only_layers")
        return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    if family.experts == "deepseek" and c.optional("n_routed_experts"):
        first, step = c.count("first_k_dense_replace", default=0, least=0), c.count("moe_layer_freq", default=1)
        return sum(1 for layer in range(layers) if layer >= first and layer % step == 0)
    return 0


def _windows(c: Fields, family: Family, layers: int) -> tuple[tuple[int | None, int], ...]:
    """How far back layers look: (positions, or None for all of them; how many layers)."""
    window = c.optional("sliding_window")
    if window is None or not c.flag("use_sliding_window", family.window not in ("none", "late")):
        return ((None, layers),)
    counted = Counter(window if slides else None for slides in _sliding(c, family, layers))
    return tuple(sorted(counted.items(), key=lambda item: item[0] or 0))


def _sliding(c: Fields, family: Family, layers: int) -> list[bool]:
    """Of each layer, whether it looks back at a window only."""
    kinds = c.items("layer_types")
    if kinds:
        if len(kinds) != layers:
            raise ConfigError(f"layer_types has {len(kinds)} entries for {layers} layers")
        unknown = {str(kind) for kind in kinds} - {"sliding_attention", "full_attention"}
        if unknown:
            raise ConfigError(f"layer_types: {min(unknown)} is not known; known are full_attention, sliding_attention")
        return [kind == "sliding_attention" for kind in kinds]
    if family.window == "five_of_six":
        pattern = c.count("sliding_window_pattern", default=6)
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    if family.window == "late":
        first = c.count("max_window_layers", default=0, least=0)
        return [layer >= first for layer in range(layers)]
    return [family.window == "all" or layer % 2 == 0 for layer in range(layers)]
