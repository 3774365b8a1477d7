"""Groups of layers with the same shape and window, and how they share blocks of one size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_bool, as_int, shown

# A step's metadata and the look-up of a prefix grow with the number of tables; Gemma 3 27B has 7.
_MAX_TABLES = 16
# Positions behind a sliding window that are kept, so that rejected speculation can be rolled back.
ROLLBACK_SLACK = 64


@dataclass(frozen=True)
class CacheGroup:
    """Layers of one shape and window; in `PagedKvCacheConfig.tables`, the layers of one block table.

    Attributes:
        layers: indices of the model's layers. A layer that reads another layer's K/V is in no group.
        num_kv_heads, head_dim: None takes the cache's.
        v_head_dim: head size of the values; None takes head_dim.
        sliding_window: number of tokens that a token sees, itself included; None for all.
        latent: whether a value is the first v_head_dim elements of its key (latent attention), stored once.

    Raises:
        InvalidInputError: layers are empty, repeated or not indices, a size is not a positive integer, or latent is no
            bool.
    """

    layers: tuple[int, ...]
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int | None = None
    latent: bool = False

    def __post_init__(self) -> None:
        try:
            given = list(self.layers)
        except TypeError:
            raise InvalidInputError(f"layers: {shown(self.layers)}, expected layer indices") from None
        layers = tuple(as_int("layers", layer) for layer in given)
        if not layers or len(set(layers)) != len(layers):
            raise InvalidInputError(f"layers: {shown(layers)}, expected one or more distinct layers")
        object.__setattr__(self, "layers", layers)
        for name in ("num_kv_heads", "head_dim", "v_head_dim", "sliding_window"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_int(name, getattr(self, name), low=1))
        object.__setattr__(self, "latent", as_bool("latent", self.latent))

    def with_defaults(self, num_kv_heads: int, head_dim: int) -> CacheGroup:
        """Return a copy with every size set.

        Raises:
            InvalidInputError: the values of a latent group are wider than its keys.
        """
        head_dim = self.head_dim or head_dim
        v_head_dim = self.v_head_dim or head_dim
        if self.latent and v_head_dim > head_dim:
            raise InvalidInputError(f"v_head_dim: {v_head_dim}, expected at most head_dim {head_dim} of latents")
        return replace(self, num_kv_heads=self.num_kv_heads or num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of a token's key and, unless it is in the key, of its value in one layer; every size must be set."""
        assert self.num_kv_heads is not None
        assert self.head_dim is not None
        assert self.v_head_dim is not None
        key, value = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim
        return (key,) if self.latent else (key, value)

    def num_slots(self, width: int, num_layers: int) -> int:
        """Return the slots of `width` elements for keys and values of `num_layers`; small layers share a slot."""
        return sum(-(-num_layers // (width // one)) for one in self.sizes)

    def first_seen_block(self, num_tokens: int, block_size: int) -> int:
        """Return the index of the first block that the token after `num_tokens` can see."""
        return 0 if self.sliding_window is None else max(0, num_tokens - self.sliding_window + 1) // block_size

    @property
    def reach(self) -> int:
        """Number of tokens that a group with a window keeps behind a sequence's end, to allow rollbacks."""
        return ROLLBACK_SLACK + (self.sliding_window or 0) - 1

    def blocks_kept(self, num_tokens: int, block_size: int, *, num_new: int = 0) -> int:
        """Return the blocks that `num_tokens` hold after those behind the window are freed, and `num_new` more take."""
        return -(-(num_tokens + num_new) // block_size) - self.blocks_gone(num_tokens, block_size)

    def blocks_gone(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks `num_tokens` have freed behind the window."""
        return 0 if self.sliding_window is None else max(0, num_tokens - self.reach) // block_size

    def most_blocks_kept(self, num_tokens: int, block_size: int) -> int:
        """Return the most blocks that a sequence holds until it has `num_tokens`, if they are written one by one."""
        num_blocks = -(-num_tokens // block_size)
        if self.sliding_window is None:
            return num_blocks
        # While the first token of a block is written, the table holds that block and those that `reach` tokens touch.
        return min(num_blocks, 1 + -(-self.reach // block_size))


def split_evenly(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Split groups into the layers of each block table, so that blocks of all tables hold about the same amount.

    Groups of one kind are joined, then cut into equal parts. A block holds all layers of one kind, chosen to waste the
    least memory. Tables without a window come first, then those with the largest windows.
    """
    kinds: dict[CacheGroup, list[int]] = {}
    for group in groups:
        kinds.setdefault(replace(group, layers=(0,)), []).extend(group.layers)

    width = max(max(kind.sizes) for kind in kinds)

    def counts(num_slots: int) -> list[int]:
        """Return the tables of each kind if a block has this many slots."""
        most = [
            bisect_right(range(1, len(layers) + 1), num_slots, key=partial(kind.num_slots, width))
            for kind, layers in kinds.items()
        ]
        return [-(-len(layers) // fitting) for layers, fitting in zip(kinds.values(), most, strict=True)]

    least = max(kind.num_slots(width, 1) for kind in kinds)
    sizes = sorted({max(least, kind.num_slots(width, len(layers))) for kind, layers in kinds.items()}, reverse=True)
    few = [num_slots for num_slots in sizes if sum(counts(num_slots)) <= _MAX_TABLES]
    num_slots = min(few or sizes[:1], key=lambda num_slots: num_slots * sum(counts(num_slots)))
    tables = []
    for (kind, layers), count in zip(kinds.items(), counts(num_slots), strict=True):
        layers.sort()
        length = -(-len(layers) // count)
        parts = [tuple(layers[start : start + length]) for start in range(0, len(layers), length)]
        tables += [replace(kind, layers=part) for part in parts]
    return tuple(sorted(tables, key=lambda table: (table.sliding_window is not None, -(table.sliding_window or 0))))
