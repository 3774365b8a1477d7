"""Where blocks are kept outside the process: a folder, or what others attach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class BlockStore(ABC):
    """Keeps blocks as opaque bytes by name, below the host tier; see `PagedKvCacheManager.attach_store`.

    A name depends on the weights, the layout and all tokens up to the block, and is the same in every process. What
    `load` returns is checked, so a store may lose, cut or mix up blocks. An error of any call is a miss with a line in
    the log. One thread calls `load`, and another one `lookup` and `store`; if a `load` does not return for a second,
    another thread calls it for other blocks.
    """

    @abstractmethod
    def lookup(self, names: Sequence[str]) -> int:
        """Return how many of the first names are there."""

    @abstractmethod
    def load(self, name: str) -> bytes | None:
        """Return a block, None if it is not there."""

    @abstractmethod
    def store(self, name: str, content: bytes) -> bool:
        """Keep a block; False if there is no room for it."""

    @abstractmethod
    def complete(self) -> None:
        """Bring all blocks to where others find them; called once, at the end."""

    def expect_blocks(self, most_bytes: int) -> None:  # noqa: B027
        """Learn how many bytes a block has at most; called before all others."""

    def remove(self, name: str) -> bool:
        """Drop a block that is damaged; False if the store keeps it, and it stays a miss."""
        return False
