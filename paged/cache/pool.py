"""The block pool: free blocks, reference counts, cached blocks (free, with published K/V), block ages."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence, Set
from itertools import count as count_from

from paged.cache.guard import Rollback
from paged.cache.retention import Priorities
from paged.errors import OutOfBlocksError, PagedError

_NUM_BUCKETS = 24
# Sample the first block of every 16th call that hands out blocks. The cost is below a tenth of a call, see limits.md.
_SAMPLE_EVERY = 16
_MAX_WATCHED = 256


class BlockAges:
    """Histograms of sampled block ages. Bucket i counts ages below 2^i ms, the last bucket all longer ages."""

    def __init__(self) -> None:
        self.lifetimes = [0] * _NUM_BUCKETS
        self.reuse_gaps = [0] * _NUM_BUCKETS
        self._since: dict[int, float] = {}
        self._calls = 0

    def taken(self, blocks: Sequence[int]) -> None:
        """Note that `blocks` were handed out; samples of their earlier use end."""
        if self._since and not self._since.keys().isdisjoint(blocks):
            for block in self._since.keys() & blocks:
                del self._since[block]
        self._calls += 1
        if blocks and self._calls % _SAMPLE_EVERY == 0 and len(self._since) < _MAX_WATCHED:
            self._since[blocks[0]] = time.monotonic()

    def count(self, histogram: list[int], blocks: Iterable[int]) -> None:
        """Count the sampled blocks among `blocks`: in `lifetimes` if freed, in `reuse_gaps` if shared again."""
        if not self._since or self._since.keys().isdisjoint(blocks):
            return
        now = time.monotonic()
        for block in self._since.keys() & blocks:
            milliseconds = int((now - self._since[block]) * 1e3)
            histogram[min(milliseconds.bit_length(), _NUM_BUCKETS - 1)] += 1
            self._since[block] = now


class BlockPool:
    """Reference counts of blocks 1..num_blocks. Block 0 is never handed out, because padding rows point at it.

    A dictionary holds the references beyond the first of each block. Nearly all blocks have one reference, so most
    calls hand out or free blocks by slicing a list.

    Free blocks in `published` are called `cached`. They are handed out last, those of low priority first and the least
    recently used of these first, after a call of `on_evict`, which removes them from `published` and reports them by
    `unpublished`. Until then `share` can revive them.
    """

    def __init__(
        self,
        num_blocks: int,
        published: Set[int] = frozenset(),
        on_evict: Callable[[list[int]], None] = lambda blocks: None,
        rollback: Rollback | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_refused = 0
        self.ages = BlockAges()
        self._published = published
        self._on_evict = on_evict
        self._rollback = Rollback() if rollback is None else rollback
        self._extra_references: dict[int, int] = {}
        self._free = list(range(num_blocks, 0, -1))
        # Tick of the release of each cached block, least recently used block first.
        self.cached: OrderedDict[int, int] = OrderedDict()
        self.priorities = Priorities(self.cached, self._rollback)
        self._ticks = count_from()

    @property
    def num_free(self) -> int:
        """Number of blocks that can be handed out, cached blocks included."""
        return len(self._free) + len(self.cached)

    @property
    def free(self) -> Sequence[int]:
        """Free blocks that are not cached; the last one is handed out next."""
        return self._free

    @property
    def shared(self) -> KeysView[int]:
        """Blocks with more than one reference; a live view."""
        return self._extra_references.keys()

    def num_references(self, block: int) -> int:
        """Return the number of references to a block in use."""
        return 1 + self._extra_references.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks with one reference each.

        Raises:
            OutOfBlocksError: fewer blocks are free; none is taken.
        """
        free = self._free
        if count > len(free):
            self.require(count)
            self.evict(count - len(free))
            assert count <= len(free)
        split = len(free) - count
        blocks = free[split:]
        self._rollback.append((list.__setitem__, free, slice(split, None), blocks))
        del free[split:]
        blocks = blocks[::-1]
        self.ages.taken(blocks)
        return blocks

    def require(self, count: int) -> None:
        """Raise OutOfBlocksError unless `count` blocks can be handed out; count the refusal in `num_refused`."""
        if count > self.num_free:
            self.num_refused += 1
            raise OutOfBlocksError(count, self.num_free)

    def count_cached(self, blocks: Iterable[int]) -> int:
        """Return how many of the blocks are cached."""
        return sum(block in self.cached for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of `blocks`, which must be in use or cached. Zeros are skipped."""
        if 0 in blocks:
            blocks = [block for block in blocks if block]
        cached, extra = self.cached, self._extra_references
        revived = [block for block in blocks if block in cached] if cached else []
        self._uncache(revived)
        if len(revived) < len(blocks):
            for block in set(blocks).difference(revived):
                extra[block] = extra.get(block, 0) + 1
        if revived:
            self.ages.count(self.ages.reuse_gaps, revived)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of `blocks`, which must be distinct. Zeros are skipped.

        Blocks without references become free. Unpublished blocks are reused in the given order. Published blocks are
        evicted in reverse order, because a block of a prefix is useless without the blocks before it.
        """
        if 0 in blocks:
            blocks = [block for block in blocks if block]
        extra, published = self._extra_references, self._published
        freed = blocks[::-1]
        if extra and not extra.keys().isdisjoint(freed):
            shared = extra.keys() & freed
            freed = [block for block in freed if block not in shared]
            for block in shared:
                if extra[block] == 1:
                    del extra[block]
                else:
                    extra[block] -= 1
        cached = [block for block in freed if block in published] if published else ()
        for block, tick in zip(cached, self._ticks, strict=False):  # takes half the time of OrderedDict.update
            self.cached[block] = tick
        if self.priorities.levels:
            self.priorities.released(cached)
        if len(cached) < len(freed):
            self._free += [block for block in freed if block not in published] if cached else freed
        self.ages.count(self.ages.lifetimes, freed)

    def evict(self, count: int) -> int:
        """Withdraw up to `count` cached blocks, in the order of `Priorities.lowest`; return their number."""
        count = min(count, len(self.cached))
        if count > 0:
            self._on_evict(self.priorities.lowest(count))
        return count

    def unpublished(self, blocks: Collection[int]) -> None:
        """Follow the removal of `blocks` from `published`: the free blocks among them are reused first."""
        freed = list(filter(self.cached.__contains__, blocks))
        self._uncache(freed)
        self._free += freed
        if self.priorities.levels:
            self.priorities.forget(blocks)

    def _uncache(self, blocks: Sequence[int]) -> None:
        cached = self.cached
        if self.priorities.is_used:
            self.priorities.taken(blocks)
        self._rollback.append((_update, cached, blocks, list(map(cached.__getitem__, blocks))))
        deque(map(cached.__delitem__, blocks), maxlen=0)  # takes half the time of popitem

    def recount(self, references: Mapping[int, int]) -> None:
        """Set the reference counts to the numbers held. Free blocks keep their order."""
        published, cached = self._published, self.cached
        self._extra_references = {block: count - 1 for block, count in references.items() if count > 1}
        self._free[:] = [block for block in self._free if block not in references and block not in published]
        free = set(self._free)
        for block in sorted(cached, key=cached.__getitem__):
            if block in references:
                del cached[block]
            elif block in published:
                cached.move_to_end(block)
            else:  # its withdrawal is not rolled back when the call fails
                del cached[block]
                if block not in free:
                    self._free.append(block)
        self.priorities.recount()

    def check(self, references: Mapping[int, int]) -> None:
        """Raise PagedError unless the counts equal the references that holders of blocks report."""
        listed = [*self._free, *self.cached]
        free = set(listed)
        if len(free) != len(listed):
            raise PagedError("the free lists contain a block twice")
        if 0 in free or references.get(0) or 0 in self._extra_references:
            raise PagedError("block 0 is in use or in a free list")
        for block in range(1, self.num_blocks + 1):
            held = references.get(block, 0)
            counted = 0 if block in free else 1 + self._extra_references.get(block, 0)
            if held != counted:
                raise PagedError(f"block {block}: reference count {counted}, but {held} references are held")
            if block in free and block in self._extra_references:
                raise PagedError(f"block {block} is free and shared")
            if block in free and (block in self.cached) != (block in self._published):
                raise PagedError(f"block {block} is free, and either cached or published, expected both or neither")
        problem = self.priorities.problem(self._published)
        if problem is not None:
            raise PagedError(problem)


def _update(mapping: dict[int, int], keys: Sequence[int], values: Sequence[int]) -> None:
    mapping.update(zip(keys, values, strict=True))
