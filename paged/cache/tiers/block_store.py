"""Interface of block storage outside the process: the cache folder, or a store that a program attaches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class BlockStore(ABC):
    """Store of blocks as opaque bytes by name, below the host tier; see `PagedKvCacheManager.attach_store`.

    A name depends on the weights, the layout and all tokens up to the block, and is the same in every process. The
    result of `load` is checked, so a store may lose, cut or mix up blocks. An error in any call is logged and counts as
    a miss. One thread calls `load`, another thread calls `lookup` and `store`. If a `load` does not return for a
    second, another thread calls it for other blocks.
    """

    @abstractmethod
    def lookup(self, names: Sequence[str]) -> int:
        """Return how many of `names`, counted from the first, the store holds without a gap."""

    @abstractmethod
    def load(self, name: str) -> bytes | None:
        """Return a block, or None if the store lacks it."""

    @abstractmethod
    def store(self, name: str, content: bytes) -> bool:
        """Keep a block; return False if the store is full."""

    @abstractmethod
    def complete(self) -> None:
        """Make all blocks visible to other processes; called once, at the end."""

    def expect_blocks(self, most_bytes: int) -> None:  # noqa: B027
        """Receive the size limit of a block in bytes; called before all other methods."""

    def remove(self, name: str) -> bool:
        """Drop a damaged block; return False if the store keeps it (the block then stays a miss)."""
        return False
