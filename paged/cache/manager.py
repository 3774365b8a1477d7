"""The KV cache manager: capacity, lengths, prefix caching and swap of sequences, and metadata of forwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from paged.batch import KvSlotRequest, UnifiedBatchItem
from paged.cache.events import CacheEvent, MemoryPressure
from paged.cache.guard import CacheGuard
from paged.cache.inspection import CacheStats, KvInspection, check_integrity, count_stats, recount
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences, as_columns, as_pairs
from paged.cache.pool import BlockPool
from paged.cache.prefix_cache import PrefixCache
from paged.cache.recurrent_states import RecurrentStates
from paged.cache.slot_allocator import KvSlotAllocator, SlidingWindow
from paged.cache.slot_reservation import KvSlotReservation, SequenceState
from paged.cache.swap_space import SwapSpace
from paged.cache.tensors import KvCacheTensors
from paged.cache.tiers.block_store import BlockStore
from paged.cache.tiers.files import FileRead, FileTier
from paged.cache.tiers.folder import CacheFolder
from paged.cache.tiers.host import HostTier
from paged.cache.token_chain import TokenChain, pack
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.common.scalars import as_int, shown
from paged.metadata import AttentionMetadata, HostMetadata
from paged.seq_id import SeqId, as_namespace, as_seq_id
from paged.staging import to_device
from paged.token_ids import as_token_ids


class PagedKvCacheManager(KvInspection):
    """The KV cache of many sequences, in fixed-size blocks of one preallocated pool.

    Thread-safe. Every call is atomic: after any error it is rolled back. Only cached blocks that it has evicted and
    overwritten stay evicted. An exception of a callback comes after the call has done its work; only a new sequence or
    reservation is then dropped. SIGINT during a call counts as one: the program's handler runs at the end of the call.
    A caller interrupted before it stored a handle finds it by `get_handle`.

    `num_tokens` of a handle counts positions that hold valid K/V. `capacity` counts positions that its blocks can hold.
    Blocks may be shared; a shared block is copied before it is written.

    Full blocks whose token ids are known are published. A new sequence of the same namespace that begins with the same
    tokens shares them. Freed blocks that are published stay findable until the pool needs them, least recently used
    first.

    on_fork: called with the source and the new sequence of every fork, for owners of more state per sequence.

    Methods that take a handle raise StaleHandleError if its sequence has been freed (except `free`) or is swapped out
    (except `free`, `swap_in` and `swap_out`). They raise InvalidInputError if it belongs to another manager.
    """

    on_fork: Callable[[KvCacheHandle, KvCacheHandle], None] | None = None

    def __init__(self, config: PagedKvCacheConfig) -> None:
        self.config = config
        self._fingerprint = b""
        self._tensors = KvCacheTensors(config)  # first: without memory for it, nothing else is needed
        self._guard = CacheGuard(self._measure_pressure)
        rollback = self._guard.rollback
        self._prefixes = PrefixCache(config, self._guard)
        self._pool = self._prefixes.pool
        self._window = SlidingWindow(config, self._pool, rollback)
        if self._tensors.states is not None:
            self._prefixes.recurrent = RecurrentStates(config, self._tensors.states, self._guard, self._prefixes.index)
        self._recurrent = self._prefixes.recurrent
        self._sequences = LiveSequences(config, self._pool, rollback)
        self._slots = KvSlotAllocator(config, self._guard, self._prefixes, self._tensors, self._window, self._sequences)
        num_host_blocks = self._tensors.num_host_blocks
        host_pool = BlockPool(num_host_blocks, rollback=rollback)
        if config.has_tier:
            tier = HostTier(config, self._tensors, self._prefixes.index, self._guard)
            host_pool = tier.pool = BlockPool(num_host_blocks, tier.entries.keys(), tier.drop, rollback)
            self._prefixes.tier = tier
            if self._recurrent is not None:
                tier.states = self._recurrent.tier
            if config.cache_folder is not None:
                try:
                    self.attach_store(CacheFolder(Path(config.cache_folder), config.cache_folder_bytes))
                except OSError as error:
                    raise InvalidInputError(
                        f"cache_folder: {config.cache_folder}, expected a folder: {error}"
                    ) from error
        self._swap = SwapSpace(config, self._guard, self._prefixes, self._tensors, host_pool)
        rollback.recount = partial(recount, self._sequences, self._prefixes, self._swap.pool)
        self._handles = self._sequences.handles

    def allocate(
        self,
        request_id: SeqId,
        num_tokens: int = 0,
        *,
        token_ids: Iterable[int] | None = None,
        namespace: Hashable = None,
        from_files: FileRead | None = None,
    ) -> KvCacheHandle:
        """Start a sequence with capacity for `num_tokens`, or for `token_ids` if there are more of them.

        The length is that of the longest published prefix of `token_ids`, whose blocks the sequence shares, or 0. The
        last of `token_ids` is never taken from the cache, because its logits are needed.

        Args:
            request_id: a str, or an int of 128 bits, that no live sequence has.
            num_tokens: positions to provide capacity for.
            token_ids: the prompt, to search for a published prefix.
            namespace: prefixes are shared only within one. None, a str, bytes, an int of 128 bits, or a tuple or
                frozenset of these.
            from_files: what `read_files` has returned for these ids. Without it, this call waits for files.

        Raises:
            InvalidInputError: `request_id` is in use, an argument has another type, `num_tokens` is negative, or a
                token id that was looked up exceeds int32; `commit` checks the others.
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
            name = self._sequences.new_name(request_id)
            self._sequences.check_length(capacity)
            state = SequenceState(name, namespace)
            if ids is None or not self.config.enable_prefix_cache:
                state.blocks = self._prefixes.allocate(-(-capacity // self.config.block_size))
            else:
                self._prefixes.begin(state, ids, capacity, from_files)
                self._window.drop_unseen([state])
            return self._new_handle(state)

    def read_files(self, token_ids: Iterable[int], *, namespace: Hashable = None) -> FileRead | None:
        """Begin to read blocks that a prompt continues with from `cache_folder`; None if the cache has none.

        The prompt waits by `FileRead.wait`, which holds up nobody else, and takes the blocks by `allocate`.
        """
        if self.files is None:
            return None
        ids, namespace = as_token_ids("token_ids", token_ids), as_namespace("namespace", namespace)
        with self._guard:
            return self._prefixes.read(ids, namespace)

    def extend(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Add capacity for `num_tokens` more positions and advance the length; the caller writes the K/V.

        Until it does, the new positions hold zeros.

        Raises:
            InvalidInputError: `num_tokens` is negative.
            SequenceTooLongError: the sequence would exceed `max_seq_len`.
            OutOfBlocksError: the pool has too few free blocks.
            UnsupportedError: the model has recurrent layers, whose states only a forward advances.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        self._refuse_states("extend")
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
        """Mark `num_tokens` more positions as holding valid K/V.

        Raises:
            InvalidInputError: `num_tokens` is negative or exceeds the capacity, or a table lacks blocks there, which
                `reserve` and `build_metadata` allocate.
            SequenceTooLongError: the sequence would exceed `max_seq_len`.
            UnsupportedError: the model has recurrent layers; use `reserve` and its `commit`.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        self._refuse_states("advance")
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
        """Publish the full blocks that have been written.

        Args:
            token_ids: the sequence's ids from position 0 on, as far as they are known.

        Raises:
            InvalidInputError: the ids contradict those given before, or one exceeds int32.
        """
        ids = as_token_ids("token_ids", token_ids)
        with self._guard:
            state = self._sequences.state(handle)
            self._prefixes.commit(state, ids)
            if self._recurrent is not None:
                self._recurrent.keep([], [state])

    def append_tokens(self, items: Iterable[tuple[KvCacheHandle, Iterable[int]]]) -> None:
        """Record the newest token ids of (handle, ids) pairs after a forward, and publish full blocks.

        A sequence is skipped if its earlier ids are not all known.

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
            if self._recurrent is not None:
                self._recurrent.keep([], states)

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Roll a sequence back to its first `num_tokens` positions and free the blocks behind them.

        Raises:
            InvalidInputError: `num_tokens` is negative or exceeds the length, or blocks that its sliding window needs
                have been freed, or recurrent layers keep no state there.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            if num_tokens > state.num_tokens:
                raise InvalidInputError(f"num_tokens: {num_tokens}, expected at most the length {state.num_tokens}")
            self._window.check_rollback(state, num_tokens)
            state.begin_change(self._guard.rollback)
            if self._recurrent is not None:
                self._recurrent.truncate(state, num_tokens)
            kept = self.config.blocks_for(num_tokens)
            dropped, state.blocks = state.blocks[kept:], state.blocks[:kept]
            self._pool.release(dropped)
            state.num_tokens = state.num_written = num_tokens
            state.num_cached_tokens = min(state.num_cached_tokens, num_tokens)
            state.chain.cut(num_tokens, num_tokens // self.config.block_size, self._guard.rollback)

    def fork(self, handle: KvCacheHandle, request_id: SeqId) -> KvCacheHandle:
        """Start a second sequence with the same tokens; both share their blocks until one of them writes.

        Raises:
            InvalidInputError: `request_id` is in use, or neither str nor int.
        """
        with self._guard:
            source = self._sequences.state(handle)
            name = self._sequences.new_name(request_id)
            source.begin_change(self._guard.rollback)
            blocks = source.blocks[: self.config.blocks_for(source.num_tokens)]
            self._pool.share(blocks)
            state = SequenceState(name, source.namespace, blocks=blocks, num_tokens=source.num_tokens)
            state.chain = source.chain.copy(source.num_tokens, len(blocks))
            if self._recurrent is not None:
                self._recurrent.fork(source, state)
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
            if self._recurrent is not None:
                self._recurrent.release(state)
            state.blocks, state.chain = (), TokenChain()
            state.num_tokens = state.num_cached_tokens = state.num_written = 0
            self._sequences.remove(state)

    def swap_out(self, handle: KvCacheHandle) -> None:
        """Move a sequence's K/V to host memory and free its blocks; does nothing if it is swapped out.

        Blocks that other sequences share stay on the device. Capacity beyond the length is freed.

        Raises:
            OutOfBlocksError: the host pool has too few free blocks.
        """
        with self._guard:
            self._swap.swap_out(self._sequences.state(handle, may_be_swapped=True))

    def swap_in(self, handle: KvCacheHandle) -> None:
        """Move a sequence's K/V back to the device; does nothing if it is not swapped out.

        Raises:
            OutOfBlocksError: the pool has too few free blocks.
        """
        with self._guard:
            self._swap.swap_in(self._sequences.state(handle, may_be_swapped=True))

    def reserve(self, requests: Iterable[KvSlotRequest]) -> KvSlotReservation:
        """Reserve capacity for every sequence up to its `target_len`: for all of them or for none.

        `admission_target_len` reserves nothing. It only requires that all sequences would fit at those lengths
        together.

        Returns:
            The reservation, a context manager; its `commit` sets the new lengths.

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

    def reserve_step(self, handles: list[KvCacheHandle], counts: list[int]) -> tuple[KvSlotReservation, HostMetadata]:
        """Reserve capacity for new tokens of every sequence, for all or for none, and build their forward's metadata.

        counts: number of new tokens of each, not negative. Errors are those of `reserve`.
        """
        with self._guard:
            return self._slots.reserve_step(handles, counts, any_swapped=self._swap.num_sequences > 0)

    def share_prefix_blocks(self, source: KvCacheHandle, target: KvCacheHandle, num_blocks: int) -> None:
        """Replace the blocks of the empty sequence `target` by the first `num_blocks` blocks of `source`.

        Raises:
            InvalidInputError: the blocks are not all full of valid tokens, `target` is not empty or is `source`, their
                namespaces differ, or a sliding window has freed some of the blocks.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self._guard:
            self._prefixes.share(self._sequences.state(source), self._sequences.state(target), num_blocks)

    def evict(self, num_blocks: int) -> int:
        """Withdraw up to `num_blocks` free published blocks, least recently used first; return their number.

        Raises:
            InvalidInputError: `num_blocks` is negative.
        """
        num_blocks = as_int("num_blocks", num_blocks)
        with self._guard:
            return self._pool.evict(num_blocks)

    def warm_up(self) -> None:
        """Compile the kernel that copies blocks, so that no fork waits for it."""
        with self._guard:
            self._tensors.copy([(0, 0)])

    def clear_prefix_cache(self) -> None:
        """Withdraw every published block; blocks in use stay with their sequences."""
        with self._guard:
            self._prefixes.clear(self._sequences.states())

    def namespaces(self) -> tuple[Hashable, ...]:
        """Return the namespaces in which a prompt can begin with a published block."""
        with self._guard:
            return tuple(self._prefixes.index.namespaces)

    def forget_namespace(self, namespace: Hashable) -> None:
        """Make all blocks published in a namespace unfindable for new sequences; they are evicted as they age.

        Raises:
            InvalidInputError: a live sequence of the namespace holds tokens, and would publish them again.
        """
        namespace = as_namespace("namespace", namespace)
        with self._guard:
            self._sequences.check_unused(namespace)
            self._prefixes.index.retire(namespace)

    def set_fingerprint(self, fingerprint: bytes) -> None:
        """Name the weights that K/V are of; only files of the same weights and layout are found in `cache_folder`.

        With a folder or a store, the prefix cache is cleared. A store that is attached later takes the name over.
        """
        self._fingerprint = fingerprint
        if self.files is not None:
            self.clear_prefix_cache()
            self.files.identify(fingerprint)

    def close_tiers(self, timeout_s: float = 5.0) -> None:
        """Write free published blocks to `cache_folder`, and use it no more; what takes longer is dropped."""
        with self._guard:
            self._prefixes.close_tiers(timeout_s)

    def tell_apart(self, identify: Callable[[Hashable], Hashable]) -> None:
        """Let tiers know namespaces by what `identify` returns, which changes when a name gets another meaning.

        Without a tier nothing changes. `forget_namespace` is for what has been published on the device.
        """
        if self.config.has_tier:
            self._prefixes.index.identify = identify

    @property
    def files(self) -> FileTier | None:
        """What reads and writes `cache_folder`, or an attached store; None if there is neither."""
        return None if self._prefixes.tier is None else self._prefixes.tier.files

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use; cheaper than `stats`, which reads every sequence."""
        return (self._pool.num_blocks - self._pool.num_free) * self._tensors.bytes_per_block

    @property
    def pressure(self) -> MemoryPressure:
        """Current memory pressure, by the fraction of blocks that can be handed out, evictable ones included."""
        with self._guard:
            return self._measure_pressure()

    def on_pressure(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Register a callback that gets the new level whenever `pressure` changes; it runs outside the lock."""
        with self._guard:
            self._guard.listeners.add_pressure_callback(callback)

    def subscribe(self, callback: Callable[[CacheEvent], None], *, with_host: bool = False) -> None:
        """Register a callback for every BlocksStored, BlockRemoved and CacheCleared, in order, outside the lock.

        with_host: also for HostBlockStored and HostBlockRemoved, by which blocks come to the host tier and leave it.
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
        """Return what `get_handle` returns for each id; all must be str or int, which is not checked."""
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
        """Return where a prompt chunk of at most `limit` of `total` tokens ends, counted from the prompt's start.

        Without recurrent layers this is `limit`. With them, chunks end at multiples of 64, so that a prompt's numbers
        do not depend on what else runs, and where a state is kept for the prefix cache.

        may_leave_grid: whether a chunk that does not reach the next multiple of 64 runs nevertheless.
        """
        if self._recurrent is None:
            return limit
        with self._guard:
            state = self._sequences.state(handle)
            return self._recurrent.chunk_end(state, limit, total, may_leave_grid=may_leave_grid)

    def fitting_tokens(self, handle: KvCacheHandle, limit: int, planned: Iterable[tuple[KvCacheHandle, int]]) -> int:
        """Return how many of the next `limit` tokens of a sequence a step can write.

        planned: other sequences of the step, and the number of new tokens of each.
        """
        handles, counts = as_pairs("planned", planned)  # without the lock: it runs caller code
        with self._guard:
            return self._slots.fitting(handle, limit, zip(handles, counts, strict=True))

    def build_metadata(
        self, items: Iterable[UnifiedBatchItem] | Iterable[tuple[KvCacheHandle, int]]
    ) -> AttentionMetadata:
        """Build the metadata of a forward whose new tokens follow the `num_tokens` that each sequence holds.

        Args:
            items: pairs of a handle and a number of new tokens; or batch items, of which one without `kv_cache` means
                the sequence `seq_id`.

        Raises:
            InvalidInputError: a sequence is unknown, given twice, or lacks capacity for its tokens.
            OutOfBlocksError: a shared block has to be copied and none is free. This cannot happen after `reserve`.
                Recurrent layers need `reserve` first.
        """
        handles, counts = as_pairs("items", items, self._sequences.item_pair)  # without the lock: it runs caller code
        with self._guard:  # to the end, so that block copies are rolled back on failure
            host = self._slots.ready_step(handles, counts, any_swapped=self._swap.num_sequences > 0)
            return host.over(to_device(host.arrays, self.device))

    def stats(self) -> CacheStats:
        """Count the cache's blocks, sequences and events."""
        with self._guard:
            return count_stats(self.config, self._sequences, self._prefixes, self._swap, self._tensors, self._guard)

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return `stats()`, the pressure and histograms of sampled blocks as a dict, ready for JSON.

        Entry i of `block_lifetimes_ms` and `block_reuse_gaps_ms` counts ages from 2^(i - 1) to 2^i ms, the first entry
        all below 1 ms, the last all above.
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

        Raises:
            PagedError: a count is wrong; the message names the first error.
        """
        with self._guard:
            check_integrity(self._sequences, self._prefixes, self._swap.pool)

    def attach_store(self, store: BlockStore) -> None:
        """Keep blocks that go to host memory in a store, too, and look there for those that a prompt begins with.

        It takes the place of a cache folder. `set_fingerprint`, before or after this call, names the weights.

        Raises:
            InvalidInputError: it is no BlockStore, or the cache has no host tier.
            UnsupportedError: other ranks mirror the memory; they would not get what the store returns.
        """
        config, storage, tier = self.config, self._tensors.storage, self._prefixes.tier
        if tier is None or not isinstance(store, BlockStore):
            raise InvalidInputError(f"store: {shown(store)}, expected a BlockStore, and host_cache_bytes above 0")
        if self._tensors.listener is not None:
            raise UnsupportedError("attach_store: other ranks mirror this cache; expected a model of one rank")
        layout = {
            "dtype": str(storage.dtype),
            "device": storage.device.type,
            "block_size": config.block_size,
            "slots": config.slots,
            "rows_per_slot": config.rows_per_slot,
            "tables": config.tables,
        }
        num_bytes = [self._tensors.host.num_block_bytes] * len(config.tables)
        is_needed = [table.sliding_window is None for table in config.tables]
        if tier.states is not None and self._tensors.states is not None:
            layout["states"] = self._tensors.states.layout
            num_bytes.append(tier.states.num_file_bytes)
            is_needed.append(False)
        tier.files = FileTier(store, repr(layout), config.block_size, num_bytes, is_needed)
        tier.files.identify(self._fingerprint)
        if tier.states is not None:
            tier.states.files = tier.files

    def _new_handle(self, state: SequenceState) -> KvCacheHandle:
        """Register a sequence that this call has made."""
        handle = self._sequences.add(state)
        self._guard.give_up_by(partial(self.free, handle))
        return handle

    def _refuse_states(self, call: str) -> None:
        if self._recurrent is not None:
            raise UnsupportedError(f"{call}: recurrent layers have a state that only a forward advances; use reserve")

    def _measure_pressure(self) -> MemoryPressure:
        available = self._pool.num_free / self._pool.num_blocks
        if available < self.config.high_watermark:
            return MemoryPressure.CRITICAL
        return MemoryPressure.HIGH if available < self.config.low_watermark else MemoryPressure.LOW
