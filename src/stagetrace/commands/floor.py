"""``stagetrace floor``: what a request's stages could cost at least, from a model's config and a device's rates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..faults import Fault

if TYPE_CHECKING:
    from ..floor import Device, Model

Config = Annotated[Path, typer.Option("--model", metavar="CONFIG", help="A config.json, or the directory with it.")]
Gpu = Annotated[str, typer.Option(metavar="NAME", help="A device, such as H100, or `reference`.")]
Prompt = Annotated[int, typer.Option(metavar="N", min=1, max=100_000_000, help="Prompt tokens.")]
Output = Annotated[int, typer.Option(metavar="N", min=1, max=200_000, help="Output tokens.")]
Cached = Annotated[int, typer.Option(metavar="N", min=0, help="Prompt tokens that the prefix cache has.")]
Batch = Annotated[int, typer.Option(metavar="N", min=1, max=1_000_000, help="So many such requests decode together.")]
Gpus = Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="GPUs that share every pass.")]
Block = Annotated[int, typer.Option(metavar="N", min=1, max=1_000_000, help="Tokens in a KV block.")]
Dtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Instead of the config's: bf16, fp16 or fp32.")]
Quantization = Annotated[str | None, typer.Option(metavar="NAME", help="Weights quantised when loaded, such as fp8.")]
KvDtype = Annotated[str | None, typer.Option(metavar="DTYPE", help="Numbers in the KV cache, such as fp8.")]
Tflops = Annotated[float | None, typer.Option(metavar="X", min=1e-6, max=1e12, help="The device's peak, TFLOP/s.")]
Bandwidth = Annotated[
    float | None, typer.Option("--bandwidth-gb-s", metavar="X", min=1e-6, max=1e12, help="Its memory's, GB/s.")
]
Memory = Annotated[float | None, typer.Option("--memory-gb", metavar="X", min=1e-6, max=1e12, help="Its memory, GB.")]
#: Fields of a config that options stand for.
_OPTIONS = {"dtype": "--dtype", "quantization": "--quantization", "kv_cache_dtype": "--kv-dtype"}


def floor(
    model: Config,
    gpu: Gpu,
    prompt: Prompt = 2000,
    output: Output = 300,
    cached: Cached = 0,
    batch: Batch = 1,
    gpus: Gpus = 1,
    block_size: Block = 16,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_dtype: KvDtype = None,
    tflops: Tflops = None,
    bandwidth_gb_s: Bandwidth = None,
    memory_gb: Memory = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """What each of the twelve stages could cost at least on given hardware. Needs no engine and no GPU."""
    from ..floor import Request, floor_of
    from ..floor.room import room_of

    if cached >= prompt:
        raise Fault(f"--cached {cached}: less than --prompt {prompt}; the last position is always computed")
    device = _device(gpu, tflops, bandwidth_gb_s, memory_gb)
    asked = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_dtype}
    shape, positions = _model(model, {key: value.lower() for key, value in asked.items() if value})
    request = Request(prompt, output, cached, batch, block_size)
    found = floor_of(shape, device, request, gpus)
    if as_json:
        more: dict[str, Any] = {"model": shape.family, "device": _rates(device, shape, gpus)}
        room = room_of(shape, device, request, gpus)
        more["requests_that_fit"] = room and room.requests
        typer.echo(json.dumps(found.to_json() | more, allow_nan=False))
        return
    from rich.console import Console

    from ..report.floor import floor_view

    Console().print(floor_view(found, shape, device, request, gpus, positions), highlight=False)


def _model(path: Path, asked: dict[str, str]) -> tuple[Model, int | None]:
    """The model at ``path`` with what was ``asked`` for instead of what its config says, and its positions."""
    from ..floor import ConfigError, model_of, read_config
    from ..floor.config import language_part

    if asked.get("dtype") == "auto":
        del asked["dtype"]
    try:
        config = language_part(read_config(path))
    except ConfigError as error:
        raise Fault(f"--model {error}") from None
    if "quantization" in asked and config.get("quantization_config"):
        raise Fault(f"--quantization {asked['quantization']}: {path} is quantised already")
    try:
        found = model_of(config | asked)
        plain = model_of(config | {key: value for key, value in asked.items() if key != "quantization"})
    except ConfigError as error:
        raise Fault(_by_option(str(error), asked) or f"--model {path}: {error}") from None
    if "quantization" in asked and found.weight_bytes == plain.weight_bytes:
        raise Fault(f"--quantization {asked['quantization']}: quantises experts only, and {path} has none")
    positions = config.get("max_position_embeddings")
    return found, positions if isinstance(positions, int) else None


def _by_option(error: str, asked: dict[str, str]) -> str | None:
    """A config's ``error`` by the option that the field was given with; None where it is the config's own."""
    field, _, said = error.partition(" ")
    field = field.partition(".")[0]
    return f"{_OPTIONS[field]} {said}" if field in asked else None


def _rates(device: Device, model: Model, gpus: int) -> dict[str, Any]:
    """One device's figures, as they were used; ``format`` is what the peak is of."""
    form = model.precision.compute
    return {
        "name": device.name, "gpus": gpus, "tflop_per_s": device.peak_tflops(form), "format": device.computed_in(form),
        "gb_per_s": device.gb_per_s, "memory_gb": device.memory_gb,
    }  # fmt: skip


def _device(name: str, tflops: float | None, gb_per_s: float | None, memory_gb: float | None) -> Device:
    """The row of ``name`` with what was given instead; a new device where both rates were."""
    from ..floor import DEVICES, Device, find_device
    from ..floor.devices import FORMATS

    found = find_device(name)
    if found is None and (tflops is None or gb_per_s is None):
        known = [device.name for device in DEVICES]
        raise Fault(
            f"--gpu {name}: not in the table{_meant(name, known)} ({', '.join(known)}); "
            "give --tflops and --bandwidth-gb-s, or one of these"
        )
    device = found or Device(name, {}, 0.0)
    return replace(
        device,
        tflops=dict.fromkeys(FORMATS, tflops) if tflops is not None else device.tflops,
        gb_per_s=gb_per_s if gb_per_s is not None else device.gb_per_s,
        memory_gb=memory_gb if memory_gb is not None else device.memory_gb,
    )


def _meant(name: str, known: list[str]) -> str:
    """Which of the ``known`` names may be meant: those that begin so, else what looks alike."""
    from difflib import get_close_matches

    plain = {device.casefold(): device for device in known}
    wanted = name.casefold()
    near = [key for key in plain if wanted and key.startswith(wanted)] or get_close_matches(wanted, plain)
    return f"; did you mean {' or '.join(plain[key] for key in near[:3])}?" if near else ""
