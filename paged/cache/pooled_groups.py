"""Pooled keys: an entry for each pool of positions, beside the keys and values of a layer or in place of them.

An entry lies in the block of its pool's positions and is written with the last of them. So copies, forks, prefix hits,
swap, tiers, truncations and failed steps treat it like that position's key.

The rows that a pool needs until it closes are further layers of a `CacheGroup` with `sliding_window=1`: a window keeps
whole blocks, and the block of a token has the earlier tokens of its pool. Where such rows are larger than all entries
of a position, they lie in slots of their own, see `OpenPoolGroup`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paged.cache.groups import ROLLBACK_SLACK, CacheGroup
from paged.cache.kinds.open_pools import OpenPools
from paged.cache.kinds.pools import PooledTable
from paged.cache.kinds.window import WindowTable
from paged.errors import InvalidInputError
from paged.kernels.core.errors import as_int, shown

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PooledGroup(CacheGroup):
    """Layers with an entry for each pool of positions, which `PagedKvCacheManager.entries` returns.

    Attributes:
        pool_size: positions of a pool; divides the block size.
        entry_size: elements of an entry in the cache's dtype.

    Raises:
        InvalidInputError: as of CacheGroup, or there is a sliding window.
    """

    pool_size: int = 1
    entry_size: int = 1
    kind: ClassVar[Any] = PooledTable

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pool_size", "entry_size"):
            object.__setattr__(self, name, as_int(name, getattr(self, name), low=1))
        if self.sliding_window is not None and self.kind is PooledTable:
            raise InvalidInputError(f"sliding_window: {self.sliding_window}, expected None beside pooled keys")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements per token and layer; the first also has the token's share of an entry, rounded up."""
        key, *value = self.row_sizes
        return key + -(-self.entry_size // self.pool_size), *value

    def check_block_size(self, block_size: int) -> None:
        """Raise InvalidInputError unless blocks consist of whole pools."""
        if block_size % self.pool_size:
            raise InvalidInputError(f"block_size: {block_size}, expected a multiple of pool_size {self.pool_size}")

    def entries_shapes(self, block_size: int) -> tuple[tuple[int, int], ...]:
        return ((block_size // self.pool_size, self.entry_size),)


class Entries(NamedTuple):
    """Entries of `size` elements of the cache's dtype, one for each pool of `pool_size` positions."""

    pool_size: int
    size: int


@dataclass(frozen=True)
class EntriesGroup(CacheGroup):
    """One layer of the cache that holds no keys and values, but the entries of all layers of a model.

    Entries of different pools and sizes share a block table so. In tables of their own, the entries of large pools
    would fill a small part of each block.

    Attributes:
        entries: kinds of entries; `PagedKvCacheManager.entries(layer, index)` returns those of each.

    Raises:
        InvalidInputError: as of CacheGroup, or there is another number of layers than one, or no entry.
    """

    entries: Sequence[Entries] = ()
    kind: ClassVar[Any] = PooledTable

    def __post_init__(self) -> None:
        super().__post_init__()
        entries = tuple(
            Entries(as_int("pool_size", pool, low=1), as_int("size", size, low=1)) for pool, size in self.entries
        )
        if len(self.layers) != 1 or not entries or self.sliding_window is not None:
            expected = "one layer with entries and without a window"
            raise InvalidInputError(
                f"layers: {shown(self.layers)} with {len(entries)} kinds of entries, expected {expected}"
            )
        for name, value in {"entries": entries, "latent": True, "num_kv_heads": 1}.items():
            object.__setattr__(self, name, value)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """None: a token has no row."""
        return (0,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements per token: its share of all entries, rounded up."""
        unit = self._unit
        return (-(-sum(unit // pool_size * size for pool_size, size in self.entries) // unit),)

    @property
    def _unit(self) -> int:
        """The fewest positions that consist of whole pools."""
        return math.lcm(*(entries.pool_size for entries in self.entries))

    def check_block_size(self, block_size: int) -> None:
        """Raise InvalidInputError unless blocks consist of whole pools."""
        if block_size % self._unit:
            raise InvalidInputError(f"block_size: {block_size}, expected a multiple of {self._unit}, whole pools")

    def entries_shapes(self, block_size: int) -> tuple[tuple[int, int], ...]:
        return tuple((block_size // pool_size, size) for pool_size, size in self.entries)


@dataclass(frozen=True)
class BorderGroup(PooledGroup):
    """Layers with a window, whose blocks also hold one entry: what the pools of the next block need of this one.

    A prefix hit at the end of a block has this entry, because the window needs the block too. pool_size is the block
    size.
    """

    kind: ClassVar[Any] = WindowTable


class OpenPart(NamedTuple):
    """Rows of `size` float32 numbers in some layers; an open pool needs those of up to `num_rows` positions."""

    layers: tuple[int, ...]
    size: int
    num_rows: int


@dataclass(frozen=True)
class OpenPoolGroup(CacheGroup):
    """Layers with rows of the newest positions alone, in one slot for each sequence, see `OpenPools`.

    `PagedKvCacheManager.open_rows(layer)` returns them. A sequence that begins with a block needs no earlier row, so
    hits end at blocks, and need no slot.

    Attributes:
        parts: layers by the size of their rows; `layers` has all of them.
        num_row_slots: slots that can be handed out: one for each sequence, and one for each that forks or runs a chunk.
        num_swap_slots: slots in host memory for `swap_out`.
        rollback: positions that a sequence can be truncated by, or that a step may append in place.

    Raises:
        InvalidInputError: as of CacheGroup, or a number is out of range.
    """

    parts: Sequence[OpenPart] = ()
    num_row_slots: int = 64
    num_swap_slots: int = 0
    rollback: int = ROLLBACK_SLACK
    kind: ClassVar[Any] = OpenPools
    has_own_memory: ClassVar[bool] = True
    keeps_slots: ClassVar[bool] = False

    def __post_init__(self) -> None:
        layers: list[int] = []
        for part in self.parts:
            layers += part.layers
        object.__setattr__(self, "layers", tuple(layers))
        super().__post_init__()
        for name, least in {"num_row_slots": 1, "num_swap_slots": 0, "rollback": 1}.items():
            object.__setattr__(self, name, as_int(name, getattr(self, name), low=least))
        parts: list[OpenPart] = []
        for part in self.parts:
            size, num_rows = as_int("size", part.size, low=1), as_int("num_rows", part.num_rows, low=1)
            parts.append(OpenPart(tuple(part.layers), size, num_rows))
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's slot."""
        num_bytes = 0
        for part in self.parts:
            num_bytes += 4 * len(part.layers) * part.size * (part.num_rows + self.rollback)
        return num_bytes

    @property
    def sequence_slots(self) -> tuple[int, int]:
        return self.num_row_slots, self.slot_bytes

    def make_memory(self, config: Any, dtype: torch.dtype, device: torch.device, num_tier_bytes: int) -> Any:
        from paged.cache.slot_memory import OpenRows  # PyTorch takes seconds to import

        parts: list[tuple[tuple[int, ...], int, int]] = []
        for part in self.parts:
            parts.append((part.layers, part.num_rows + self.rollback, part.size))
        return OpenRows(parts, self.num_row_slots, self.num_swap_slots, device)
