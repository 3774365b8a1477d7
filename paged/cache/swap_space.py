"""Host memory of swapped-out sequences."""

from __future__ import annotations

from paged.cache.guard import CacheGuard
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_reservation import SequenceState
from paged.cache.tiers.shelf import HostShelf
from paged.errors import OutOfBlocksError


class SwapSpace:
    """Moves of K/V between host and device.

    shelf: host blocks. num_sequences: number of sequences that are swapped out.
    """

    def __init__(self, config: PagedKvCacheConfig, guard: CacheGuard, prefixes: PrefixCache, shelf: HostShelf) -> None:
        self.shelf = shelf
        self._rollback, self._counts = guard.rollback, guard.counts
        self.num_sequences = 0
        self._config = config
        self._prefixes = prefixes

    def swap_out(self, state: SequenceState) -> None:
        """Implement `PagedKvCacheManager.swap_out`: move the blocks with one reference to the host."""
        if state.host_blocks is not None:
            return
        pool = self._prefixes.pool
        # A block that a copy replaced is held by an open reservation and is not among this sequence's blocks.
        kept = self._config.blocks_for(state.num_tokens)
        moved = [i for i, block in enumerate(state.blocks[:kept]) if block and block not in pool.shared]
        if len(moved) > self.shelf.num_free:
            self.shelf.pool.num_refused += 1
            raise OutOfBlocksError(len(moved), self.shelf.num_free)
        for kind in self._prefixes.kinds:
            kind.check_swap_out(state)
        sources = [state.blocks[i] for i in moved]
        state.begin_change(self._rollback)  # before the copy, because a kind that drops a step may write to the blocks
        host_blocks = self.shelf.swap_out(sources)
        blocks = list(state.blocks[:kept])
        dropped = [*state.blocks[kept:], *sources]
        for i in moved:
            blocks[i] = 0
        state.blocks, state.host_blocks = tuple(blocks), dict(zip(moved, host_blocks, strict=True))
        state.num_written = state.num_tokens
        for kind in self._prefixes.kinds:
            kind.swap_out(state)
        pool.release(dropped)
        self.num_sequences += 1
        self._counts.add("swapped_out_blocks", len(moved))

    def swap_in(self, state: SequenceState) -> None:
        """Implement `PagedKvCacheManager.swap_in`."""
        if state.host_blocks is None:
            return
        pool = self._prefixes.pool
        moved, host_blocks = list(state.host_blocks), list(state.host_blocks.values())
        pool.require(len(moved))
        for kind in self._prefixes.kinds:
            kind.check_swap_in(state)
        taken = pool.allocate(len(moved))
        self._prefixes.overwrite(taken)
        state.begin_change(self._rollback)
        self.shelf.swap_in(host_blocks, taken)
        state.host_blocks = None
        self.num_sequences -= 1
        blocks = list(state.blocks)
        for i, block in zip(moved, taken, strict=True):
            blocks[i] = block
        state.blocks = tuple(blocks)
        for kind in self._prefixes.kinds:
            kind.swap_in(state)
        self._counts.add("swapped_in_blocks", len(moved))
        # The sequence's published blocks may have been evicted meanwhile.
        num_stayed = min(moved, default=len(blocks)) // len(self._config.tables)
        state.chain.cut(len(state.chain.ids), num_stayed, self._rollback)
        self._prefixes.publish(state)

    def discard(self, state: SequenceState) -> None:
        """Free the host blocks of a sequence, if it is swapped out; call its `begin_change` first."""
        if state.host_blocks is not None:
            self.shelf.pool.release(list(state.host_blocks.values()))
            state.host_blocks = None
            self.num_sequences -= 1
