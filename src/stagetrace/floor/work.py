"""FLOP and bytes that the device stages cannot do without, and the time a device needs for them at least.

Exact counts: no FLOP in the embedding, the head for the positions it is applied to, attention over the positions that
there really are. Every weight that a pass needs is read once, whatever the batch; cached keys and values are read for
each request. What a device might keep to itself (activations, a prompt's own keys) is not counted, so nothing can be
faster than this.
"""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Device
from .model import Model

#: Logits are 32 bits wide when a token is drawn from them.
LOGIT_BYTES = 4


@dataclass(frozen=True)
class Work:
    """``narrow`` FLOP in the format of quantised weights, ``wide`` ones in the model's own, and bytes moved."""

    narrow: float
    wide: float
    bytes: float

    @property
    def flop(self) -> float:
        return self.narrow + self.wide

    def __add__(self, other: Work) -> Work:
        return Work(self.narrow + other.narrow, self.wide + other.wide, self.bytes + other.bytes)


NOTHING = Work(0, 0, 0)


@dataclass(frozen=True)
class Rates:
    """What ``gpus`` devices that share every pass do at most; FLOP/s and bytes/s."""

    narrow: float
    wide: float
    bytes: float

    @classmethod
    def of(cls, device: Device, model: Model, gpus: int = 1) -> Rates:
        peak = device.peak_tflops
        narrow, wide = peak(model.precision.compute), peak(model.precision.dtype)
        return cls(narrow * gpus * 1e12, wide * gpus * 1e12, device.gb_per_s * gpus * 1e9)

    def ms(self, work: Work) -> float:
        """The larger of the time to compute and the time to move, ms."""
        return max(self._computing(work), work.bytes / self.bytes) * 1e3

    def bound(self, work: Work) -> str:
        """Which of the two it is."""
        return "compute" if self._computing(work) > work.bytes / self.bytes else "memory"

    def _computing(self, work: Work) -> float:
        return work.narrow / self.narrow + work.wide / self.wide


def attended(start: int, stop: int, window: int | None = None) -> int:
    """How many (query, key) pairs positions ``start`` up to ``stop`` make: each sees itself and those before it."""
    if window is None or stop <= window:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    if start >= window:
        return (stop - start) * window
    return attended(start, window) + (stop - window) * window


def embedding(model: Model, rows: int) -> Work:
    """``rows`` gathered: no arithmetic."""
    return Work(0, 0, rows * model.row_bytes)


def prefill(model: Model, tokens: int, cached: int = 0, mates: int = 0) -> Work:
    """One forward of ``tokens`` prompt positions behind ``cached`` ones; ``mates`` are others' tokens in it."""
    a = model.attention
    pairs = sum(layers * attended(cached, cached + tokens, window) for window, layers in model.windows)
    return _layers(model, tokens + mates, 2 * a.heads * (a.score + a.value) * pairs) + _cache(model, cached, tokens)


def decode_pass(model: Model, context: int, tokens: int = 1, mates: int = 0, sequences: int = 1) -> Work:
    """One pass of the decode loop: embedding, layers, head and sampler.

    A request computes its last ``tokens`` of the ``context`` positions it then has (more than one where drafts are
    verified); ``mates`` are others' tokens in the pass, and ``sequences`` draw from it, this one included.
    """
    # This runs once a token of every request that is recorded: one sum instead of one for each part.
    before, total = context - tokens, tokens + mates
    pairs = seen = 0
    for window, layers in model.windows:
        pairs += layers * attended(before, context, window)
        seen += layers * (before if window is None or before < window else window - 1)
    return Work(
        2 * model.narrow_weights * total,
        2 * model.wide_weights * total + model.read_flop * pairs + 2 * model.embedding_weights * sequences,
        model.pass_bytes + model.cache_bytes * (seen + tokens * model.layers) + model.row_bytes * total
        + LOGIT_BYTES * model.vocabulary * sequences,
    )  # fmt: skip


def lm_head(model: Model, positions: int = 1) -> Work:
    """The head for so many positions, its weights read once."""
    return Work(0, 2 * model.embedding_weights * positions, model.head_bytes)


def sample(model: Model, positions: int = 1) -> Work:
    """The logits of so many positions, read once."""
    return Work(0, 0, logits_bytes(model.vocabulary, positions))


def logits_bytes(vocabulary: int, positions: int) -> int:
    """What the logits of so many positions take up."""
    return vocabulary * positions * LOGIT_BYTES


def _layers(model: Model, tokens: int, attention: float) -> Work:
    narrow, wide = 2 * model.narrow_weights * tokens, 2 * model.wide_weights * tokens
    return Work(narrow, wide + attention, model.layer_bytes)


def _cache(model: Model, read: int, written: int) -> Work:
    """Of the positions in the cache, a layer reads those it looks back at: a window holds the new one, too."""
    seen = sum(layers * (read if window is None else min(read, window - 1)) for window, layers in model.windows)
    return Work(0, 0, model.cache_bytes * (seen + written * model.layers))
