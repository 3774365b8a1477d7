"""Sequences over a pool of K/V blocks: room, lengths, shared prefixes, swap, and what a forward needs to know."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from paged.batch import KvSlotRequest, UnifiedBatchItem
from paged.cache.events import CacheEvent, MemoryPressure, Notifier
from paged.cache.inspection import KvInspection
from paged.cache.integrity import check_integrity, recount
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences, as_columns, as_pairs
from paged.cache.prefix.chain import TokenChain, pack
from paged.cache.prefix_cache import PrefixCache
from paged.cache.sliding_window import SlidingWindow
from paged.cache.slot_allocator import KvSlotAllocator
from paged.cache.slot_reservation import KvSlotReservation, SequenceState
from paged.cache.stats import CacheStats, count_stats
from paged.cache.swap_space import SwapSpace
from paged.cache.tensors import KvCacheTensors
from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int
from paged.metadata import AttentionMetadata, HostMetadata, make_host_metadata
from paged.seq_id import SeqId, as_namespace, as_seq_id
from paged.staging import to_device
from paged.token_ids import as_token_ids


class PagedKvCacheManager:
    """The K/V cache of many sequences. Thread-safe; a call that raises leaves everything as it was, but for cached
    blocks that it evicted and was about to write to: those stay evicted.

    `num_tokens` of a handle counts positions that hold valid K/V, `capacity` those its blocks have room for. Blocks
    may be shared; before a shared one is written it is replaced by a copy with its data.

    Full blocks whose token ids are known are published: a new sequence of the same namespace that begins with the same
    tokens shares them. Freed, they stay findable until their room is needed, least recently used first.

    Every call that takes a handle raises StaleHandleError when its sequence has been freed (except `free`) or is
    swapped out (except `free`, `swap_in` and `swap_out`), and InvalidInputError when it belongs to another manager.
    """

    def __init__(self, config: PagedKvCacheConfig) -> None:
        self.config = config
        self._tensors = KvCacheTensors(config)  # first: where there is no memory for it, there is nothing to count
        self._guard = Notifier(self._measure_pressure)
        rollback = self._guard.rollback
        self._prefixes = PrefixCache(config, self._guard)
        self._pool = self._prefixes.pool
        self._window = SlidingWindow(config, self._pool, rollback)
        self._slots = KvSlotAllocator(config, self._guard, self._prefixes, self._tensors, self._window)
        self._swap = SwapSpace(config, self._guard, self._prefixes, self._tensors)
        self._sequences = LiveSequences(config, self._pool, rollback)
        rollback.recount = partial(recount, self._sequences, self._prefixes, self._swap.pool)
        self._handles = self._sequences.handles
        self._inspection = KvInspection(self._guard, self._sequences, self._slots, self._tensors, self._window)

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self._tensors.storage.device

    @property
    def tensors(self) -> KvCacheTensors:
        """The memory, of which others may hold a copy: its `listener` knows what to do with that."""
        return self._tensors

    def allocate(
        self,
        request_id: SeqId,
        num_tokens: int = 0,
        *,
        token_ids: Iterable[int] | None = None,
        namespace: Hashable = None,
    ) -> KvCacheHandle:
        """A new sequence with room for `num_tokens`, or for `token_ids` where those are more.

        Its length is 0, or that of the longest published prefix of `token_ids` in `namespace`, whose blocks it shares;
        the last of `token_ids` is always left to compute, as its logits are wanted.

        Raises:
            InvalidInputError: `request_id` names a live sequence or is neither str nor int, `num_tokens` is negative,
                `token_ids` are not all integers, the namespace cannot be hashed or is or holds a bool or a float, or an
                id that was looked up exceeds int32; the others are refused by `commit`.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        ids = None if token_ids is None else as_token_ids("token_ids", token_ids)
        namespace = as_namespace("namespace", namespace)
        room = num_tokens if ids is None else max(num_tokens, len(ids))
        with self._guard:
            request_id = self._sequences.new_name(request_id)
            self._sequences.check_length(room)
            state = SequenceState(request_id, namespace)
            if ids is None or not self.config.enable_prefix_cache:
                state.blocks = self._prefixes.allocate(-(-room // self.config.block_size))
            else:
                self._prefixes.begin(state, ids, room)
                self._window.drop_unseen([state])
            return self._sequences.add(state)

    def extend(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Room for `num_tokens` more, and the length grows; the caller writes the K/V. Until then they are zeros.

        Raises:
            InvalidInputError: `num_tokens` is negative.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            target = state.num_tokens + num_tokens
            self._sequences.check_length(target)
            reservation = self._slots.reserve([state], [target])
            written = max(state.num_tokens, state.num_written)
            self._prefixes.overwrite(state.blocks)
            self._tensors.clear(state.blocks, written, max(written, target))
            reservation.commit()

    def advance(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """`num_tokens` more positions now hold valid K/V.

        Raises:
            InvalidInputError: `num_tokens` is negative or goes beyond the capacity, or a table has no blocks there, as
                neither `reserve` nor `build_metadata` made them.
            SequenceTooLongError: beyond `max_seq_len`.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            target = state.num_tokens + num_tokens
            if target > handle.capacity:
                raise InvalidInputError(f"num_tokens: length {target}, expected at most the capacity {handle.capacity}")
            self._sequences.check_length(target)
            self._window.check_room(state, target)
            state.begin_change(self._guard.rollback)
            state.num_tokens = target
            self._window.drop_unseen([state])

    def commit(self, handle: KvCacheHandle, token_ids: Iterable[int]) -> None:
        """Publish the full blocks written so far. `token_ids` are those at positions 0.., as far as they are known.

        Raises:
            InvalidInputError: they are not those the sequence was given before, or one exceeds int32.
        """
        ids = as_token_ids("token_ids", token_ids)
        with self._guard:
            self._prefixes.commit(self._sequences.state(handle), ids)

    def append_tokens(self, items: Iterable[tuple[KvCacheHandle, Iterable[int]]]) -> None:
        """Say which ids stand at the last positions of sequences, after a forward; blocks that are full are published.

        A sequence whose earlier ids are not all known is passed over.

        Raises:
            InvalidInputError: an id is not an integer of 32 bits.
        """
        handles, given = as_pairs("items", items)
        ids = [as_token_ids("token_ids", token_ids) for token_ids in given]
        pack(list(chain.from_iterable(ids)))
        with self._guard:
            self._prefixes.append([self._sequences.state(handle) for handle in handles], ids)

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` positions; blocks beyond them are given back.

        Raises:
            InvalidInputError: `num_tokens` is negative or more than the sequence holds, or what the sliding window
                shows from there is gone.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            if num_tokens > state.num_tokens:
                raise InvalidInputError(f"num_tokens: {num_tokens}, expected at most the length {state.num_tokens}")
            self._window.check_rollback(state, num_tokens)
            state.begin_change(self._guard.rollback)
            kept = self.config.blocks_for(num_tokens)
            dropped, state.blocks = state.blocks[kept:], state.blocks[:kept]
            self._pool.release(dropped)
            state.num_tokens = state.num_written = num_tokens
            state.num_cached_tokens = min(state.num_cached_tokens, num_tokens)
            state.chain.cut(num_tokens, num_tokens // self.config.block_size, self._guard.rollback)

    def fork(self, handle: KvCacheHandle, request_id: SeqId) -> KvCacheHandle:
        """A second sequence with the same tokens, over the same blocks until either writes to one.

        Raises:
            InvalidInputError: `request_id` names a live sequence.
        """
        with self._guard:
            source = self._sequences.state(handle)
            request_id = self._sequences.new_name(request_id)
            source.begin_change(self._guard.rollback)
            blocks = source.blocks[: self.config.blocks_for(source.num_tokens)]
            self._pool.share([block for block in blocks if block])
            forked = SequenceState(request_id, source.namespace, blocks=blocks, num_tokens=source.num_tokens)
            forked.chain = source.chain.copy(source.num_tokens, len(blocks))
            return self._sequences.add(forked)

    def free(self, handle: KvCacheHandle) -> None:
        """Give the sequence up; a second time does nothing. Blocks are free again once their last reference is dropped.

        Raises:
            InvalidInputError: the handle belongs to another manager.
        """
        with self._guard:
            if isinstance(handle, KvCacheHandle) and not handle.is_valid:
                return
            state = self._sequences.state(handle, may_be_swapped=True)
            state.begin_change(self._guard.rollback)
            self._pool.release(state.blocks)
            self._swap.discard(state)
            state.blocks, state.chain = (), TokenChain()
            state.num_tokens = state.num_cached_tokens = state.num_written = 0
            self._sequences.remove(state)

    def swap_out(self, handle: KvCacheHandle) -> None:
        """Move the K/V to host memory and give the blocks back; nothing happens to one that is out already.

        Blocks that another sequence holds too stay where they are. Room beyond the length is given back.

        Raises:
            OutOfBlocksError: the host pool has too few blocks.
        """
        with self._guard:
            self._swap.swap_out(self._sequences.state(handle, may_be_swapped=True))

    def swap_in(self, handle: KvCacheHandle) -> None:
        """Bring the K/V back; nothing happens to a sequence that is not swapped out.

        Raises:
            OutOfBlocksError: the pool has too few blocks.
        """
        with self._guard:
            self._swap.swap_in(self._sequences.state(handle, may_be_swapped=True))

    def reserve(self, requests: Iterable[KvSlotRequest]) -> KvSlotReservation:
        """Room for every sequence up to its `target_len`, for all of them or for none.

        `admission_target_len` is not given room: it is only checked that all sequences would fit at those lengths.

        Raises:
            InvalidInputError: an id is unknown or given twice, or a length is below the sequence's own.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        columns = as_columns(requests)
        with self._guard:
            states, targets, highest = self._sequences.requested(columns)
            if highest is not None:
                self._slots.require(states, highest)
            return self._slots.reserve(states, targets)

    def share_prefix_blocks(self, source: KvCacheHandle, target: KvCacheHandle, num_blocks: int) -> None:
        """The first `num_blocks` blocks of `source` become those of the empty `target`, in place of room it had there.

        Raises:
            InvalidInputError: the blocks are not all full of valid tokens, `target` is not empty or is `source`, or
                their namespaces differ.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self._guard:
            self._prefixes.share(self._sequences.state(source), self._sequences.state(target), num_blocks)

    def evict(self, num_blocks: int) -> int:
        """Withdraw up to `num_blocks` free published blocks, least recently used first; returns how many there were.

        Raises:
            InvalidInputError: `num_blocks` is negative.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self._guard:
            return self._pool.evict(num_blocks)

    def warm_up(self) -> None:
        """Copy block 0, which no sequence has, over itself, so that no fork waits for the kernel to compile."""
        with self._guard:
            self._tensors.copy([(0, 0)])

    def clear_prefix_cache(self) -> None:
        """Withdraw every published block; those in use stay with their sequences."""
        with self._guard:
            self._prefixes.clear([handle._state for handle in self._handles.values()])

    def namespaces(self) -> tuple[Hashable, ...]:
        """Those in which a prompt can begin with a published block; one that holds none any more takes no memory."""
        with self._guard:
            return tuple(self._prefixes.index.namespaces)

    def forget_namespace(self, namespace: Hashable) -> None:
        """Let no sequence of a namespace begin with what was published in it so far; those blocks age and go.

        Raises:
            InvalidInputError: a live sequence of the namespace holds tokens, and would publish them again.
        """
        namespace = as_namespace("namespace", namespace)
        with self._guard:
            self._sequences.check_unused(namespace)
            self._prefixes.index.forget_root(namespace)

    @property
    def used_bytes(self) -> int:
        """Memory of the blocks in use: of `stats` what every step asks for, without a look at every sequence."""
        with self._guard:
            return (self._pool.num_blocks - self._pool.num_free) * self._tensors.bytes_per_block

    @property
    def pressure(self) -> MemoryPressure:
        """How much of the pool can still be handed out, evictable blocks included."""
        with self._guard:
            return self._measure_pressure()

    def on_pressure(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Call back with the new level whenever a call has changed it, outside of the lock."""
        self._guard.listen_to_pressure(callback)

    def subscribe(self, callback: Callable[[CacheEvent], None]) -> None:
        """Call back with every BlocksStored, BlockRemoved and CacheCleared, in order, outside of the lock."""
        self._guard.listen_to_events(callback)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether `allocate` would find room for a new sequence of `num_tokens`.

        Raises:
            InvalidInputError: `num_tokens` is negative.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        longest = self.config.max_seq_len
        needed = self.config.blocks_to_begin(num_tokens)
        return (longest is None or num_tokens <= longest) and needed <= self._pool.num_free

    def get_handle(self, request_id: SeqId) -> KvCacheHandle | None:
        """The live sequence of that name, or None.

        Raises:
            InvalidInputError: `request_id` is neither str nor int, so that no sequence has it.
        """
        return self._handles.get(as_seq_id("request_id", request_id))

    def handles(self) -> tuple[KvCacheHandle, ...]:
        """All live sequences, oldest first."""
        with self._guard:
            return tuple(self._handles.values())

    def cached_blocks(self) -> tuple[int, ...]:
        """Free blocks with K/V that a prompt may begin with, least recently used first."""
        with self._guard:
            return self._pool.cached

    def k_cache(self, layer: int) -> torch.Tensor:
        """Keys of one layer, [num_blocks + 1, block_size, num_kv_heads, head_dim].

        Raises:
            InvalidInputError: there is no such layer, or it has no K/V of its own.
        """
        return self._tensors.k_cache(layer)

    def v_cache(self, layer: int) -> torch.Tensor:
        """Values of one layer, as `k_cache`."""
        return self._tensors.v_cache(layer)

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`k_scale` and `v_scale` of one layer's rows where the cache is int8, float32 [num_blocks + 1, block_size,
        num_kv_heads], as the operations take them; else (None, None). Errors as of `k_cache`.
        """
        return self._tensors.scales(layer)

    def table_of(self, layer: int) -> int:
        """The index of a layer's table for `AttentionMetadata.table`; errors as of `k_cache`."""
        return self._tensors.table_of(layer)

    def build_metadata(
        self, items: Iterable[UnifiedBatchItem] | Iterable[tuple[KvCacheHandle, int]]
    ) -> AttentionMetadata:
        """One forward's view of its sequences, whose new tokens stand right after the `num_tokens` they hold.

        Args:
            items: batch items (without `kv_cache`, the sequence named `seq_id`), or pairs of handle and new tokens.

        Raises:
            InvalidInputError: a sequence is unknown, given twice, or has no room for its tokens.
            OutOfBlocksError: a shared block would have to be copied, and none is free; not after `reserve`.
        """
        pairs = self._sequences.step_pairs(items)
        with self._guard:  # to its end: a copy that was made for a step that cannot be described is taken back
            host = self._host_metadata(*pairs)
            return host.over(to_device(host.arrays, self.device))

    def host_metadata(self, items: Iterable[UnifiedBatchItem] | Iterable[tuple[KvCacheHandle, int]]) -> HostMetadata:
        """`build_metadata` before it goes to the device."""
        pairs = self._sequences.step_pairs(items)
        with self._guard:
            return self._host_metadata(*pairs)

    def _host_metadata(self, handles: list[KvCacheHandle], counts: list[Any]) -> HostMetadata:
        any_swapped = self._swap.num_sequences > 0
        states, query_lens = self._sequences.of_step(handles, counts, any_swapped=any_swapped)
        lengths = np.array([state.num_tokens for state in states], np.int64)
        self._slots.make_ready(states, (lengths + query_lens).tolist())
        tables = self._sequences.tables.gather(states)
        return make_host_metadata(lengths, query_lens, tables, self.config.block_size)

    def write_kv(
        self, handle: KvCacheHandle, layer: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V of the token at `position`, [num_kv_heads, head_dim], or of consecutive ones from there, with a
        first axis. Slow: for tests and inspection. The length stays; positions may lie anywhere within the capacity.
        They are converted to the cache's dtype, 8-bit floats saturated, and not scaled: scales belong to the kernels,
        but for those of int8 rows, which are written too.

        Raises:
            InvalidInputError: layer, position or a shape does not fit.
            OutOfBlocksError: a shared block would have to be copied, and none is free.
        """
        self._inspection.write(handle, layer, position, key, value)

    def read_kv(
        self, handle: KvCacheHandle, layer: int, start: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at positions start..start + num_tokens, each [num_tokens, num_kv_heads, head_dim]. Slow.
        They are the stored values, in the cache's dtype: what a scaled cache stands for is these times its scales. Of
        int8 they are float32, times the scales of their rows.

        Raises:
            InvalidInputError: there is no such layer, or a position holds nothing: it is not below `num_tokens`, and
                `write_kv` has not written everything from there up to it.
        """
        return self._inspection.read(handle, layer, start, num_tokens)

    def stats(self) -> CacheStats:
        """The cache as of now."""
        with self._guard:
            return count_stats(self.config, self._sequences, self._prefixes, self._slots, self._swap, self._tensors)

    def metrics_snapshot(self) -> dict[str, Any]:
        """`stats()`, the pressure, and the histograms of sampled blocks (see `BlockAges`), ready for JSON."""
        with self._guard:
            ages = self._pool.ages
            return {
                **asdict(self.stats()),
                "pressure": self._measure_pressure().value,
                "block_lifetimes_ms": ages.lifetimes.copy(),
                "block_reuse_gaps_ms": ages.reuse_gaps.copy(),
            }

    def check_integrity(self) -> None:
        """Recount every reference from the live sequences and open reservations.

        Raises:
            PagedError: names the first contradiction.
        """
        with self._guard:
            check_integrity(self._sequences, self._prefixes, self._swap.pool)

    def _measure_pressure(self) -> MemoryPressure:
        available = self._pool.num_free / self._pool.num_blocks
        if available < self.config.high_watermark:
            return MemoryPressure.CRITICAL
        return MemoryPressure.HIGH if available < self.config.low_watermark else MemoryPressure.LOW
