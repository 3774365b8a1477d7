"""The KV cache manager: capacity, lengths, prefix caching, swap, and metadata of forwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from paged.cache.canary import Canaries
from paged.cache.events import CacheEvent, MemoryPressure
from paged.cache.guard import CacheGuard
from paged.cache.inspection import CacheStats, KvInspection, check_integrity, count_stats, recount
from paged.cache.kinds.all import make_kinds
from paged.cache.kinds.kind import CacheParts, Kind
from paged.cache.kinds.slots import SlotKind
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences, as_columns, as_pairs
from paged.cache.pins import PinnedPrefix, Pins
from paged.cache.pool import BlockPool
from paged.cache.prefix_cache import PrefixCache
from paged.cache.retention import MAX_TTL, Retention
from paged.cache.slot_allocator import KvSlotAllocator
from paged.cache.slot_reservation import KvSlotReservation, SequenceState
from paged.cache.swap_space import SwapSpace
from paged.cache.tensors import KvCacheTensors
from paged.cache.tiers.block_store import BlockStore
from paged.cache.tiers.files import FileRead, FileTier
from paged.cache.tiers.folder import CacheFolder
from paged.cache.tiers.host import HostTier
from paged.cache.tiers.shelf import HostShelf
from paged.cache.token_chain import TokenChain, pack
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core.errors import as_float, as_int, shown
from paged.seq_id import SeqId, as_namespace, as_seq_id
from paged.step.batch import KvSlotRequest, UnifiedBatchItem
from paged.step.metadata import AttentionMetadata
from paged.step.staging import to_device
from paged.step.step import Step
from paged.token_ids import as_token_ids


class PagedKvCacheManager(KvInspection):
    """KV cache of many sequences, in fixed-size blocks of one preallocated pool.

    Thread-safe. Every call is atomic: after any error it is rolled back. The only exception is cached blocks that it
    evicted and overwrote, which stay evicted. Callbacks run after the call has done its work. If a callback raises, a
    new sequence or reservation of the call is dropped and all else stays. SIGINT waits for the end of the call and then
    counts as a callback. A caller that was interrupted before it stored a handle gets the handle from `get_handle`.

    `num_tokens` of a handle counts positions that hold valid K/V. `capacity` counts positions that its blocks can hold.
    Blocks may be shared; a shared block is copied before it is written.

    Full blocks with known token ids are published. A new sequence of the same namespace that begins with the same
    tokens shares them. Published blocks that are freed stay findable until the pool needs their memory; the pool takes
    the least recently used first.

    on_fork: called with the source and the new sequence of every fork, for code that keeps further state per sequence.

    Methods that take a handle raise StaleHandleError if its sequence has been freed (except `free`) or is swapped out
    (except `free`, `swap_in` and `swap_out`). They raise InvalidInputError if it belongs to another manager.
    """

    on_fork: Callable[[KvCacheHandle, KvCacheHandle], None] | None = None
    # Whether the cache has memory for K/V; a cache without it only counts blocks and lengths.
    _has_memory = True

    def __init__(self, config: PagedKvCacheConfig) -> None:
        self.config = config
        self._fingerprint = b""
        # First, because it fails if memory is short.
        self._tensors = KvCacheTensors(config, has_memory=self._has_memory)
        self._guard = CacheGuard(self._measure_pressure)
        rollback = self._guard.rollback
        self._prefixes = PrefixCache(config, self._guard)
        self._pool = self._prefixes.pool
        parts = CacheParts(config, self._guard, self._tensors, self._prefixes.index, self._pool, BlockPool)
        self._kinds = make_kinds(parts)
        self.canaries: Canaries | None = None
        if self._tensors.canaries is not None:
            self.canaries = Canaries(parts)
            self._kinds = (self.canaries, *self._kinds)
        self._cutting = [kind for kind in self._kinds if type(kind).chunk_end is not Kind.chunk_end]
        self._prefixes.set_kinds(self._kinds)
        self._sequences = LiveSequences(config, self._pool, rollback)
        self._pins = Pins(config, self._guard, self._prefixes, self._sequences)
        self._slots = KvSlotAllocator(config, self._guard, self._prefixes, self._tensors, self._sequences)
        shelf = HostShelf(parts, 0, range(len(config.tables)), config.num_swap_blocks)
        if config.has_tier:
            slot_shelves = [kind.shelf for kind in self._kinds if isinstance(kind, SlotKind)]
            self._prefixes.tier = HostTier(parts, shelf, slot_shelves)
        if config.cache_folder is not None and config.has_tier:
            try:
                self.attach_store(CacheFolder(Path(config.cache_folder), config.cache_folder_bytes))
            except OSError as error:
                expected = f"a folder: {error}"
                raise InvalidInputError(f"cache_folder: {config.cache_folder}, expected {expected}") from error
        self._swap = SwapSpace(config, self._guard, self._prefixes, shelf)
        rollback.recount = partial(recount, self._sequences, self._prefixes, self._swap)
        self._handles = self._sequences.handles

    def allocate(
        self,
        request_id: SeqId,
        num_tokens: int = 0,
        *,
        token_ids: Iterable[int] | None = None,
        namespace: Hashable = None,
        from_files: FileRead | None = None,
        retention: Retention | None = None,
    ) -> KvCacheHandle:
        """Start a sequence with capacity for `num_tokens` or all `token_ids`, whichever is more.

        The sequence shares the blocks of the longest published prefix of `token_ids`, and has its length, or 0. The
        last of `token_ids` is never taken from the cache, because its logits are needed.

        Args:
            request_id: a str, or an int of 128 bits, that no live sequence has.
            num_tokens: positions to provide capacity for.
            token_ids: the prompt, in which a published prefix is searched for.
            namespace: prefixes are shared only within a namespace. None, a str, bytes, an int of 128 bits, or a tuple
                or frozenset of these.
            from_files: result of `read_files` for these ids. Without it, this call waits for files.
            retention: priority of the blocks that the sequence shares and publishes; None for the lowest.

        Raises:
            InvalidInputError: `request_id` is in use, an argument has the wrong type, `num_tokens` is negative, or a
                token id exceeds int32 among the ids looked up; `commit` checks all others.
            SequenceTooLongError: the sequence would exceed `max_seq_len`.
            OutOfBlocksError: the pool has too few free blocks.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        namespace = as_namespace("namespace", namespace)
        ids, capacity = None, num_tokens
        if token_ids is not None:
            ids = as_token_ids("token_ids", token_ids)
            capacity = max(num_tokens, len(ids))
            if from_files is None:
                from_files = self.read_files(ids, namespace=namespace)
            if from_files is not None:
                from_files.wait()
        with self._guard:
            seq_id = self._sequences.new_id(request_id)
            self._sequences.check_length(capacity)
            state = SequenceState(seq_id, namespace, retention=_retention_of(retention, ids))
            if self._sequences.pinned:
                self._pins.expire()
            if ids is None or not self.config.enable_prefix_cache:
                state.blocks = self._prefixes.allocate(-(-capacity // self.config.block_size))
            else:
                self._prefixes.begin(state, ids, capacity, from_files)
                for kind in self._kinds:
                    kind.drop([state])
            return self._new_handle(state)

    def read_files(self, token_ids: Iterable[int], *, namespace: Hashable = None) -> FileRead | None:
        """Start to read a prompt's missing blocks from `cache_folder`; None if the cache has no folder.

        Wait with `FileRead.wait`, which blocks no other call, then pass the result to `allocate`.
        """
        if self.files is None:
            return None
        ids, namespace = as_token_ids("token_ids", token_ids), as_namespace("namespace", namespace)
        with self._guard:
            return self._prefixes.read(ids, namespace)

    def extend(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Add `num_tokens` positions to the capacity and to the length; the caller writes the K/V.

        The same as `reserve` and `commit`, but the new positions hold zeros.

        Raises:
            InvalidInputError: `num_tokens` is negative.
            SequenceTooLongError: the sequence would exceed `max_seq_len`.
            OutOfBlocksError: the pool has too few free blocks.
            UnsupportedError: the model has recurrent layers, whose states only a forward advances.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            target = state.num_tokens + num_tokens
            for kind in self._kinds:
                kind.check_advance("extend", state, target)
            self._sequences.check_length(target)
            reservation = self._slots.reserve([state], [target])
            written = max(state.num_tokens, state.num_written)
            self._prefixes.overwrite(state.blocks)
            self._tensors.clear(state.blocks, written, max(written, target))
            reservation.commit()

    def advance(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Add `num_tokens` positions to the length; the caller has written their K/V.

        The same as the `commit` of a reservation, for capacity that needs none.

        Raises:
            InvalidInputError: `num_tokens` is negative or exceeds the capacity, or a table lacks blocks there;
                `reserve` and `build_metadata` allocate them.
            SequenceTooLongError: the sequence would exceed `max_seq_len`.
            UnsupportedError: the model has recurrent layers; use `reserve` and its `commit`.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            target = state.num_tokens + num_tokens
            if target > handle.capacity:
                raise InvalidInputError(f"num_tokens: length {target}, expected at most the capacity {handle.capacity}")
            self._sequences.check_length(target)
            for kind in self._kinds:
                kind.check_advance("advance", state, target)
            state.begin_change(self._guard.rollback)
            self._slots.arrive([state], [target])

    def commit(self, handle: KvCacheHandle, token_ids: Iterable[int]) -> None:
        """Publish the full blocks of written tokens; the same as `append_tokens` with all ids.

        Args:
            token_ids: the sequence's known ids from position 0 on.

        Raises:
            InvalidInputError: an id differs from the id given before for its position, or exceeds int32.
        """
        ids = as_token_ids("token_ids", token_ids)
        with self._guard:
            state = self._sequences.state(handle)
            self._prefixes.commit(state, ids)
            self._slots.keep([state])

    def append_tokens(self, items: Iterable[tuple[KvCacheHandle, Iterable[int]]]) -> None:
        """Note the newest token ids after a forward, from (handle, ids) pairs, and publish full blocks.

        The same as passing the ids to the `commit` of a reservation, but later. A sequence is skipped if its earlier
        ids are not all known.

        Raises:
            InvalidInputError: an id is not an integer of 32 bits.
        """
        handles, ids = as_pairs("items", items)
        if not set(map(type, ids)) <= {list} or not set(map(type, chain.from_iterable(ids))) <= {int}:
            ids = [as_token_ids("token_ids", token_ids) for token_ids in ids]
        pack(list(chain.from_iterable(ids)))
        with self._guard:
            states = [self._sequences.state(handle) for handle in handles]
            self._prefixes.append(states, ids)
            self._slots.keep(states)

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Roll a sequence back to its first `num_tokens` positions and free the blocks behind them.

        Raises:
            InvalidInputError: `num_tokens` is negative or exceeds the length, blocks within its sliding window have
                been freed, or recurrent layers keep no state at that position.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            if num_tokens > state.num_tokens:
                raise InvalidInputError(f"num_tokens: {num_tokens}, expected at most the length {state.num_tokens}")
            for kind in self._kinds:
                kind.check_truncate(state, num_tokens)
            state.begin_change(self._guard.rollback)
            for kind in self._kinds:
                kind.truncate(state, num_tokens)
            kept = self.config.blocks_for(num_tokens)
            dropped, state.blocks = state.blocks[kept:], state.blocks[:kept]
            self._pool.release(dropped)
            state.num_tokens = state.num_written = num_tokens
            state.num_cached_tokens = min(state.num_cached_tokens, num_tokens)
            state.chain.cut(num_tokens, num_tokens // self.config.block_size, self._guard.rollback)

    def fork(self, handle: KvCacheHandle, request_id: SeqId) -> KvCacheHandle:
        """Start a second sequence with the same tokens. Both share their blocks until one of them writes.

        Raises:
            InvalidInputError: `request_id` is in use, or neither str nor int.
        """
        with self._guard:
            source = self._sequences.state(handle)
            seq_id = self._sequences.new_id(request_id)
            source.begin_change(self._guard.rollback)
            blocks = source.blocks[: self.config.blocks_for(source.num_tokens)]
            self._pool.share(blocks)
            state = SequenceState(seq_id, source.namespace, blocks=blocks, num_tokens=source.num_tokens)
            state.chain = source.chain.copy(source.num_tokens, len(blocks))
            for kind in self._kinds:
                kind.fork(source, state)
            forked = self._new_handle(state)
            if self.on_fork is not None:
                self.on_fork(handle, forked)
            return forked

    def free(self, handle: KvCacheHandle) -> None:
        """Free a sequence; a second call does nothing. A block becomes free with its last reference.

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
            for kind in self._kinds:
                kind.release(state)
            state.blocks, state.chain = (), TokenChain()
            state.num_tokens = state.num_cached_tokens = state.num_written = 0
            self._sequences.remove(state)

    def swap_out(self, handle: KvCacheHandle) -> None:
        """Move a sequence's K/V to host memory and free its blocks; do nothing if it is swapped out.

        Blocks shared with other sequences stay on the device. Capacity beyond the length is freed.

        Raises:
            OutOfBlocksError: the host pool has too few free blocks.
        """
        with self._guard:
            self._swap.swap_out(self._sequences.state(handle, may_be_swapped=True))

    def swap_in(self, handle: KvCacheHandle) -> None:
        """Move a sequence's K/V back to the device; do nothing if it is not swapped out.

        Raises:
            OutOfBlocksError: the pool has too few free blocks.
        """
        with self._guard:
            self._swap.swap_in(self._sequences.state(handle, may_be_swapped=True))

    def reserve(self, requests: Iterable[KvSlotRequest]) -> KvSlotReservation:
        """Reserve capacity for every sequence up to its `target_len`; for all sequences or for none.

        `admission_target_len` reserves nothing. It only checks that all sequences would fit together at these lengths.

        Returns:
            The reservation, a context manager. Its `commit` sets the new lengths.

        Raises:
            InvalidInputError: an id is unknown or given twice, or a length is below the sequence's own.
            SequenceTooLongError: a sequence would exceed `max_seq_len`.
            OutOfBlocksError: the pool has too few free blocks.
        """
        columns = as_columns(requests)
        with self._guard:
            states, targets, highest = self._sequences.requested(columns)
            if highest is not None:
                self._slots.require(states, highest)
            return self._slots.reserve(states, targets)

    def reserve_step(self, handles: list[KvCacheHandle], counts: list[int]) -> tuple[KvSlotReservation, Step]:
        """Reserve capacity for new tokens of every sequence, for all or for none, and build their forward's metadata.

        counts: number of new tokens of each sequence, not negative. Raises the same errors as `reserve`.
        """
        step = Step(handles, counts)
        self.reserve_for(step)
        assert step.reservation is not None
        return step.reservation, step

    def reserve_for(self, step: Step) -> None:
        """Reserve capacity for the new tokens of a step, for all sequences or for none, and fill in its metadata.

        Raises the same errors as `reserve`.
        """
        with self._guard:
            if self._sequences.pinned:
                self._pins.expire()
            self._slots.reserve_for(step, any_swapped=self._swap.num_sequences > 0)

    def share_prefix_blocks(self, source: KvCacheHandle, target: KvCacheHandle, num_blocks: int) -> None:
        """Replace the blocks of the empty sequence `target` by the first `num_blocks` blocks of `source`.

        Raises:
            InvalidInputError: a block is not full of valid tokens, `target` is not empty or is `source`, their
                namespaces differ, or a sliding window has freed some of the blocks.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self._guard:
            self._prefixes.share(self._sequences.state(source), self._sequences.state(target), num_blocks)

    def pin(self, token_ids: Iterable[int], *, namespace: Hashable = None, ttl_s: float | None = None) -> PinnedPrefix:
        """Keep the longest cached prefix of `token_ids` until its `release`, so that prompts always find it.

        All pins together keep at most `max_pinned_fraction` of the pool; `clear_prefix_cache` and `forget_namespace`
        release them. Blocks in a tier are not loaded.

        Args:
            token_ids: the prefix. Only its full blocks can be cached; with recurrent layers, or with a sliding window,
                it ends where a prompt could begin.
            namespace: namespace in which the prefix is cached, see `allocate`.
            ttl_s: seconds after which the pin is released; None for no limit.

        Raises:
            InvalidInputError: no block of the prefix is cached, or an argument has the wrong type.
            PinBudgetError: pins would keep more than `max_pinned_fraction` of the blocks or states.
        """
        ids, namespace = as_token_ids("token_ids", token_ids), as_namespace("namespace", namespace)
        if ttl_s is not None:
            ttl_s = as_float("ttl_s", ttl_s, 0.0, MAX_TTL)
        with self._guard:
            pin = self._pins.add(ids, namespace, ttl_s)
            self._guard.give_up_by(pin.release)
            return pin

    def release(self, pin: PinnedPrefix) -> None:
        """Release a pin; the same as `pin.release()`.

        Raises:
            InvalidInputError: `pin` is no pin of this manager.
        """
        if not isinstance(pin, PinnedPrefix) or pin._pins is not self._pins:
            raise InvalidInputError(f"pin: {shown(pin)}, expected a PinnedPrefix of this manager")
        self._pins.release(pin)

    def evict(self, num_blocks: int) -> int:
        """Withdraw up to `num_blocks` free published blocks in the order of eviction; return their number.

        Raises:
            InvalidInputError: `num_blocks` is negative.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self._guard:
            return self._pool.evict(num_blocks)

    def warm_up(self) -> None:
        """Compile the kernels of the cache, so that no fork and no check waits for them."""
        with self._guard:
            self._tensors.copy([(0, 0)])
        if self.canaries is not None:
            self.canaries.warm_up()

    def clear_prefix_cache(self) -> None:
        """Release all pins and withdraw every published block; blocks in use stay with their sequences."""
        with self._guard:
            self._pins.release_all()
            self._prefixes.clear(self._sequences.states())

    def namespaces(self) -> tuple[Hashable, ...]:
        """Return the namespaces with published blocks that a prompt can begin with."""
        with self._guard:
            return tuple(self._prefixes.index.namespaces)

    def forget_namespace(self, namespace: Hashable) -> None:
        """Hide all blocks published in a namespace from new sequences; they are evicted as they age.

        Pins of the namespace are released.

        Raises:
            InvalidInputError: a live sequence of the namespace holds tokens and would publish them again.
        """
        namespace = as_namespace("namespace", namespace)
        with self._guard:
            self._sequences.check_unused(namespace)
            self._pins.release_namespace(namespace)
            self._prefixes.index.retire(namespace)

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Identify the model weights, so that only files of the same weights and layout are found in `cache_folder`.

        If there is a folder or a store, the prefix cache is cleared. A store attached later gets the same fingerprint.
        """
        self._fingerprint = fingerprint
        if self.files is not None:
            self.clear_prefix_cache()
            self.files.identify(fingerprint)

    def close_tiers(self, timeout_s: float = 5.0) -> None:
        """Write free published blocks to `cache_folder` until the timeout, then stop using the folder."""
        with self._guard:
            self._prefixes.close_tiers(timeout_s)

    def tell_apart(self, identify: Callable[[Hashable], Hashable]) -> None:
        """Make tiers use `identify(namespace)` in their hashes, for namespaces whose meaning may change.

        Without a tier nothing changes. For blocks published on the device, call `forget_namespace`.
        """
        if self.config.has_tier:
            self._prefixes.index.identify = identify

    @property
    def files(self) -> FileTier | None:
        """Reader and writer of `cache_folder` or of an attached store; None if there is neither."""
        return None if self._prefixes.tier is None else self._prefixes.tier.files

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use. Cheaper than `stats`, which reads every sequence."""
        return (self._pool.num_blocks - self._pool.num_free) * self._tensors.bytes_per_block

    @property
    def pressure(self) -> MemoryPressure:
        """Current memory pressure, from the fraction of blocks that can be handed out, evictable blocks included."""
        with self._guard:
            return self._measure_pressure()

    def on_pressure(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Register a callback that gets the new level when `pressure` changes. It runs outside the lock."""
        with self._guard:
            self._guard.listeners.add_pressure_callback(callback)

    def subscribe(self, callback: Callable[[CacheEvent], None], *, with_host: bool = False) -> None:
        """Register a callback for BlocksStored, BlockRemoved and CacheCleared. It runs in order, outside the lock.

        with_host: also call it for HostBlockStored and HostBlockRemoved, the events of the host tier.
        """
        with self._guard:
            self._guard.listeners.add_event_callback(callback, with_host=with_host)

    def can_allocate(self, num_tokens: int) -> bool:
        """Return whether `allocate` would find capacity for a new sequence of `num_tokens`.

        Raises:
            InvalidInputError: `num_tokens` is negative.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        longest = self.config.max_seq_len
        needed = self.config.blocks_to_begin(num_tokens)
        return (longest is None or num_tokens <= longest) and needed <= self._pool.num_free

    def get_handle(self, request_id: SeqId) -> KvCacheHandle | None:
        """Return the live sequence with this request id, or None.

        Raises:
            InvalidInputError: `request_id` is neither str nor int.
        """
        return self._handles.get(as_seq_id("request_id", request_id))

    def get_handles(self, request_ids: Iterable[SeqId]) -> list[KvCacheHandle | None]:
        """Return the live sequence or None for each id. The ids must be str or int; this is not checked."""
        return list(map(self._handles.get, request_ids))

    def handles(self) -> tuple[KvCacheHandle, ...]:
        """Return all live sequences, oldest first."""
        with self._guard:
            return tuple(self._handles.values())

    def cached_blocks(self) -> tuple[int, ...]:
        """Return the free blocks that a prompt may begin with, least recently used first."""
        with self._guard:
            return tuple(self._pool.cached)

    def chunk_end(self, handle: KvCacheHandle, limit: int, total: int, *, may_leave_grid: bool = True) -> int:
        """Return the end position, at most `limit`, of the next chunk of a prompt with `total` tokens.

        Without recurrent layers this is `limit`. With them, chunks end at multiples of 64, so that a prompt's results
        do not depend on other requests, and at positions whose state is kept for the prefix cache.

        may_leave_grid: whether a chunk may end before the next multiple of 64 if `limit` is smaller.
        """
        if not self._cutting:
            return limit
        with self._guard:
            state = self._sequences.state(handle)
            for kind in self._cutting:
                limit = min(limit, kind.chunk_end(state, limit, total, may_leave_grid=may_leave_grid))
            return limit

    def fitting_tokens(self, handle: KvCacheHandle, limit: int, planned: Iterable[tuple[KvCacheHandle, int]]) -> int:
        """Return how many of a sequence's next `limit` tokens the free blocks allow in a step.

        planned: pairs of another sequence of the step and its number of new tokens.
        """
        handles, counts = as_pairs("planned", planned)  # without the lock: it runs caller code
        with self._guard:
            return self._slots.fitting(handle, limit, zip(handles, counts, strict=True))

    def build_metadata(
        self, items: Iterable[UnifiedBatchItem] | Iterable[tuple[KvCacheHandle, int]]
    ) -> AttentionMetadata:
        """Build the metadata of a forward. Each sequence's new tokens follow its `num_tokens`.

        Args:
            items: pairs of a handle and a number of new tokens, or batch items. A batch item without `kv_cache` stands
                for the sequence `seq_id`.

        Raises:
            InvalidInputError: a sequence is unknown, given twice, or lacks capacity for its tokens.
            OutOfBlocksError: a shared block has to be copied and no block is free. This cannot happen after `reserve`.
                Recurrent layers need `reserve` first.
        """
        handles, counts = as_pairs("items", items, self._sequences.item_pair)  # without the lock: it runs caller code
        with self._guard:  # for the whole call, so that block copies are rolled back on failure
            step = self._slots.ready_step(handles, counts, any_swapped=self._swap.num_sequences > 0)
            return step.over(to_device(step.arrays, self.device))

    def stats(self) -> CacheStats:
        """Count the cache's blocks, sequences and events."""
        with self._guard:
            return count_stats(
                self.config, self._sequences, self._pins, self._prefixes, self._swap, self._tensors, self._guard
            )

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return `stats()`, the pressure and histograms of sampled blocks as a dict, ready for JSON.

        Entry i of `block_lifetimes_ms` and `block_reuse_gaps_ms` counts ages from 2^(i - 1) to 2^i ms. The first entry
        counts ages below 1 ms, the last entry all longer ages.
        """
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

        With PAGED_CANARY=1, also read the canaries of all sequences, swapped ones too, and of all published blocks.

        Raises:
            PagedError: a count is wrong; the message names the first error.
            CanaryError: a slot holds another token.
        """
        with self._guard:
            check_integrity(self.config, self._sequences, self._prefixes, self._swap.shelf.pool)

    def attach_store(self, store: BlockStore) -> None:
        """Also write the blocks of the host tier to `store`, and look there for blocks that a prompt begins with.

        The store replaces a cache folder. Call `set_fingerprint` before or after this call to identify the weights.

        Raises:
            InvalidInputError: `store` is no BlockStore, or the cache has no host tier.
            UnsupportedError: other ranks mirror this cache's memory, and would not get the store's blocks.
        """
        tier = self._prefixes.tier
        if tier is None or not isinstance(store, BlockStore):
            raise InvalidInputError(f"store: {shown(store)}, expected a BlockStore, and host_cache_bytes above 0")
        if self._tensors.listener is not None:
            raise UnsupportedError("attach_store: other ranks mirror this cache; expected a model of one rank")
        tier.attach(store, self._fingerprint)

    def _new_handle(self, state: SequenceState) -> KvCacheHandle:
        """Register a sequence that this call has made."""
        handle = self._sequences.add(state)
        self._guard.give_up_by(partial(self.free, handle))
        return handle

    def _measure_pressure(self) -> MemoryPressure:
        available = self._pool.num_free / self._pool.num_blocks
        if available < self.config.high_watermark:
            return MemoryPressure.CRITICAL
        return MemoryPressure.HIGH if available < self.config.low_watermark else MemoryPressure.LOW


def _retention_of(retention: Retention | None, token_ids: list[int] | None) -> Retention | None:
    """Check the argument of `allocate`; return it with its number of tokens."""
    if retention is None:
        return None
    if not isinstance(retention, Retention):
        raise InvalidInputError(f"retention: {shown(retention)}, expected a Retention")
    if token_ids is None:
        return retention
    return retention.of_prompt(len(token_ids))
