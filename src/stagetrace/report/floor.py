"""The floor of a request, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..floor import Device, Floor, Model, Rates, Request, Row
from ..floor.devices import REFERENCE
from ..floor.room import Room, room_of
from ..floor.rows import document_pass_bytes
from ..floor.work import lm_head, logits_bytes
from .stopwatch import REFERENCE_MS, REFERENCE_TTFT_MS, figure

GIB = 1 << 30
#: The worked example's model: parameters, bytes of them, and bytes that a token adds to the cache. And its request.
_EXAMPLE = (8_030_261_248, 16_060_522_496, 131_072)
_EXAMPLE_PROMPT, _EXAMPLE_OUTPUT = 2000, 300


def floor_view(
    found: Floor, model: Model, device: Device, request: Request, gpus: int, positions: int | None = None
) -> RenderableType:
    """Title, twelve rows, and in words what they are made of; ``positions`` are as many as the config says it has."""
    table = Table(box=None, pad_edge=False)
    for name in ("#", "stage", "FLOP", "bytes", "floor (ms)", "bound by"):
        table.add_column(name, justify="left" if name in ("stage", "bound by") else "right", overflow="fold")
    for row in found.rows:
        table.add_row(*_cells(row))
    table.add_row("", "TTFT", "", "", figure(found.ttft_ms), "")
    table.add_row("", "total", "", "", figure(found.total_ms), "")
    lines = [*_counts(found, model, request), *_memory(found, model, device, request, gpus)]
    length = request.prompt + request.output
    if positions is not None and length > positions:
        lines.append(f"Prompt and output are {length:,} tokens; the config's max_position_embeddings is {positions:,}.")
    lines += _document(model, device) if device == REFERENCE else []
    return Group(Text(_title(model, device, request, gpus), style="bold"), table, *map(Text, lines))


def _title(model: Model, device: Device, r: Request, gpus: int) -> str:
    asked = model.precision.compute
    peak, used = device.peak_tflops(asked), device.computed_in(asked)
    rate = f"{peak:,.5g} TFLOP/s ({used if used == asked else f'{used}: no {asked} peak is known'})"
    many = f"{gpus} × " if gpus > 1 else ""
    batch = f", {r.batch} at a time" if r.batch > 1 else ""
    cached = f" ({r.cached:,} cached)" if r.cached else ""
    return (
        f"{_many(r.prompt, 'prompt token')}{cached}, {_many(r.output, 'output token')}{batch}, on {many}{device.name}: "
        f"{rate}, {device.gb_per_s:,.5g} GB/s"
    )


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _cells(row: Row) -> list[str]:
    known = row.floor_ms is not None
    floor = figure(row.floor_ms) if row.floor_ms is not None else "—"
    return [
        str(row.number), row.key, _flop(row.flop) if known else "—", _size(row.bytes), floor,
        row.bound or "" if known else "host",
    ]  # fmt: skip


def _counts(found: Floor, model: Model, r: Request) -> Iterator[str]:
    prefill, head = (next(row for row in found.rows if row.key == key) for key in ("prefill", "lm_head"))
    active = f", {_flop(found.active_parameters)} of them for a token" if model.experts else ""
    yield (
        f"{model.family}: {_flop(found.parameters)} parameters{active}, {_size(found.weight_bytes)}B of weights; "
        f"ridge at {_many(found.ridge_batch, 'sequence')}: from there on a pass computes longer than it reads weights."
    )
    formula = "2N(P − C) + 4·L·d·P·(P − C)" if r.cached else "2NP + 4·L·d·P²"
    exact = (prefill.flop_exact or 0) + (head.flop_exact or 0)
    yield (
        f"Prefill is {_flop(prefill.flop)}FLOP as {formula}; floors come from the exact count, "
        f"{_flop(exact)}FLOP: no embedding, the head once ({_flop(head.flop_exact)}FLOP), "
        "the causal half of attention."
    )
    written = found.kv_bytes_per_token * (r.prompt - r.cached)
    yield (
        f"KV cache: {found.kv_bytes_per_token / 1024:,.4g} KiB a token, {written / GIB:,.2f} GiB written, "
        f"{_many(found.kv_blocks, 'block')} of {r.block_size}. "
        f"Logits of 8,192 positions would be {logits_bytes(model.vocabulary, 8192) / GIB:.1f} GiB in fp32."
    )
    if model.experts:
        total, chosen = model.experts
        yield (
            f"Of {total} experts a token needs {chosen}: floors assume that all tokens of a pass choose the same. "
            f"A pass that needs every expert reads {_size(model.all_layer_bytes + model.head_bytes)}B, "
            f"not {_size(model.layer_bytes + model.head_bytes)}B."
        )
    yield (
        "host: no published figure says how fast that is, so it has no floor and is in no sum. "
        "Queueing, launches and communication between GPUs are in none either."
    )


def _memory(found: Floor, model: Model, device: Device, r: Request, gpus: int) -> Iterator[str]:
    room = room_of(model, device, r, gpus)
    if room is None:
        return
    memory = f"{_size(room.memory_bytes)}B"
    if not room.requests:
        each = _size(room.request_bytes)
        yield f"Does not fit: {_size(found.weight_bytes)}B of weights and {each}B of cache in {memory}."
        return
    many = f"{room.requests:,} such requests" if room.requests > 1 else "one such request"
    many += ", each with a prefix of its own," if r.cached else ""
    more = f": a batch of {r.batch:,} does not fit" if r.batch > room.requests else ""
    yield f"In {memory}, the weights leave room for the cache of {many} at most{more}."
    yield from _division(model, room, gpus)


def _division(model: Model, room: Room, gpus: int) -> Iterator[str]:
    """What tensor parallelism makes of the bound."""
    a = model.attention
    if a.heads % gpus:
        yield f"That is a bound: {a.heads} attention heads do not divide among {gpus:,} GPUs in tensor parallelism."
    elif room.undivided < room.requests:
        latent = "keeps the latent cache whole on every GPU"
        whole = latent if a.latent else f"keeps each of {a.kv_heads} KV heads whole, on more than one GPU"
        yield (
            f"That is if {gpus:,} GPUs divide the cache among them. Tensor parallelism alone {whole}: "
            f"then {room.undivided:,} at most."
        )


def _document(model: Model, device: Device) -> Iterator[str]:
    """What the worked example's own rates mean; of its figures, those of its own model and request."""
    yield (
        "`reference` is what a worked example reached with an 8B model, no card's peak: 396 TFLOP/s are its 34.2 TFLOP "
        "in 86.4 ms, 2.68 TB/s its 16.06 GB in 6.0 ms."
    )
    if (model.parameters, model.weight_bytes, model.kv_bytes_per_token) != _EXAMPLE:
        return
    rates, passes = Rates.of(device, model), _EXAMPLE_OUTPUT - 1
    contexts = range(_EXAMPLE_PROMPT + 1, _EXAMPLE_PROMPT + _EXAMPLE_OUTPUT)
    whole = sum(document_pass_bytes(model, context) for context in contexts) / rates.bytes * 1e3
    head = rates.ms(lm_head(model)) / REFERENCE_MS["lm_head"]
    short = REFERENCE_MS["prefill"] / (REFERENCE_TTFT_MS + 19 * 6.0)
    yield (
        f"With {_EXAMPLE_PROMPT:,} prompt and {_EXAMPLE_OUTPUT} output tokens, its prefill ran at 335 TFLOP/s by the "
        "exact count. Its decode reads all weights and no cache. With the embedding, of which a pass needs one row, "
        f"and the cache: {figure(whole)} ms for {passes} passes. Its {REFERENCE_MS['lm_head']} ms for the head are "
        f"{head:.1f} times too fast for its own bandwidth."
    )
    yield (
        f"With 20 output tokens its prefill is {short:.0%} of the request ({REFERENCE_MS['prefill']} of "
        f"{REFERENCE_TTFT_MS:.0f} + 19 × 6.0 ms), not three quarters."
    )


def _flop(value: float | None) -> str:
    """``34.2 T``, ``1.05 G``: three figures and a decimal prefix."""
    return _scaled(value, 3)


def _size(value: float | None) -> str:
    """``16.06 G``: four figures."""
    return _scaled(value, 4)


def _scaled(value: float | None, figures: int) -> str:
    if value is None:
        return "—"
    size, prefix = float(value), ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if round(size, 1) < 1000 or prefix == "P":
            break
        size /= 1000
    whole = len(str(int(size)))
    text = f"{size:,.{max(figures - whole, 0)}f}" if prefix else f"{size:g}"
    return f"{text} {prefix}".rstrip()
