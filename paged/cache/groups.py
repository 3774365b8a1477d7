"""What the layers keep: groups of layers with the same shape and window that share blocks of one size, and the shape of
the states of recurrent layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_bool, as_int, shown

if TYPE_CHECKING:
    import torch

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
            indices = list(self.layers)
        except TypeError:
            raise InvalidInputError(f"layers: {shown(self.layers)}, expected layer indices") from None
        layers = tuple(as_int("layers", layer) for layer in indices)
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
        if self.latent:
            return (key,)
        return key, value

    def num_slots(self, width: int, num_layers: int) -> int:
        """Return the slots of `width` elements for keys and values of `num_layers`; small layers share a slot."""
        return sum(-(-num_layers // (width // size)) for size in self.sizes)

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

    Groups of one kind are joined, then cut into equal parts. The size of a block is chosen to waste the least memory.
    With windows, a block holds all layers of one kind: long sequences fill tables without a window, which must not be
    the ones with waste. Tables without a window come first, then those with the largest windows.
    """
    kinds: dict[CacheGroup, list[int]] = {}
    for group in groups:
        kinds.setdefault(replace(group, layers=(0,)), []).extend(group.layers)

    width = max(max(kind.sizes) for kind in kinds)

    def counts(num_slots: int) -> list[int]:
        """Return the tables of each kind if a block has this many slots."""
        num_tables: list[int] = []
        for kind, layers in kinds.items():
            num_fitting = bisect_right(range(1, len(layers) + 1), num_slots, key=partial(kind.num_slots, width))
            num_tables.append(-(-len(layers) // num_fitting))
        return num_tables

    least = max(kind.num_slots(width, 1) for kind in kinds)
    of_kinds = {kind.num_slots(width, len(layers)) for kind, layers in kinds.items()}
    sizes = sorted({max(least, num_slots) for num_slots in of_kinds}, reverse=True)
    if len(kinds) > 1 and all(kind.sliding_window is None for kind in kinds):
        sizes = list(range(sizes[0], least - 1, -1))  # GLM-5.2, with 78 and 21 layers: 84 slots a token, not 156
    few = [num_slots for num_slots in sizes if sum(counts(num_slots)) <= _MAX_TABLES]
    num_slots = min(few or sizes[:1], key=lambda num_slots: num_slots * sum(counts(num_slots)))
    tables: list[CacheGroup] = []
    for (kind, layers), count in zip(kinds.items(), counts(num_slots), strict=True):
        layers.sort()
        length = -(-len(layers) // count)
        for start in range(0, len(layers), length):
            tables.append(replace(kind, layers=tuple(layers[start : start + length])))
    return tuple(sorted(tables, key=lambda table: (table.sliding_window is not None, -(table.sliding_window or 0))))


# Tokens of a ring by default. A ring of 16 is written back every 16 decode steps; see ReplaySSM (Dao AI Lab, 2026).
DEFAULT_RING = 16
# Tokens that a decoding sequence may run in a step by default: the newest one and 7 drafts.
DEFAULT_APPEND = 8
_MOST = (1 << 31) - 2


@dataclass(frozen=True)
class RecurrentSpec:
    """States of all recurrent layers; all have the same shape.

    A slot holds them for one sequence: the state S of every layer at a base position, the rows before it that the
    convolution needs, and a ring of the tokens since, from which the state at any of them follows.

    Attributes:
        layers: indices of the model's recurrent layers.
        conv_channels, conv_width: channels of the causal convolution, and the tokens it reads, its own included.
        num_heads, head_dim, num_key_heads, key_dim: S is [num_heads, head_dim, key_dim] (values by keys); heads of one
            group share a key. All 0 for layers that are a convolution only.
        num_slots: slots that can be handed out; storage holds one more, slot 0. A running sequence takes up to two.
        num_swap_slots: slots of host memory for `swap_out`.
        ring: tokens of a ring.
        max_append: a sequence with at most this many tokens in a step appends them to its ring, so that they can be
            taken back; one with more is scanned.
        snapshot_interval: also keep the state of prompts every so many tokens for the prefix cache, a multiple of the
            block size; None for the ends of prompts and the positions where prompts part only.
        conv_dtype: of the convolution's rows; None for the cache's dtype, or float32 if that is an 8-bit one. S and the
            rings are float32.

    Raises:
        InvalidInputError: a size is out of range, the layers are not distinct indices, or max_append exceeds the ring.
    """

    layers: tuple[int, ...]
    conv_channels: int
    conv_width: int
    num_heads: int = 0
    head_dim: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    num_slots: int = 64
    num_swap_slots: int = 0
    ring: int = DEFAULT_RING
    max_append: int = DEFAULT_APPEND
    snapshot_interval: int | None = None
    conv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        layers = tuple(as_int("recurrent layers", layer) for layer in self.layers)
        if not layers or len(set(layers)) != len(layers):
            raise InvalidInputError(f"recurrent layers: {shown(layers)}, expected one or more distinct layers")
        self._set("layers", layers)
        least_heads = int(bool(self.num_heads))
        for name, least in {
            **dict.fromkeys(("conv_channels", "ring", "max_append"), 1),
            **dict.fromkeys(("num_heads", "head_dim", "num_key_heads", "key_dim"), least_heads),
            "conv_width": 2,
            "num_slots": 2,
            "num_swap_slots": 0,
        }.items():
            self._set(name, as_int(name, getattr(self, name), low=least, high=_MOST))
        if self.snapshot_interval is not None:
            self._set("snapshot_interval", as_int("snapshot_interval", self.snapshot_interval, low=1))
        if self.max_append > self.ring:
            raise InvalidInputError(f"max_append: {self.max_append}, expected at most the ring's {self.ring} tokens")
        if self.num_heads and self.num_heads % self.num_key_heads:
            raise InvalidInputError(f"num_heads: {self.num_heads}, expected a multiple of {self.num_key_heads}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def state_bytes(self) -> int:
        """Bytes of S of one sequence, over all layers."""
        return 4 * len(self.layers) * self.num_heads * self.head_dim * self.key_dim

    def conv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's convolution rows of `dtype`, without those of the ring."""
        return len(self.layers) * (self.conv_width - 1) * self.conv_channels * dtype.itemsize

    def ring_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's ring, with convolution rows of `dtype`."""
        floats = self.num_key_heads * self.key_dim + self.num_heads * self.head_dim + self.num_heads
        return len(self.layers) * self.ring * (4 * floats + self.conv_channels * dtype.itemsize)

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a slot with convolution rows of `dtype`."""
        return self.state_bytes + self.conv_bytes(dtype) + self.ring_bytes(dtype)
