"""A model's shape: how many weights there are, how many a token needs, and what they and the cache weigh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .precision import Precision


@dataclass(frozen=True)
class Attention:
    """What one layer's attention does, apart from its weights.

    ``score`` and ``value`` are the widths of a head's keys and values; ``read_score`` and ``read_value`` those in a
    decode pass, where multi-head latent attention works on the latent vectors themselves. ``cached`` is how many
    numbers a token leaves in the cache, for ``kv_heads`` heads: a latent vector is one.
    """

    heads: int
    score: int
    value: int
    read_score: int
    read_value: int
    cached: int
    kv_heads: int

    @property
    def latent(self) -> bool:
        """Whether it caches latent vectors."""
        return self.read_score != self.score


@dataclass(frozen=True)
class Group:
    """Weights of all layers that are treated alike; ``active`` are those that one token is multiplied with."""

    part: str
    total: int
    active: int
    #: False for what is only added or scaled by: norms and biases.
    matrix: bool = True


@dataclass(frozen=True)
class Model:
    """A decoder. ``windows`` are (positions a layer looks back at, None for all of them; number of such layers)."""

    family: str
    layers: int
    hidden: int
    vocabulary: int
    tied: bool
    attention: Attention
    windows: tuple[tuple[int | None, int], ...]
    groups: tuple[Group, ...]
    precision: Precision
    experts: tuple[int, int] | None = None

    @cached_property
    def embedding_weights(self) -> int:
        """One row a word."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All weights; a head that is the embedding counts once."""
        return self._whole(sum(group.total for group in self.groups))

    @cached_property
    def active_parameters(self) -> int:
        """Those of them that one token needs: of experts the chosen ones. The document's N."""
        return self._whole(sum(group.active for group in self.groups))

    @cached_property
    def weight_bytes(self) -> int:
        """All weights in memory."""
        return round(self._outer_bytes + sum(group.total * self._bits(group) for group in self.groups) / 8)

    @cached_property
    def active_bytes(self) -> int:
        """The weights that one token needs, the whole embedding among them."""
        return round(self._outer_bytes + self.layer_bytes)

    @cached_property
    def layer_bytes(self) -> float:
        """What one pass must read of the layers at least: each weight that a token needs, once."""
        return sum(group.active * self._bits(group) for group in self.groups) / 8

    @cached_property
    def all_layer_bytes(self) -> float:
        """What a pass reads that needs every expert."""
        return sum(group.total * self._bits(group) for group in self.groups) / 8

    @cached_property
    def head_bytes(self) -> float:
        """The head, which may be the embedding read in full."""
        return self.embedding_weights * self._head_bits / 8

    @cached_property
    def row_bytes(self) -> float:
        """One row of the embedding."""
        return self.hidden * self.precision.plain_bits / 8

    @cached_property
    def narrow_weights(self) -> int:
        """Matrix weights of the layers that a token is multiplied with in the quantised format."""
        return sum(g.active for g in self.groups if g.matrix and g.part not in self._plain)

    @cached_property
    def wide_weights(self) -> int:
        """The others: 16 bits, or 32."""
        return sum(g.active for g in self.groups if g.matrix and g.part in self._plain)

    @cached_property
    def pass_bytes(self) -> float:
        """The weights of layers and head, which a decode pass reads once."""
        return self.layer_bytes + self.head_bytes

    @cached_property
    def read_flop(self) -> int:
        """What a layer of a decode pass computes for one (query, key) pair."""
        return 2 * self.attention.heads * (self.attention.read_score + self.attention.read_value)

    @cached_property
    def cache_bytes(self) -> float:
        """What one token adds to the KV cache in one layer."""
        return self.attention.cached * self.precision.cache_bits / 8

    @property
    def kv_bytes_per_token(self) -> int:
        """What one token adds to the KV cache."""
        return round(self.cache_bytes * self.layers)

    @property
    def _plain(self) -> frozenset[str]:
        return self.precision.plain | {"router", "other"}

    @property
    def _head_bits(self) -> float:
        return self.precision.bits if self.precision.head and not self.tied else self.precision.plain_bits

    @property
    def _outer_bytes(self) -> float:
        """Embedding, head and final norm."""
        return (self.hidden + self.embedding_weights) * self.precision.plain_bits / 8 + (
            0 if self.tied else self.head_bytes
        )

    def _whole(self, layers: int) -> int:
        return layers + self.embedding_weights * (1 if self.tied else 2) + self.hidden

    def _bits(self, group: Group) -> float:
        return self.precision.plain_bits if group.part in self._plain else self.precision.bits_of(group.part)
