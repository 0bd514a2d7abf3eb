"""How many bits a weight and a cached number have, scales included, and what they are multiplied in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .config import ConfigError, Fields

#: Names of number formats, as configs and engines write them.
_DTYPES = {
    "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16", "float32": "fp32",
    "fp32": "fp32", "float": "fp32",
}  # fmt: skip
_BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
#: Parts of a layer that a checkpoint may leave as they were.
PARTS = ("attention", "mlp", "experts")
_MODULES = {"attention": ("self_attn", "attn"), "mlp": ("mlp",), "experts": ("experts",)}


@dataclass(frozen=True)
class Precision:
    """Number formats of a model: ``dtype`` of activations, embedding and norms; ``bits`` of a quantised weight.

    ``compute`` is what quantised matrices are multiplied in. ``plain`` are the parts of a layer that are not quantised,
    ``head`` says whether the head is. ``cache_bits`` is a number in the KV cache.
    """

    dtype: str
    bits: float
    compute: str
    cache_bits: float
    plain: frozenset[str] = frozenset()
    head: bool = False

    @property
    def plain_bits(self) -> int:
        """Bits of a weight that is not quantised."""
        return _BITS[self.dtype]

    def bits_of(self, part: str) -> float:
        """Bits of a weight in a ``part`` of a layer."""
        return self.plain_bits if part in self.plain else self.bits


@dataclass(frozen=True)
class _Scheme:
    """What a quantisation does to a weight."""

    bits: float
    compute: str | None = None
    cache_bits: float | None = None
    only: tuple[str, ...] = PARTS


def precision_of(config: Fields) -> Precision:
    """Read ``dtype``, ``quantization_config`` (or an engine's ``quantization``) and ``kv_cache_dtype``."""
    name = config.text("dtype", "torch_dtype")
    if name is None:
        raise ConfigError(f"{config.name}dtype is missing (torch_dtype in older configs)")
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"{config.name}dtype {name} is not known; known are {', '.join(_DTYPES)}")
    scheme, quantised = _scheme(config)
    plain = PARTS if scheme is None else _left_out(quantised, scheme)
    chosen = scheme or _Scheme(_BITS[dtype])
    return Precision(
        dtype, chosen.bits, chosen.compute or dtype, _cache_bits(config, dtype, chosen.cache_bits), frozenset(plain),
        head=quantised is not None and quantised.values.get("lm_head") is True,
    )  # fmt: skip


def _scheme(config: Fields) -> tuple[_Scheme | None, Fields | None]:
    quantised = config.inner("quantization_config")
    if quantised is None:
        asked = config.text("quantization")
        if asked is None:
            return None, None
        quantised = Fields({"quant_method": asked, "load_in_4bit": True}, f"{config.name}quantization.")
    method = quantised.text("quant_method") or ""
    read = _METHODS.get(method.lower().replace("-", "_").removesuffix("_marlin"))
    if read is None:
        raise ConfigError(f"{quantised.name}quant_method {method or 'null'} is not known; known are {_known()}")
    return read(quantised), quantised


def _known() -> str:
    return ", ".join(sorted(_METHODS))


def _cache_bits(config: Fields, dtype: str, scheme: float | None) -> float:
    """Bits of a cached number: what the engine was told, else what the checkpoint says, else the model's own."""
    asked = (config.text("kv_cache_dtype") or "auto").removeprefix("torch.")
    if asked == "auto":
        return scheme or _BITS[dtype]
    if asked in _DTYPES:
        return _BITS[_DTYPES[asked]]
    if asked.startswith(("fp8", "int8")):
        return 8
    raise ConfigError(
        f"{config.name}kv_cache_dtype {asked} is not known; known are auto, fp8, int8, {', '.join(_DTYPES)}"
    )


def _left_out(quantised: Fields | None, scheme: _Scheme) -> set[str]:
    """Parts no layer of which is quantised. Single layers that are left out count as quantised: a lower bound."""
    out = {part for part in PARTS if part not in scheme.only}
    entries = [e for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
               for e in (quantised.items(key) if quantised else []) if isinstance(e, str)]  # fmt: skip
    for part, modules in _MODULES.items():
        whole = [entry for entry in entries if not any(piece.isdigit() for piece in entry.split("."))]
        if any(entry.strip("*.").split(".")[-1].strip("*.$") in modules for entry in whole):
            out.add(part)
    return out


def _per_group(bits: float, group: int, zero: bool) -> float:
    """Bits of a weight with its share of the 16-bit scale, and zero point, of its group (-1: of its column)."""
    return bits + (16 + (bits if zero else 0)) / group if group > 0 else bits


def _group(q: Fields, default: int = -1) -> int:
    value = q.values.get("group_size")
    return -1 if value == -1 else q.count("group_size", default=default, least=-1)


def _gptq(q: Fields) -> _Scheme:
    return _Scheme(_per_group(q.count("bits", default=4), _group(q), zero=True))


def _awq(q: Fields) -> _Scheme:
    return _Scheme(_per_group(q.count("bits", "w_bit", default=4), _group(q, 128), q.flag("zero_point", True)))


def _fp8(q: Fields) -> _Scheme:
    block = q.items("weight_block_size")
    area = 0
    if block:
        sides = Fields({"rows": block[0], "columns": block[-1]}, f"{q.name}weight_block_size.")
        area = sides.count("rows") * sides.count("columns")
    return _Scheme(8 + (32 / area if area else 0), "fp8")


def _bitsandbytes(q: Fields) -> _Scheme:
    """Blocks of 64 weights with a 32-bit scale, which may itself be 8 bits wide, in blocks of 256."""
    if q.flag("load_in_8bit"):
        return _Scheme(8, "int8")
    return _Scheme(4 + (8 / 64 + 32 / (64 * 256) if q.flag("bnb_4bit_use_double_quant") else 32 / 64))


def _mxfp4(q: Fields) -> _Scheme:
    """Blocks of 32 weights of four bits with an 8-bit scale, in the experts; activations stay as they are."""
    return _Scheme(4 + 8 / 32, only=("experts",))


def _modelopt(q: Fields) -> _Scheme:
    algorithm = (q.text("quant_algo") or q.text("quant_method") or "").upper()
    cache = 8 if (q.text("kv_cache_quant_algo") or "").upper() == "FP8" else None
    if "FP4" in algorithm:
        return _Scheme(4 + 8 / 16, "fp4", cache)
    return _Scheme(8, "fp8", cache)


def _compressed(q: Fields) -> _Scheme:
    """``config_groups``: the first one's weights and input activations."""
    groups = q.inner("config_groups")
    first = groups.inner(next(iter(groups.values))) if groups else None
    weights = first.inner("weights") if first else None
    if first is None or weights is None:
        raise ConfigError(f"{q.name}config_groups says nothing of weights")
    bits = weights.count("num_bits")
    group = _group(weights)
    floating = weights.text("type") == "float"
    if floating and bits == 4:
        scaled = bits + 8 / (group if group > 0 else 16)
    else:
        scaled = _per_group(bits, group, zero=not weights.flag("symmetric", True))
    inputs = first.inner("input_activations")
    cache = q.inner("kv_cache_scheme")
    return _Scheme(
        scaled, f"{'fp' if floating else 'int'}{inputs.count('num_bits')}" if inputs else None,
        cache.count("num_bits") if cache else None,
    )  # fmt: skip


_METHODS: dict[str, Callable[[Fields], _Scheme]] = {
    "gptq": _gptq, "awq": _awq, "fp8": _fp8, "fbgemm_fp8": _fp8, "bitsandbytes": _bitsandbytes, "mxfp4": _mxfp4,
    "modelopt": _modelopt, "modelopt_fp4": _modelopt, "compressed_tensors": _compressed,
}  # fmt: skip
