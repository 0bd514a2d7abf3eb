"""The twelve rows of ``stagetrace floor``: what a request's stages cost at least, by the document and exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..stages import STAGES
from .devices import Device
from .model import Model
from .work import NOTHING, Rates, Work, decode_pass, embedding, lm_head, prefill, sample

SCHEMA = 1
#: Why a stage has no floor.
_HOST = "runs on the host: its speed is no published figure"
_BOOKS = "the scheduler's bookkeeping: blocks are set aside, and written in stage 7"


@dataclass(frozen=True)
class Request:
    """Lengths in tokens. ``cached`` are those of the prompt that the prefix cache has; ``batch`` such requests decode
    together, each of which has its own prefill and first token.
    """

    prompt: int
    output: int
    cached: int = 0
    batch: int = 1
    block_size: int = 16


@dataclass(frozen=True)
class Row:
    """A stage. ``flop`` and ``bytes`` follow the document's formulas, the exact ones are what the floor is made of."""

    number: int
    key: str
    flop: int | None = None
    bytes: int | None = None
    floor_ms: float | None = None
    flop_exact: int | None = None
    bytes_exact: int | None = None
    bound: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class Floor:
    """All rows, and what goes with them. Sums are over the stages that have a floor."""

    rows: tuple[Row, ...]
    total_ms: float
    ttft_ms: float
    kv_bytes_per_token: int
    kv_blocks: int
    ridge_batch: int
    weight_bytes: int
    parameters: int
    active_parameters: int

    def to_json(self) -> dict[str, Any]:
        """The document of ``floor --json``."""
        found = asdict(self)
        return {"schema": SCHEMA, "stages": list(found.pop("rows")), **found}


def floor_of(model: Model, device: Device, request: Request, gpus: int = 1) -> Floor:
    """What ``request`` costs at least on ``gpus`` of ``device`` that share every pass."""
    rates = Rates.of(device, model, gpus)
    rows = tuple(_row(stage.number, stage.key, model, rates, request) for stage in STAGES)
    return Floor(
        rows,
        total_ms=sum(row.floor_ms or 0.0 for row in rows),
        ttft_ms=sum(row.floor_ms or 0.0 for row in rows if row.number <= 10),
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_blocks=-(-request.prompt // request.block_size),
        ridge_batch=ridge(model, rates),
        weight_bytes=model.weight_bytes,
        parameters=model.parameters,
        active_parameters=model.active_parameters,
    )


def ridge(model: Model, rates: Rates) -> int:
    """So many sequences in a pass take as long to compute as all the weights do to read; cache left out."""
    reading = (model.all_layer_bytes + model.head_bytes) / rates.bytes
    head = lm_head(model)
    token = Work(2 * model.narrow_weights, 2 * model.wide_weights, 0)
    computing = (token.narrow + head.narrow) / rates.narrow + (token.wide + head.wide) / rates.wide
    return max(round(reading / computing), 1)


def document_prefill_flop(model: Model, tokens: int, cached: int = 0) -> int:
    """2NP + 4·L·d·P²: every weight for every position, and every position looks at the whole prompt."""
    a = model.attention
    square = 2 * a.heads * (a.score + a.value) * model.layers * tokens * (tokens + cached)
    return 2 * model.active_parameters * tokens + square


def document_pass_bytes(model: Model, context: int, batch: int = 1) -> int:
    """The weights, the embedding among them, and the cache: what the document has a decode pass read."""
    return model.active_bytes + model.kv_bytes_per_token * context * batch


def _row(number: int, key: str, model: Model, rates: Rates, r: Request) -> Row:
    new = r.prompt - r.cached
    written = model.kv_bytes_per_token * new
    if key == "kv_allocate":
        return Row(number, key, bytes=written, why=_BOOKS)
    if key == "embedding":
        return _made(number, key, rates, embedding(model, new))
    if key == "prefill":
        document = document_prefill_flop(model, new, r.cached), document_pass_bytes(model, r.prompt)
        return _made(number, key, rates, prefill(model, new, r.cached), document)
    if key == "lm_head":
        return _made(number, key, rates, lm_head(model))
    if key == "sample":
        return _made(number, key, rates, sample(model))
    if key == "decode":
        return _decode(number, key, model, rates, r)
    return Row(number, key, why=_HOST)


def _made(number: int, key: str, rates: Rates, work: Work, document: tuple[int, int] | None = None) -> Row:
    exact = round(work.flop), round(work.bytes)
    flop, size = document or exact
    return Row(number, key, flop, size, rates.ms(work), *exact, rates.bound(work))


def _decode(number: int, key: str, model: Model, rates: Rates, r: Request) -> Row:
    """Each pass by itself; whoever else is in the batch has the same lengths, and shares nothing but the weights."""
    total, took, size = NOTHING, 0.0, 0
    mates = r.batch - 1
    for context in range(r.prompt + 1, r.prompt + r.output):
        alone = decode_pass(model, context)
        share = Work(alone.narrow, alone.wide, alone.bytes - model.layer_bytes - model.head_bytes)
        work = Work(*(getattr(alone, f) + mates * getattr(share, f) for f in ("narrow", "wide", "bytes")))
        total, took = total + work, took + rates.ms(work)
        size += document_pass_bytes(model, context, r.batch)
    return Row(
        number, key, round(total.flop), size, took, round(total.flop), round(total.bytes),
        rates.bound(total) if took else None, None if took else "one token is all: nothing is decoded",
    )  # fmt: skip
