"""Which blocks are free, how many sequences hold each of the others, and which free ones still hold useful K/V."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from paged.block_ages import BlockAges
from paged.errors import OutOfBlocksError, PagedError


class BlockPool:
    """Reference counts over blocks 1..num_blocks. Block 0 is never handed out: padding rows may point at it.

    Free blocks that `published` contains are handed out last, least recently used first, after `on_evict` was told;
    until then `share` revives them.
    """

    def __init__(
        self,
        num_blocks: int,
        published: Set[int] = frozenset(),
        on_evict: Callable[[int], None] = lambda block: None,
    ) -> None:
        self.num_blocks = num_blocks
        self._published = published
        self._on_evict = on_evict
        self._ref_counts = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and published, least recently used first
        self.ages = BlockAges()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, evictable ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that are published."""
        return len(self._cached)

    @property
    def num_shared(self) -> int:
        """Blocks with more than one reference."""
        return sum(count > 1 for count in self._ref_counts)

    @property
    def ref_counts(self) -> Sequence[int]:
        """References by block; a view that changes with the pool."""
        return self._ref_counts

    def ref_count(self, block: int) -> int:
        """How many references `block` has; 0 for a free one."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks with one reference each.

        Raises:
            OutOfBlocksError: fewer are free; none was taken.
        """
        if count > self.num_free:
            raise OutOfBlocksError(count, self.num_free)
        free = self._free
        self.evict(count - len(free))
        split = len(free) - count
        blocks = free[split:][::-1]
        del free[split:]
        counts = self._ref_counts
        for block in blocks:
            counts[block] = 1
        if blocks:
            self.ages.taken(blocks[0])
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds."""
        return list(map(self._ref_counts.__getitem__, blocks)).count(0)

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`, which are in use or cached."""
        counts, cached = self._ref_counts, self._cached
        revived = [block for block in blocks if counts[block] == 0]
        for block in revived:
            del cached[block]
        for block in blocks:
            counts[block] += 1
        if revived:
            self.ages.revived(revived)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of `blocks`; those left without any are free. Of unpublished ones `blocks[0]` is
        reused first; of published ones the last is evicted first, as the others are of no use without the earlier.
        """
        counts, published = self._ref_counts, self._published
        freed: list[int] = []
        for block in reversed(blocks):
            count = counts[block] - 1
            counts[block] = count
            if count == 0:
                freed.append(block)
        if not freed:
            return
        if published.isdisjoint(freed):
            self._free += freed
        else:
            self._cached.update(dict.fromkeys([block for block in freed if block in published]))
            self._free += [block for block in freed if block not in published]
        self.ages.freed(freed)

    def evict(self, count: int) -> int:
        """Withdraw up to `count` cached blocks, least recently used first; how many there were."""
        evicted = 0
        while evicted < count and self._cached:
            block, _ = self._cached.popitem(last=False)
            self._on_evict(block)
            self._free.append(block)
            evicted += 1
        return evicted

    def unpublished(self, block: int) -> None:
        """`block` is no longer published: if it is free, nothing keeps it from being reused first."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, references: Mapping[int, int]) -> None:
        """Compare with the references that the holders of blocks count.

        Raises:
            PagedError: names the first contradiction.
        """
        listed = [*self._free, *self._cached]
        if self._ref_counts[0] or references.get(0) or 0 in listed:
            raise PagedError("block 0 is in use or in a free list")
        free = set(listed)
        if len(free) != len(listed):
            raise PagedError("the free lists hold a block twice")
        for block in range(1, self.num_blocks + 1):
            held, counted = references.get(block, 0), self._ref_counts[block]
            if held != counted:
                raise PagedError(f"block {block}: reference count {counted}, but {held} references are held")
            if (counted == 0) != (block in free):
                raise PagedError(f"block {block}: reference count {counted}, in a free list: {block in free}")
            if counted == 0 and (block in self._cached) != (block in self._published):
                raise PagedError(f"block {block} is free; cached: {block in self._cached}, published otherwise")
