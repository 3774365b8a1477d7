"""Sequences over a pool of K/V blocks: room, lengths, shared prefixes, swap, and what a forward needs to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.batch import KvSlotRequest, SeqId, UnifiedBatchItem
from paged.block_pool import BlockPool
from paged.block_table import BlockTable
from paged.cache_events import CacheEvent, MemoryPressure, Notifier
from paged.errors import InvalidInputError, PagedError, SequenceTooLongError, StaleHandleError
from paged.kv_cache import (
    CacheStats,
    KvCacheHandle,
    KvSlotReservation,
    PagedKvCacheConfig,
    SequenceState,
    Undo,
    check_count,
)
from paged.kv_cache_tensors import KvCacheTensors
from paged.metadata import AttentionMetadata, HostMetadata, make_host_metadata
from paged.prefix_cache import PrefixCache
from paged.staging import to_device
from paged.token_chain import as_list

_Span = tuple[SequenceState, int, int]
"""A sequence, the first position that will be written, and the end of those."""

_Need = tuple[SequenceState, list[int], list[int], int]
"""A sequence; indices of the shared blocks a span writes to, of the published ones; blocks missing at its end."""

# Positions behind the sliding window that are kept, so that rejected speculation can be rolled back.
ROLLBACK_SLACK = 64


class PagedKvCacheManager:
    """The K/V cache of many sequences. Thread-safe; a call that raises leaves everything as it was, but for cached
    blocks that nobody holds: those it needed may have been evicted.

    `num_tokens` of a handle counts positions that hold valid K/V, `capacity` those its blocks have room for. Blocks
    may be shared; before a shared one is written it is replaced by a copy with its data.

    Full blocks whose token ids are known are published: a new sequence of the same namespace that begins with the same
    tokens shares them. Freed, they stay findable until their room is needed, least recently used first.

    Every call that takes a handle raises StaleHandleError when its sequence has been freed (except `free`) or is
    swapped out (except `free`, `swap_in` and `swap_out`), and InvalidInputError when it belongs to another manager.
    """

    def __init__(self, config: PagedKvCacheConfig) -> None:
        self.config = config
        self._guard = Notifier(self._measure_pressure)
        self._prefixes = PrefixCache(config, self._guard)
        self._index, self._pool = self._prefixes.index, self._prefixes.pool
        self._host_pool = BlockPool(config.num_swap_blocks)
        self._tensors = KvCacheTensors(config)
        self._table = BlockTable()
        self._handles: dict[SeqId, KvCacheHandle] = {}
        self._cow_copies = 0
        self._num_swapped = 0
        self._swapped_out_blocks = 0
        self._swapped_in_blocks = 0

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self._tensors.storage.device

    def allocate(
        self,
        request_id: SeqId,
        num_tokens: int = 0,
        *,
        token_ids: Sequence[int] | None = None,
        namespace: Hashable = None,
    ) -> KvCacheHandle:
        """A new sequence with room for `num_tokens`, or for `token_ids` where those are more.

        Its length is 0, or that of the longest published prefix of `token_ids` in `namespace`, whose blocks it shares;
        the last of `token_ids` is always left to compute, as its logits are wanted.

        Raises:
            InvalidInputError: `request_id` names a live sequence, `num_tokens` is negative, or an id that was looked up
                exceeds int32; the others are refused by `commit`.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        check_count("num_tokens", num_tokens)
        room = num_tokens if token_ids is None else max(num_tokens, len(token_ids))
        with self._guard:
            self._check_new(request_id)
            self._check_length(room)
            state = SequenceState(request_id, namespace)
            if token_ids is None or not self.config.enable_prefix_cache:
                state.blocks = tuple(self._pool.allocate(self._blocks_for(room)))
            else:
                self._prefixes.begin(state, as_list(token_ids), self._blocks_for(room))
                self._drop_unseen([state])
            return self._add(state)

    def extend(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Room for `num_tokens` more, and the length grows; the caller writes the K/V. Until then they are zeros.

        Raises:
            InvalidInputError: `num_tokens` is negative.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        check_count("num_tokens", num_tokens)
        with self._guard:
            state = self._state(handle)
            target = state.num_tokens + num_tokens
            self._check_length(target)
            with self._reserve([state], [target]) as reservation:
                written = max(state.num_tokens, state.num_written)
                self._tensors.clear(self._slots(state, written, max(written, target)))
                reservation.commit()

    def advance(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """`num_tokens` more positions now hold valid K/V.

        Raises:
            InvalidInputError: `num_tokens` is negative or goes beyond the capacity.
            SequenceTooLongError: beyond `max_seq_len`.
        """
        check_count("num_tokens", num_tokens)
        with self._guard:
            state = self._state(handle)
            target = state.num_tokens + num_tokens
            if target > handle.capacity:
                raise InvalidInputError(f"num_tokens: length {target}, expected at most the capacity {handle.capacity}")
            self._check_length(target)
            self._settle(state)
            state.num_tokens = target
            self._drop_unseen([state])

    def commit(self, handle: KvCacheHandle, token_ids: Sequence[int]) -> None:
        """Publish the full blocks written so far. `token_ids` are those at positions 0.., as far as they are known.

        Raises:
            InvalidInputError: they are not those the sequence was given before, or one exceeds int32.
        """
        with self._guard:
            state = self._state(handle)
            self._prefixes.commit(state, token_ids)

    def append_tokens(self, items: Iterable[tuple[KvCacheHandle, Sequence[int]]]) -> None:
        """Say which ids stand at the last positions of sequences, after a forward; blocks that are full are published.

        A sequence whose earlier ids are not all known is passed over.
        """
        with self._guard:
            for handle, token_ids in items:
                self._prefixes.append(self._state(handle), token_ids)

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Roll back to the first `num_tokens` positions; blocks beyond them are given back.

        Raises:
            InvalidInputError: `num_tokens` is negative or more than the sequence holds, or what the sliding window
                shows from there is gone.
        """
        check_count("num_tokens", num_tokens)
        with self._guard:
            state = self._state(handle)
            if num_tokens > state.num_tokens:
                raise InvalidInputError(f"num_tokens: {num_tokens}, expected at most the length {state.num_tokens}")
            if 0 in state.blocks[self._first_seen_block(num_tokens, 0) : self._blocks_for(num_tokens)]:
                raise InvalidInputError(f"num_tokens: {num_tokens}, its sliding window has been given back in part")
            self._settle(state)
            kept = self._blocks_for(num_tokens)
            dropped, state.blocks = state.blocks[kept:], state.blocks[:kept]
            self._release(dropped)
            state.num_tokens = state.num_written = num_tokens
            state.num_cached_tokens = min(state.num_cached_tokens, num_tokens)
            state.chain.cut(num_tokens, num_tokens // self.config.block_size)

    def fork(self, handle: KvCacheHandle, request_id: SeqId) -> KvCacheHandle:
        """A second sequence with the same tokens, over the same blocks until either writes to one.

        Raises:
            InvalidInputError: `request_id` names a live sequence.
        """
        with self._guard:
            source = self._state(handle)
            self._check_new(request_id)
            self._settle(source)
            blocks = source.blocks[: self._blocks_for(source.num_tokens)]
            self._pool.share([block for block in blocks if block])
            twin = SequenceState(request_id, source.namespace, blocks=blocks, num_tokens=source.num_tokens)
            twin.chain = source.chain.copy(source.num_tokens, len(blocks))
            return self._add(twin)

    def free(self, handle: KvCacheHandle) -> None:
        """Give the sequence up; a second time does nothing. Blocks are free again once nobody holds them.

        Raises:
            InvalidInputError: the handle belongs to another manager.
        """
        with self._guard:
            if not handle.is_valid:
                return
            state = self._state(handle, may_be_swapped=True)
            self._settle(state)
            self._release(state.blocks)
            if state.host_blocks is not None:
                self._host_pool.release(list(state.host_blocks.values()))
                self._num_swapped -= 1
            state.blocks, state.host_blocks, state.is_valid = (), None, False
            state.num_tokens = state.num_cached_tokens = state.num_written = 0
            state.chain.cut(0, 0)
            self._table.remove(state)
            del self._handles[state.request_id]

    def swap_out(self, handle: KvCacheHandle) -> None:
        """Move the K/V to host memory and give the blocks back; nothing happens to one that is out already.

        Blocks that another sequence holds too stay where they are. Room beyond the length is given back.

        Raises:
            OutOfBlocksError: the host pool has too few blocks.
        """
        with self._guard:
            state = self._state(handle, may_be_swapped=True)
            if state.host_blocks is not None:
                return
            # An open reservation may hold a block that ours replaced: that makes no difference to what we hold.
            kept = self._blocks_for(state.num_tokens)
            moved = [i for i, block in enumerate(state.blocks[:kept]) if block and block not in self._pool.shared]
            host_blocks = self._host_pool.allocate(len(moved))
            try:
                self._tensors.swap_out([(state.blocks[i], host) for i, host in zip(moved, host_blocks, strict=True)])
            except BaseException:
                self._host_pool.release(host_blocks)
                raise
            self._settle(state)
            blocks = list(state.blocks[:kept])
            dropped = [*state.blocks[kept:], *(blocks[i] for i in moved)]
            for i in moved:
                blocks[i] = 0
            state.blocks, state.host_blocks = tuple(blocks), dict(zip(moved, host_blocks, strict=True))
            state.num_written = state.num_tokens
            self._release(dropped)
            self._num_swapped += 1
            self._swapped_out_blocks += len(moved)

    def swap_in(self, handle: KvCacheHandle) -> None:
        """Bring the K/V back; nothing happens to a sequence that is not swapped out.

        Raises:
            OutOfBlocksError: the pool has too few blocks.
        """
        with self._guard:
            state = self._state(handle, may_be_swapped=True)
            if state.host_blocks is None:
                return
            moved, host_blocks = list(state.host_blocks), list(state.host_blocks.values())
            taken = self._pool.allocate(len(moved))
            try:
                self._tensors.swap_in(list(zip(host_blocks, taken, strict=True)))
            except BaseException:
                self._pool.release(taken)
                raise
            blocks = list(state.blocks)
            for i, block in zip(moved, taken, strict=True):
                blocks[i] = block
            state.blocks, state.host_blocks = tuple(blocks), None
            self._host_pool.release(host_blocks)
            self._num_swapped -= 1
            self._swapped_in_blocks += len(moved)
            # What it had published may have been evicted meanwhile.
            state.chain.withdraw(min(moved, default=len(blocks)))
            self._prefixes.publish(state)

    def reserve(self, requests: Sequence[KvSlotRequest]) -> KvSlotReservation:
        """Room for every sequence up to its `target_len`, for all of them or for none.

        `admission_target_len` is not given room: it is only checked that all sequences would fit at those lengths.

        Raises:
            InvalidInputError: an id is unknown or given twice, or a length is below the sequence's own.
            SequenceTooLongError: beyond `max_seq_len`.
            OutOfBlocksError: the pool cannot supply the room.
        """
        with self._guard:
            states = self._requested(requests)
            targets = [request.target_len for request in requests]
            admissions = [request.admission_target_len for request in requests]
            if any(admission is not None for admission in admissions):
                highest = [
                    (state, state.num_tokens, target if admission is None else admission)
                    for state, target, admission in zip(states, targets, admissions, strict=True)
                ]
                self._pool.require(_blocks_needed(self._needs(highest)))
            return self._reserve(states, targets)

    def share_prefix_blocks(self, source: KvCacheHandle, target: KvCacheHandle, num_blocks: int) -> None:
        """The first `num_blocks` blocks of `source` become those of the empty `target`, in place of room it had there.

        Raises:
            InvalidInputError: the blocks are not all full of valid tokens, `target` is not empty or is `source`, or
                their namespaces differ.
        """
        check_count("num_blocks", num_blocks)
        with self._guard:
            giver, taker = self._state(source), self._state(target)
            if giver is taker:
                raise InvalidInputError("target: the same sequence as source")
            if giver.namespace != taker.namespace:
                raise InvalidInputError(f"target: namespace {taker.namespace!r}, expected {giver.namespace!r}")
            if taker.num_tokens > 0:
                raise InvalidInputError(f"target: holds {taker.num_tokens} tokens, expected an empty sequence")
            num_tokens = num_blocks * self.config.block_size
            if num_tokens > giver.num_tokens:
                full = giver.num_tokens // self.config.block_size
                raise InvalidInputError(f"num_blocks: {num_blocks}, expected at most the {full} full blocks of source")
            shared, dropped = giver.blocks[:num_blocks], taker.blocks[:num_blocks]
            if 0 in shared:
                raise InvalidInputError("source: the first of these blocks lie behind its sliding window")
            self._settle(taker)
            self._pool.share(shared)
            self._pool.release(dropped)
            taker.blocks = shared + taker.blocks[num_blocks:]
            taker.num_tokens = taker.num_cached_tokens = taker.num_written = num_tokens
            taker.chain = giver.chain.copy(num_tokens, num_blocks)

    def evict(self, num_blocks: int) -> int:
        """Withdraw up to `num_blocks` cached blocks that nobody uses, least recently used first; how many there were.

        Raises:
            InvalidInputError: `num_blocks` is negative.
        """
        check_count("num_blocks", num_blocks)
        with self._guard:
            return self._pool.evict(num_blocks)

    def clear_prefix_cache(self) -> None:
        """Withdraw every published block; those in use stay with their sequences."""
        with self._guard:
            self._prefixes.clear([handle._state for handle in self._handles.values()])

    def namespaces(self) -> tuple[Hashable, ...]:
        """Those in which blocks have been published, as far as they were not forgotten."""
        with self._guard:
            return tuple(self._prefixes.index.namespaces)

    def forget_namespace(self, namespace: Hashable) -> None:
        """Let no sequence of a namespace begin with what was published in it so far; those blocks age and go.

        Raises:
            InvalidInputError: a live sequence of the namespace holds tokens, and would publish them again.
        """
        with self._guard:
            for handle in self._handles.values():
                if handle.namespace == namespace and handle.num_tokens:
                    raise InvalidInputError(f"namespace: {namespace!r} is in use by {handle.request_id!r}")
            self._prefixes.index.forget_root(namespace)

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
        check_count("num_tokens", num_tokens)
        longest = self.config.max_seq_len
        return (longest is None or num_tokens <= longest) and self._blocks_for(num_tokens) <= self._pool.num_free

    def get_handle(self, request_id: SeqId) -> KvCacheHandle | None:
        """The live sequence of that name, or None."""
        return self._handles.get(request_id)

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
            InvalidInputError: there is no such layer.
        """
        self._check_layer(layer)
        return self._tensors.k_cache(layer)

    def v_cache(self, layer: int) -> torch.Tensor:
        """Values of one layer, as `k_cache`."""
        self._check_layer(layer)
        return self._tensors.v_cache(layer)

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
        host = self.host_metadata(items)
        return host.over(to_device(host.arrays, self.device))

    def host_metadata(self, items: Iterable[UnifiedBatchItem] | Iterable[tuple[KvCacheHandle, int]]) -> HostMetadata:
        """`build_metadata` before it goes to the device."""
        with self._guard:
            states, query_lens = self._new_tokens(items)
            lengths = np.array([state.num_tokens for state in states], np.int64)
            self._make_ready(states, (lengths + query_lens).tolist())
            table = self._table.gather(states)
        return make_host_metadata(lengths, query_lens, table, self.config.block_size)

    def write_kv(
        self, handle: KvCacheHandle, layer: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V of the token at `position`, [num_kv_heads, head_dim], or of consecutive ones from there, with a
        first axis. Slow: for tests and inspection. The length stays; positions may lie anywhere within the capacity.
        They are converted to the cache's dtype, e4m3 saturated at 448, and not scaled: scales belong to the kernels.

        Raises:
            InvalidInputError: layer, position or a shape does not fit.
            OutOfBlocksError: a shared block would have to be copied, and none is free.
        """
        self._check_layer(layer)
        check_count("position", position)
        if key.dim() == 2 and value.dim() == 2:
            key, value = key[None], value[None]
        self._tensors.check_rows(key, value)
        with self._guard:
            state = self._state(handle)
            end = position + len(key)
            if end > handle.capacity:
                raise InvalidInputError(f"position: {position}..{end}, expected within the capacity {handle.capacity}")
            self._check_seen(state, position, end)
            self._make_exclusive([(state, position, end)])
            if position < state.num_tokens:  # a rollback must not bring back what stood here
                self._settle(state)
            if len(key):  # what is written here need not be the K/V of the ids at these positions
                state.chain.cut(position, position // self.config.block_size)
            self._tensors.write(layer, self._slots(state, position, end), key, value)
            readable = max(state.num_tokens, state.num_written)
            if position <= readable:
                state.num_written = max(readable, end)

    def read_kv(
        self, handle: KvCacheHandle, layer: int, start: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at positions start..start + num_tokens, each [num_tokens, num_kv_heads, head_dim]. Slow.
        They are the stored values, in the cache's dtype: what a scaled cache stands for is these times its scales.

        Raises:
            InvalidInputError: there is no such layer, or a position holds nothing: it is not below `num_tokens`, and
                `write_kv` has not written everything from there up to it.
        """
        self._check_layer(layer)
        check_count("start", start)
        check_count("num_tokens", num_tokens)
        with self._guard:
            state = self._state(handle)
            end, readable = start + num_tokens, max(state.num_tokens, state.num_written)
            if end > readable:
                raise InvalidInputError(f"num_tokens: positions {start}..{end}, expected within the {readable} written")
            self._check_seen(state, start, end)
            return self._tensors.read(layer, self._slots(state, start, end))

    def stats(self) -> CacheStats:
        """The cache as of now."""
        with self._guard:
            free, total = self._pool.num_free, self._pool.num_blocks
            return CacheStats(
                num_blocks=total,
                free_blocks=free,
                used_blocks=total - free,
                shared_blocks=len(self._pool.shared),
                num_sequences=len(self._handles),
                num_tokens=sum(handle.num_tokens for handle in self._handles.values()),
                capacity_tokens=total * self.config.block_size,
                utilization=(total - free) / total,
                cow_copies=self._cow_copies,
                allocation_failures=self._pool.num_refused + self._host_pool.num_refused,
                bytes_per_block=self._tensors.bytes_per_block,
                cached_blocks=self._pool.num_cached,
                published_blocks=len(self._index.published),
                prefix_hits=self._prefixes.num_hits,
                prefix_misses=self._prefixes.num_misses,
                prefix_hit_tokens=self._prefixes.num_hit_tokens,
                evictions=self._prefixes.num_evictions,
                swapped_out_blocks=self._swapped_out_blocks,
                swapped_in_blocks=self._swapped_in_blocks,
                swap_blocks_free=self._host_pool.num_free,
            )

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
            references: Counter[int] = Counter()
            host_references: Counter[int] = Counter()
            reservations: set[KvSlotReservation] = set()
            for handle in self._handles.values():
                state = self._state(handle, may_be_swapped=True)
                held = [block for block in state.blocks if block]
                references.update(held)
                host_references.update((state.host_blocks or {}).values())
                if state.reservation is not None:
                    reservations.add(state.reservation)
                if len(set(held)) != len(held):
                    raise PagedError(f"{state.request_id!r} holds a block twice: {state.blocks}")
                if not state.num_cached_tokens <= state.num_tokens <= handle.capacity:
                    raise PagedError(
                        f"{state.request_id!r}: {state.num_cached_tokens} cached of {state.num_tokens} tokens, "
                        f"capacity {handle.capacity}"
                    )
            for reservation in reservations:
                references.update(reservation.kept_blocks)
            self._pool.check(references)
            self._host_pool.check(host_references)
            self._index.check()

    def _state(self, handle: KvCacheHandle, *, may_be_swapped: bool = False) -> SequenceState:
        state = handle._state
        if not state.is_valid:
            raise StaleHandleError(f"handle: {state.request_id!r} has been freed")
        if self._handles.get(state.request_id) is not handle:
            raise InvalidInputError(f"handle: {state.request_id!r} belongs to another manager")
        if state.host_blocks is not None and not may_be_swapped:
            raise StaleHandleError(f"handle: {state.request_id!r} is swapped out")
        return state

    def _add(self, state: SequenceState) -> KvCacheHandle:
        self._table.add(state)
        handle = KvCacheHandle(state, self._pool, self.config.block_size)
        self._handles[state.request_id] = handle
        return handle

    @staticmethod
    def _settle(state: SequenceState) -> None:
        if state.reservation is not None:
            state.reservation.settle(state)

    def _requested(self, requests: Sequence[KvSlotRequest]) -> list[SequenceState]:
        """The sequences of requests that are well formed."""
        handles, longest = self._handles, self.config.max_seq_len
        states = []
        for cache_id, target, admission in requests:
            handle = handles.get(cache_id)
            if handle is None:
                raise InvalidInputError(f"cache_id: {cache_id!r} names no live sequence")
            state = handle._state
            if state.host_blocks is not None:
                self._state(handle)
            highest = target if admission is None else admission
            if not state.num_tokens <= target <= highest:
                raise InvalidInputError(
                    f"target_len, admission_target_len: {target}, {admission} for {cache_id!r}, "
                    f"expected {state.num_tokens} <= target_len <= admission_target_len"
                )
            if longest is not None and highest > longest:
                self._check_length(highest)
            states.append(state)
        if len(set(map(id, states))) != len(states):
            repeated = Counter(cache_id for cache_id, _, _ in requests).most_common(1)[0][0]
            raise InvalidInputError(f"cache_id: {repeated!r} is given twice")
        return states

    def _reserve(self, states: Sequence[SequenceState], targets: Sequence[int]) -> KvSlotReservation:
        undo = self._make_room(self._unready(states, targets))
        for state in states:
            if state.reservation is not None:
                self._settle(state)
        return KvSlotReservation(self._guard, self._pool, states, targets, undo, self._on_commit)

    def _unready(self, states: Sequence[SequenceState], targets: Sequence[int]) -> list[_Span]:
        """The spans from each sequence's length to its target that cannot be written yet.

        Only the block that the length lies in can be shared or published: those after it hold no tokens.
        """
        block_size, shared, published = self.config.block_size, self._pool.shared, self._index.published
        unready = []
        for state, target in zip(states, targets, strict=True):
            start, blocks = state.num_tokens, state.blocks
            if target > start:
                if target > len(blocks) * block_size:
                    unready.append((state, start, target))
                elif state.reservation is None:  # an open one has seen to it
                    tail = blocks[start // block_size]
                    if tail in shared or tail in published:
                        unready.append((state, start, target))
        return unready

    def _needs(self, spans: Iterable[_Span]) -> list[_Need]:
        """What must change before the spans can be written; sequences that are ready are left out."""
        block_size, published = self.config.block_size, self._index.published
        needs = []
        for state, start, end in spans:
            if start >= end:
                continue
            blocks = state.blocks
            num_blocks = len(blocks)
            last = (end - 1) // block_size
            shared: list[int] = []
            stale: list[int] = []
            for i in range(start // block_size, min(last + 1, num_blocks)):
                if blocks[i] in self._pool.shared:
                    shared.append(i)
                elif blocks[i] in published:
                    stale.append(i)
            if last >= num_blocks or shared or stale:
                needs.append((state, shared, stale, max(0, last + 1 - num_blocks)))
        return needs

    def _make_room(self, spans: Iterable[_Span]) -> dict[SeqId, Undo]:
        """Give every sequence room up to its span's end, copies in place of the shared blocks the span writes to, and
        withdraw published blocks that are about to change.

        Returns, for every sequence whose blocks changed, what takes that back; the references of replaced blocks are
        now the caller's.
        """
        needs = self._needs(spans)
        if not needs:
            return {}
        taken = self._pool.allocate(_blocks_needed(needs))
        used = 0
        pairs: list[tuple[int, int]] = []
        grown: list[tuple[SequenceState, tuple[int, ...], Undo]] = []
        for state, shared, _, fresh in needs:
            if shared or fresh:
                undo = Undo(len(state.blocks), state.num_written, {index: state.blocks[index] for index in shared})
                blocks = list(state.blocks)
                for index, copy in zip(shared, taken[used:], strict=False):
                    blocks[index] = copy
                    pairs.append((state.blocks[index], copy))
                used += len(shared) + fresh
                blocks += taken[used - fresh : used]
                grown.append((state, tuple(blocks), undo))
        try:
            self._tensors.copy(pairs)
        except BaseException:
            self._pool.release(taken)
            raise
        for state, shared, stale, _ in needs:
            self._prefixes.withdraw([state.blocks[index] for index in stale])
            # A copy is not published, and neither is what will change: the chain goes on from before them.
            state.chain.withdraw(min([*shared, *stale], default=len(state.blocks)))
        for state, new_blocks, _ in grown:
            state.blocks = new_blocks
        self._cow_copies += len(pairs)
        return {state.request_id: undo for state, _, undo in grown}

    def _make_ready(self, states: list[SequenceState], targets: list[int]) -> None:
        """See that every sequence can be written from its length to its target without new room, and make it so where
        a block is shared or published.
        """
        reservation = states[0].reservation if states else None
        if reservation is not None and reservation.covers(states, targets):
            return
        unready = self._unready(states, targets)
        for state, _, target in unready:
            if target > len(state.blocks) * self.config.block_size:
                raise InvalidInputError(
                    f"items: {state.request_id!r} has no room for {target - state.num_tokens} more tokens"
                )
        self._make_exclusive(unready)

    def _make_exclusive(self, spans: Sequence[_Span]) -> None:
        """Make room, and keep nothing of the shared blocks that copies replaced."""
        for undo in self._make_room(spans).values():
            self._pool.release(list(undo.replaced.values()))

    def _on_commit(self, states: Sequence[SequenceState], token_ids: Sequence[Sequence[int]] | None) -> None:
        """After a reservation was committed: publish first, as blocks behind the window are given back then."""
        if token_ids is not None and self.config.enable_prefix_cache:
            for state, ids in zip(states, token_ids, strict=True):
                self._prefixes.append(state, ids)
        self._drop_unseen(states)

    def _drop_unseen(self, states: Iterable[SequenceState]) -> None:
        """Give back blocks that lie behind the sliding window of every later token."""
        if self.config.sliding_window is None:
            return
        for state in states:
            first = self._first_seen_block(state.num_tokens, ROLLBACK_SLACK)
            if any(state.blocks[:first]):
                self._release(state.blocks[:first])
                state.blocks = (0,) * first + state.blocks[first:]

    def _first_seen_block(self, num_tokens: int, slack: int) -> int:
        """Index of the first block that the token after `num_tokens`, or after `slack` fewer, can see."""
        window = self.config.sliding_window
        return 0 if window is None else max(0, num_tokens - slack - window + 1) // self.config.block_size

    def _check_seen(self, state: SequenceState, start: int, end: int) -> None:
        if start < end and 0 in state.blocks[start // self.config.block_size : self._blocks_for(end)]:
            raise InvalidInputError(f"positions {start}..{end} of {state.request_id!r} lie behind its sliding window")

    def _release(self, blocks: Sequence[int]) -> None:
        self._pool.release([block for block in blocks if block] if 0 in blocks else blocks)

    def _measure_pressure(self) -> MemoryPressure:
        available = self._pool.num_free / self._pool.num_blocks
        if available < self.config.high_watermark:
            return MemoryPressure.CRITICAL
        return MemoryPressure.HIGH if available < self.config.low_watermark else MemoryPressure.LOW

    def _check_new(self, request_id: SeqId) -> None:
        if request_id in self._handles:
            raise InvalidInputError(f"request_id: {request_id!r} names a live sequence")

    def _check_length(self, num_tokens: int) -> None:
        longest = self.config.max_seq_len
        if longest is not None and num_tokens > longest:
            raise SequenceTooLongError(f"{num_tokens} tokens, max_seq_len is {longest}")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.config.num_layers:
            raise InvalidInputError(f"layer: {layer}, expected 0 <= layer < {self.config.num_layers}")

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _slots(self, state: SequenceState, start: int, end: int) -> NDArray[np.int64]:
        blocks, within = np.divmod(np.arange(start, end), self.config.block_size)
        return np.array(state.blocks, np.int64)[blocks] * self.config.block_size + within

    def _new_tokens(
        self, items: Iterable[UnifiedBatchItem] | Iterable[tuple[KvCacheHandle, int]]
    ) -> tuple[list[SequenceState], NDArray[np.int64]]:
        """The sequences of a step, all of them able to run, and how many tokens each gets."""
        pairs: list[Any] = list(items)
        if pairs and isinstance(pairs[0], UnifiedBatchItem):
            pairs = [self._item_tokens(item) for item in pairs]
        states = [handle._state for handle, _ in pairs]
        is_owned = self._table.owns(states)
        if not is_owned or self._num_swapped:
            for handle, _ in pairs:
                self._state(handle)
        if not is_owned:
            raise InvalidInputError("items: a sequence is given twice")
        counts = np.array([count for _, count in pairs], np.int64)
        if counts.min(initial=0) < 0:
            raise InvalidInputError(f"items: {counts.min()} new tokens, expected at least 0")
        return states, counts

    def _item_tokens(self, item: UnifiedBatchItem) -> tuple[KvCacheHandle, int]:
        handle = item.kv_cache or self._handles.get(item.seq_id)
        if handle is None:
            raise InvalidInputError(f"items: {item.seq_id!r} names no live sequence")
        return handle, len(item.q_tokens)


def _blocks_needed(needs: Iterable[_Need]) -> int:
    return sum(len(shared) + fresh for _, shared, _, fresh in needs)
