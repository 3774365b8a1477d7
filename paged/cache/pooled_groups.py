"""Pooled keys: an entry for each pool of positions, beside the keys and values of a layer.

An entry lies in the block of its pool's positions and is written with the last of them. So copies, forks, prefix hits,
swap, tiers, truncations and failed steps treat it like that position's key.

The rows that a pool needs until it closes are further layers of a `CacheGroup` with `sliding_window=1`: a window keeps
whole blocks, and the block of a token has the earlier tokens of its pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paged.cache.groups import CacheGroup
from paged.cache.kinds.pools import PooledTable
from paged.errors import InvalidInputError
from paged.kernels.core.errors import as_int


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
        if self.sliding_window is not None:
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

    def entries_shape(self, block_size: int) -> tuple[int, int]:
        return block_size // self.pool_size, self.entry_size
