"""Which blocks are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paged.errors import OutOfBlocksError, PagedError


class BlockPool:
    """Reference counts over blocks 1..num_blocks. Block 0 is never handed out: padding rows may point at it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Blocks with more than one reference."""
        return sum(count > 1 for count in self._ref_counts)

    def ref_count(self, block: int) -> int:
        """How many references `block` has; 0 for a free one."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks with one reference each.

        Raises:
            OutOfBlocksError: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which are in use."""
        for block in blocks:
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of `blocks`; those left without any are free, and `blocks[0]` is reused first."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check(self, references: Mapping[int, int]) -> None:
        """Compare with the references that the holders of blocks count.

        Raises:
            PagedError: names the first contradiction.
        """
        if self._ref_counts[0] or references.get(0) or 0 in self._free:
            raise PagedError("block 0 is in use or in the free list")
        free = set(self._free)
        if len(free) != len(self._free):
            raise PagedError("the free list holds a block twice")
        for block in range(1, self.num_blocks + 1):
            held, counted = references.get(block, 0), self._ref_counts[block]
            if held != counted:
                raise PagedError(f"block {block}: reference count {counted}, but {held} references are held")
            if (counted == 0) != (block in free):
                raise PagedError(f"block {block}: reference count {counted}, in the free list: {block in free}")
