"""Host memory for swapped-out sequences."""

from __future__ import annotations

from paged.cache.guard import CacheGuard
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.pool import BlockPool
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_reservation import SequenceState
from paged.cache.tensors import KvCacheTensors
from paged.errors import OutOfBlocksError


class SwapSpace:
    """The pool of host blocks, and moves of K/V between host and device.

    num_sequences: currently swapped out.
    """

    def __init__(
        self,
        config: PagedKvCacheConfig,
        guard: CacheGuard,
        prefixes: PrefixCache,
        tensors: KvCacheTensors,
        pool: BlockPool,
    ) -> None:
        """pool: of host blocks. A tier of the prefix cache may share it; blocks in use are those of sequences."""
        self.pool = pool
        self._rollback, self._counts = guard.rollback, guard.counts
        self.num_sequences = 0
        self._config = config
        self._prefixes = prefixes
        self._tensors = tensors
        self._recurrent = prefixes.recurrent

    @property
    def num_free(self) -> int:
        """Number of host blocks that sequences can still take."""
        return self._config.num_swap_blocks - (self.pool.num_blocks - self.pool.num_free)

    def swap_out(self, state: SequenceState) -> None:
        """`PagedKvCacheManager.swap_out`: move the blocks that have one reference to the host."""
        if state.host_blocks is not None:
            return
        pool = self._prefixes.pool
        # An open reservation may hold a block that was replaced; it is not among this sequence's blocks.
        kept = self._config.blocks_for(state.num_tokens)
        moved = [i for i, block in enumerate(state.blocks[:kept]) if block and block not in pool.shared]
        if len(moved) > self.num_free:
            self.pool.num_refused += 1
            raise OutOfBlocksError(len(moved), self.num_free)
        host_blocks = self.pool.allocate(len(moved))
        sources = [state.blocks[i] for i in moved]
        self._tensors.swap_out(list(zip(sources, host_blocks, strict=True)))
        state.begin_change(self._rollback)
        blocks = list(state.blocks[:kept])
        dropped = [*state.blocks[kept:], *sources]
        for i in moved:
            blocks[i] = 0
        state.blocks, state.host_blocks = tuple(blocks), dict(zip(moved, host_blocks, strict=True))
        state.num_written = state.num_tokens
        if self._recurrent is not None:
            self._recurrent.swap_out(state)
        pool.release(dropped)
        self._set_num_sequences(self.num_sequences + 1)
        self._counts.add("swapped_out_blocks", len(moved))

    def swap_in(self, state: SequenceState) -> None:
        """`PagedKvCacheManager.swap_in`."""
        if state.host_blocks is None:
            return
        pool = self._prefixes.pool
        moved, host_blocks = list(state.host_blocks), list(state.host_blocks.values())
        taken = pool.allocate(len(moved))
        self._prefixes.overwrite(taken)
        self._tensors.swap_in(list(zip(host_blocks, taken, strict=True)))
        state.begin_change(self._rollback)
        blocks = list(state.blocks)
        for i, block in zip(moved, taken, strict=True):
            blocks[i] = block
        state.blocks = tuple(blocks)
        if self._recurrent is not None:
            self._recurrent.swap_in(state)
        self.discard(state)
        self._counts.add("swapped_in_blocks", len(moved))
        # Its published blocks may have been evicted meanwhile.
        state.chain.cut(len(state.chain.ids), min(moved, default=len(blocks)), self._rollback)
        self._prefixes.publish(state)

    def discard(self, state: SequenceState) -> None:
        """Free the host blocks of a sequence that is being changed, if it is swapped out."""
        if state.host_blocks is not None:
            self.pool.release(list(state.host_blocks.values()))
            state.host_blocks = None
            self._set_num_sequences(self.num_sequences - 1)

    def _set_num_sequences(self, number: int) -> None:
        self._rollback.append((setattr, self, "num_sequences", self.num_sequences))
        self.num_sequences = number
