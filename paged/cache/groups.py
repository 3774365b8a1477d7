"""Cache groups (layers with the same K/V shape and window, which share a block size) and recurrent state shapes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from paged.errors import InvalidInputError
from paged.kernels.core.errors import as_bool, as_int, shown
from paged.kernels.recurrent.metadata import STATE_DTYPES

# Limit of block tables, because metadata and prefix look-ups take time in proportion to them. Gemma 3 27B has 7 tables.
_MAX_TABLES = 16
# Limit if more tables halve the memory of a position. DeepSeek-V4.1 in bfloat16 has 21: with 16, a block has room for
# all 40 windows of a position, 57,880 bytes, where entries take 2,890.
_MOST_TABLES = 24
# Positions kept behind a sliding window, so that rejected drafts can be rolled back.
ROLLBACK_SLACK = 64


@dataclass(frozen=True)
class CacheGroup:
    """Layers of one K/V shape and window. In `PagedKvCacheConfig.tables`, the layers of one block table.

    The rest of the cache asks `most_seen` and `first_seen_block` which tokens a token sees. A subclass may answer for
    another rule than a sliding window; its `sliding_window` is None.

    Attributes:
        layers: layer indices in the model. A layer that reads another layer's K/V is in no group.
        num_kv_heads, head_dim: None for the cache's own.
        v_head_dim: head size of the values; None for head_dim.
        sliding_window: number of tokens that a token sees, itself included; None for all tokens.
        latent: whether a value is the first v_head_dim elements of its key (latent attention) and is stored once.
        kind: class of the layers' `Kind`; None for the kind that follows from `sliding_window`. A subclass sets it.
        has_own_memory: whether the kind is a `SlotKind`, with memory by `make_memory`. A subclass sets it.
        keeps_slots: whether such a kind keeps slots for hits, for which a tier has memory. A subclass sets it.

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
    kind: ClassVar[Any] = None
    has_own_memory: ClassVar[bool] = False
    keeps_slots: ClassVar[bool] = True

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

    def make_memory(self, config: Any, dtype: torch.dtype, device: torch.device, num_tier_bytes: int) -> Any:
        """Return the memory of a group with `has_own_memory`, a `SlotMemory`.

        config: the cache's `PagedKvCacheConfig`. num_tier_bytes: host memory for a tier.
        """
        raise NotImplementedError

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Elements of a token's key, then of its value unless that lies in the key. Every size must be set."""
        assert self.num_kv_heads is not None
        assert self.head_dim is not None
        assert self.v_head_dim is not None
        key, value = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim
        if self.latent:
            return (key,)
        return key, value

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements that a layer takes per token: `row_sizes`, the first with what a block holds behind its keys."""
        return self.row_sizes

    def check_block_size(self, block_size: int) -> None:
        """Raise InvalidInputError unless the group can have blocks of this size."""

    @property
    def sequence_slots(self) -> tuple[int, int]:
        """Number and bytes of the slots of sequences, see `OpenPoolGroup`."""
        return 0, 0

    def entries_shapes(self, block_size: int) -> tuple[tuple[int, int], ...]:
        """Return number and size of each kind of entries behind a layer's keys in a block, see `PooledGroup`."""
        return ()

    def num_slots(self, width: int, num_layers: int) -> int:
        """Return how many planes of `width` elements hold K and V of `num_layers`; small layers share a plane."""
        return sum(-(-num_layers // (width // size)) for size in self.sizes)

    @property
    def most_seen(self) -> int | None:
        """Limit for the tokens that a token sees, itself included; None if it sees all of them."""
        return self.sliding_window

    def first_seen_block(self, num_tokens: int, block_size: int) -> int:
        """Return the index of the first block that is visible to the token after `num_tokens`."""
        if self.sliding_window is None:
            return 0
        return max(0, num_tokens - self.sliding_window + 1) // block_size

    @property
    def reach(self) -> int:
        """Number of tokens before a sequence's end that a group with a window keeps, to allow rollbacks."""
        return ROLLBACK_SLACK + (self.most_seen or 0) - 1

    def blocks_kept(self, num_tokens: int, block_size: int, *, num_new: int = 0) -> int:
        """Return the blocks that `num_tokens` hold within the window, plus the blocks of `num_new` further tokens."""
        return -(-(num_tokens + num_new) // block_size) - self.blocks_gone(num_tokens, block_size)

    def blocks_gone(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks a sequence of `num_tokens` has freed behind the window."""
        return self.first_seen_block(max(0, num_tokens - ROLLBACK_SLACK), block_size)

    def most_blocks_kept(self, num_tokens: int, block_size: int) -> int:
        """Return the peak number of blocks of a sequence that grows to `num_tokens` one token at a time."""
        num_blocks = -(-num_tokens // block_size)
        if self.most_seen is None:
            return num_blocks
        # The peak is at the first token of a block: the table holds that block and the blocks that `reach` tokens
        # touch.
        return min(num_blocks, 1 + -(-self.reach // block_size))


class NoKvTable(CacheGroup):
    """Block table of a cache without K/V. Its blocks hold no bytes; they count positions and name cached prefixes."""

    def __init__(self) -> None:
        for name, value in {"layers": (), "num_kv_heads": 1, "head_dim": 1, "v_head_dim": 1}.items():
            object.__setattr__(self, name, value)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """None: there is neither a key nor a value."""
        return ()


def split_evenly(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Split groups into the layers of each block table, so that blocks of all tables have about the same size.

    Without groups there is one table, a `NoKvTable`.

    Groups of one kind (same shape and window) are joined, then cut into equal parts. The block size chosen wastes the
    least memory, first of all in tables without a window, because long sequences fill these. If some layers have a
    window, a block holds all layers of one kind, except where all caches are of latents and several kinds have no
    window. Tables are sorted: no window first, then by falling window.
    """
    if not groups:
        return (NoKvTable(),)
    kinds: dict[CacheGroup, list[int]] = {}
    for group in groups:
        kinds.setdefault(replace(group, layers=(0,)), []).extend(group.layers)

    width = max(max(kind.sizes) for kind in kinds)

    def counts(num_planes: int) -> list[int]:
        """Return the number of tables of each kind if a block has this many planes."""
        num_tables: list[int] = []
        for kind, layers in kinds.items():
            num_fitting = bisect_right(range(1, len(layers) + 1), num_planes, key=partial(kind.num_slots, width))
            num_tables.append(-(-len(layers) // num_fitting))
        return num_tables

    least = max(kind.num_slots(width, 1) for kind in kinds)
    of_kinds = {kind.num_slots(width, len(layers)) for kind, layers in kinds.items()}
    sizes = sorted({max(least, num_planes) for num_planes in of_kinds}, reverse=True)
    num_unwindowed = sum(kind.most_seen is None for kind in kinds)
    if num_unwindowed > 1 and all(kind.most_seen is None or kind.latent for kind in kinds):
        # Try every number of planes. The best one halves the cache of GLM-5.2, see limits.md.
        sizes = list(range(sizes[0], least - 1, -1))

    def cost(num_planes: int) -> tuple[int, int]:
        """Return the planes of a position in tables without a window, then in all tables."""
        num_tables = counts(num_planes)
        num_whole = 0
        for kind, count in zip(kinds, num_tables, strict=True):
            if kind.most_seen is None:
                num_whole += count
        return num_planes * num_whole, num_planes * sum(num_tables)

    def best(max_tables: int) -> int:
        """Return the number of planes that costs least with so many tables."""
        few = [num_planes for num_planes in sizes if sum(counts(num_planes)) <= max_tables]
        return min(few or sizes[:1], key=cost)

    num_planes, with_more_tables = best(_MAX_TABLES), best(_MOST_TABLES)
    if 2 * cost(with_more_tables)[0] <= cost(num_planes)[0]:
        num_planes = with_more_tables
    tables: list[CacheGroup] = []
    for (kind, layers), count in zip(kinds.items(), counts(num_planes), strict=True):
        layers.sort()
        length = -(-len(layers) // count)
        for start in range(0, len(layers), length):
            tables.append(replace(kind, layers=tuple(layers[start : start + length])))
    return tuple(sorted(tables, key=lambda table: (table.most_seen is not None, -(table.most_seen or 0))))


# Default ring size in tokens: the state is written back once every 16 decode steps, see ReplaySSM (Dao AI Lab, 2026).
DEFAULT_RING = 16
# Default tokens of a decoding sequence in one step: the newest one and 7 drafts.
DEFAULT_APPEND = 8
_MOST = (1 << 31) - 2


@dataclass(frozen=True)
class ConvSpec:
    """Rows of a causal convolution in a further layer, whose shape is not that of the recurrent layers.

    Attributes:
        layer: index of the layer.
        channels, width: as `conv_channels` and `conv_width` of `RecurrentSpec`.
        dtype: dtype of the rows; None for that of the recurrent layers' rows.
    """

    layer: int
    channels: int
    width: int
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, least in (("layer", 0), ("channels", 1), ("width", 2)):
            number = as_int(f"convolution's {name}", getattr(self, name), low=least, high=_MOST)
            object.__setattr__(self, name, number)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise InvalidInputError(
                f"convolution's dtype: {shown(self.dtype)}, expected a floating point dtype or None"
            )

    def num_bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        """Return the bytes of rows; dtype: of the recurrent layers' rows."""
        return num_rows * self.channels * (self.dtype or dtype).itemsize


@dataclass(frozen=True)
class RecurrentSpec:
    """Shape of the states of all recurrent layers, which is the same in each layer.

    A slot holds one sequence's states. For every layer it has the state S at a base position, the rows before the base
    position that the convolution needs, and a ring of later tokens. The state at a ring token is computed from these.

    Attributes:
        layers: layer indices of the model's recurrent layers.
        conv_layers: indices of further layers that have rows of such a convolution, but no S.
        other_convs: further layers with rows of another convolution.
        conv_channels, conv_width: channels of the causal convolution, and how many tokens it reads, the current one
            included.
        num_heads, head_dim, num_key_heads, key_dim: S is [num_heads, head_dim, key_dim] (values by keys); heads of one
            group share a key. All are 0 for layers with a convolution only.
        num_slots: slots that can be handed out. Storage has one more, slot 0. A running sequence takes up to two.
        num_swap_slots: slots in host memory for `swap_out`.
        ring: size of a ring in tokens.
        max_append: if a step has at most this many tokens of a sequence, they are appended to its ring and can be
            rolled back. If it has more, they are scanned.
        snapshot_interval: number of tokens between snapshots of a prompt's state for the prefix cache, a multiple of
            the block size. None keeps snapshots only at ends of prompts and at positions where prompts diverge.
        conv_dtype: dtype of the convolution's rows. None for the cache's dtype, or float32 if the cache has 8 bits.
            The rings are float32.
        decays_channels: whether each channel of a key has its own decay; otherwise a head has one.
        rank: products u k^T that a token adds to S: 2 for layers with erase vectors, otherwise 1.
        state_dtype: dtype of S: float32, bfloat16 for half the memory, or int8 for a quarter, with a float32 scale for
            each row of keys.

    Raises:
        InvalidInputError: a size is out of range, the layers are not distinct indices, max_append exceeds the ring, or
            state_dtype is another dtype.
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
    decays_channels: bool = False
    rank: int = 1
    state_dtype: torch.dtype = torch.float32
    conv_layers: tuple[int, ...] = ()
    other_convs: tuple[ConvSpec, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "conv_layers"):
            self._set(name, tuple(as_int(f"recurrent {name}", layer) for layer in getattr(self, name)))
        layers = self.all_layers
        if not self.layers or len(set(layers)) != len(layers):
            raise InvalidInputError(f"recurrent layers: {shown(layers)}, expected one or more distinct layers")
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
        self._set("decays_channels", as_bool("decays_channels", self.decays_channels))
        self._set("rank", as_int("rank", self.rank, low=1, high=2))
        if self.state_dtype not in STATE_DTYPES:
            raise InvalidInputError(f"state_dtype: {shown(self.state_dtype)}, expected float32, bfloat16 or int8")
        if self.num_heads and self.num_heads % self.num_key_heads:
            raise InvalidInputError(f"num_heads: {self.num_heads}, expected a multiple of {self.num_key_heads}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a slot's S, rings and scales in one layer by name; none without S."""
        if not self.num_heads:
            return {}
        heads = self.num_heads, self.head_dim
        keys = self.num_key_heads, self.key_dim
        decays: tuple[int, ...] = (self.num_heads,)
        if self.decays_channels:
            decays = self.num_heads, self.key_dim
        shapes: dict[str, tuple[int, ...]] = {
            "state": (*heads, self.key_dim),
            "ring_k": (self.rank * self.ring, *keys),
            "ring_u": (self.rank * self.ring, *heads),
            "ring_g": (self.ring, *decays),
        }
        if self.state_dtype == torch.int8:
            shapes["state_scale"] = heads
        return shapes

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Layers with rows of a convolution: `layers`, `conv_layers`, then those of `other_convs`."""
        return (*self.layers, *self.conv_layers, *(conv.layer for conv in self.other_convs))

    @property
    def state_bytes(self) -> int:
        """Bytes of S of one sequence, and of its scales, over all layers."""
        shapes = self.state_shapes()
        num_bytes = math.prod(shapes.get("state", (0,))) * self.state_dtype.itemsize
        num_bytes += 4 * math.prod(shapes.get("state_scale", (0,)))
        return len(self.layers) * num_bytes

    def conv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's convolution rows of `dtype`, without the rows in the ring."""
        num_layers = len(self.layers) + len(self.conv_layers)
        num_bytes = num_layers * (self.conv_width - 1) * self.conv_channels * dtype.itemsize
        return num_bytes + sum(conv.num_bytes(conv.width - 1, dtype) for conv in self.other_convs)

    def ring_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's ring, with convolution rows of `dtype`."""
        num_layers = len(self.layers) + len(self.conv_layers)
        num_bytes = num_layers * self.ring * self.conv_channels * dtype.itemsize
        num_bytes += sum(conv.num_bytes(self.ring, dtype) for conv in self.other_convs)
        for name, shape in self.state_shapes().items():
            if name.startswith("ring"):
                num_bytes += len(self.layers) * 4 * math.prod(shape)
        return num_bytes

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a slot with convolution rows of `dtype`."""
        return self.state_bytes + self.conv_bytes(dtype) + self.ring_bytes(dtype)
