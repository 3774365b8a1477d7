"""Inspection of a cache: counts, integrity check, tensors of layers, K and V of single sequences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from paged.cache.guard import CacheGuard
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences
from paged.cache.pins import Pins
from paged.cache.pool import BlockPool
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_allocator import KvSlotAllocator
from paged.cache.slot_reservation import KvSlotReservation, SequenceState
from paged.cache.swap_space import SwapSpace
from paged.cache.tensors import KvCacheTensors
from paged.errors import InvalidInputError, PagedError
from paged.kernels.core.errors import as_int, shown
from paged.kernels.recurrent.metadata import RecurrentState


@dataclass(frozen=True)
class CacheStats:
    """Counts of a KV cache at one moment. Hits, evictions, swaps, copies and failures count from its creation.

    Attributes:
        free_blocks: blocks that can be handed out, cached ones included.
        used_blocks: blocks that are not free.
        shared_blocks: blocks with more than one reference.
        num_tokens: sum of the sequences' lengths; a shared position counts once for each sequence.
        capacity_tokens: length of the longest sequence that fits into the pool.
        utilization: used_blocks / num_blocks.
        cow_copies: shared blocks copied before a write (copy on write).
        allocation_failures: calls that failed for lack of device or host blocks.
        bytes_per_block: bytes of K and V of all layers of a table, scales included.
        cached_blocks: free blocks that a prompt may still begin with.
        published_blocks: all blocks that a prompt may begin with, blocks in use included.
        prefix_hits, prefix_misses: prompts that found a published prefix, and prompts that found none.
        prefix_hit_tokens: prompt tokens found in the cache and not computed again.
        evictions: cached blocks that were handed out or withdrawn.
        swapped_out_blocks, swapped_in_blocks: blocks moved to the host, and blocks moved back.
        swap_blocks_free: free host blocks.
        retained_blocks: published blocks with a priority, see `Retention`.
        pinned_blocks, num_pins: blocks that pins keep, and number of pins.
        num_state_slots, free_state_slots: slots for recurrent states: all of them, and the slots that can be handed
            out, snapshots included.
        state_snapshots: recurrent states kept for prompts with the same beginning.
        state_hits: prompts that began with a snapshot.
        state_evictions: snapshots whose slot was handed out.
        bytes_per_state: bytes of a slot, over all recurrent layers.
        host_blocks: host blocks of the host tier and of swapped sequences together; 0 without a tier.
        host_cached_blocks: host blocks that a prompt may begin with.
        host_stored_blocks, host_loaded_blocks: evicted blocks copied to the tier, and blocks copied back for a prompt.
        host_dropped_blocks: evicted blocks for which the tier had no memory.
        host_hits, host_misses: prompts for which the tier had more blocks than the device, and prompts for which it had
            none.
        host_query_tokens, host_hit_tokens: prompt tokens that the device lacked, and how many of them the tier had.
        host_states, host_loaded_states: recurrent states in the tier, and states copied back for a prompt.
        folder_read_blocks, folder_written_blocks: blocks read from the cache folder, and blocks written to it.
        folder_dropped_blocks: blocks that were not written to the folder.
        folder_faults: files or folders that were damaged, or that could not be read or written.
        folder_late_reads: prompts that stopped waiting for the folder.
    """

    num_blocks: int
    free_blocks: int
    used_blocks: int
    shared_blocks: int
    num_sequences: int
    num_tokens: int
    capacity_tokens: int
    utilization: float
    cow_copies: int
    allocation_failures: int
    bytes_per_block: int
    cached_blocks: int
    published_blocks: int
    prefix_hits: int
    prefix_misses: int
    prefix_hit_tokens: int
    evictions: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    swap_blocks_free: int
    retained_blocks: int = 0
    pinned_blocks: int = 0
    num_pins: int = 0
    num_state_slots: int = 0
    free_state_slots: int = 0
    state_snapshots: int = 0
    state_hits: int = 0
    state_evictions: int = 0
    bytes_per_state: int = 0
    host_blocks: int = 0
    host_cached_blocks: int = 0
    host_stored_blocks: int = 0
    host_loaded_blocks: int = 0
    host_dropped_blocks: int = 0
    host_hits: int = 0
    host_misses: int = 0
    host_query_tokens: int = 0
    host_hit_tokens: int = 0
    host_states: int = 0
    host_loaded_states: int = 0
    folder_read_blocks: int = 0
    folder_written_blocks: int = 0
    folder_dropped_blocks: int = 0
    folder_faults: int = 0
    folder_late_reads: int = 0

    def of_tiers(self) -> dict[str, int]:
        """Return the counts of the host tier and the cache folder; empty without a tier."""
        if not self.host_blocks:
            return {}
        return {name: value for name, value in vars(self).items() if name.startswith(("host_", "folder_"))}


def count_stats(
    config: PagedKvCacheConfig,
    sequences: LiveSequences,
    pins: Pins,
    prefixes: PrefixCache,
    swap: SwapSpace,
    tensors: KvCacheTensors,
    guard: CacheGuard,
) -> CacheStats:
    """Collect the counts of a cache's parts."""
    pool = prefixes.pool
    pool.priorities.expire()
    free, total = pool.num_free, pool.num_blocks
    of_kinds: dict[str, int] = {}
    for kind in prefixes.kinds:
        of_kinds |= kind.stats()
    of_tier = {}
    if (tier := prefixes.tier) is not None:
        of_tier = {
            "host_blocks": tier.blocks.pool.num_blocks,
            "host_cached_blocks": len(tier.blocks.entries),
        }
        if tier.files is not None:
            of_tier |= {
                "folder_read_blocks": tier.files.num_read,
                "folder_written_blocks": tier.files.num_written,
                "folder_dropped_blocks": tier.files.num_dropped,
                "folder_faults": tier.files.num_faults,
                "folder_late_reads": tier.files.num_late,
            }
    return CacheStats(
        num_blocks=total,
        free_blocks=free,
        used_blocks=total - free,
        shared_blocks=len(pool.shared),
        num_sequences=len(sequences.handles),
        num_tokens=sum(handle.num_tokens for handle in sequences.handles.values()),
        capacity_tokens=config.capacity_tokens,
        utilization=(total - free) / total,
        allocation_failures=pool.num_refused + swap.shelf.pool.num_refused,
        bytes_per_block=tensors.bytes_per_block,
        cached_blocks=len(pool.cached),
        published_blocks=len(prefixes.index.published),
        swap_blocks_free=swap.shelf.num_free,
        retained_blocks=len(pool.priorities.levels),
        pinned_blocks=pins.num_blocks,
        num_pins=len(sequences.pinned),
        **guard.counts.by_name,
        **of_kinds,
        **of_tier,
    )


def _count_references(sequences: LiveSequences) -> tuple[Counter[int], Counter[int]]:
    """Count the references to device blocks and to host blocks."""
    on_device = Counter[int]()
    on_host = Counter[int]()
    reservations: set[KvSlotReservation] = set()
    for state in sequences.holders():
        on_device.update(state.blocks)
        if state.host_blocks is not None:
            on_host.update(state.host_blocks.values())
        if state.reservation is not None:
            reservations.add(state.reservation)
    for reservation in reservations:
        on_device.update(reservation.kept_blocks)
    del on_device[0]
    return on_device, on_host


def recount(sequences: LiveSequences, prefixes: PrefixCache, swap: SwapSpace) -> None:
    """Derive all counts from the restored sequences and published blocks, after a rollback."""
    states = sequences.states()
    sequences.tables.recount(states)
    prefixes.index.recount()
    references, host_references = _count_references(sequences)
    prefixes.pool.recount(references)
    swap.shelf.recount()
    swap.shelf.pool.recount(host_references)
    swap.num_sequences = len([state for state in states if state.host_blocks is not None])
    for kind in prefixes.kinds:
        kind.recount(sequences.holders())


def check_integrity(
    config: PagedKvCacheConfig, sequences: LiveSequences, prefixes: PrefixCache, host_pool: BlockPool
) -> None:
    """`PagedKvCacheManager.check_integrity`."""
    num_tables, num_whole = len(config.tables), config.num_whole
    for handle in sequences.handles.values():
        state = sequences.state(handle, may_be_swapped=True)
        held = [block for block in state.blocks if block]
        if len(set(held)) != len(held):
            raise PagedError(f"{state.seq_id!r} holds a block twice: {state.blocks}")
        for column, table in enumerate(config.tables):
            first = table.first_seen_block(state.num_tokens, config.block_size) * num_tables
            last = config.blocks_for(state.num_tokens)
            if column < num_whole:
                last = len(state.blocks)
            if state.host_blocks is None and 0 in state.blocks[first + column : last : num_tables]:
                raise PagedError(f"{state.seq_id!r} lacks a block of table {column}: {state.blocks}")
        if not state.num_cached_tokens <= state.num_tokens <= handle.capacity:
            raise PagedError(
                f"{state.seq_id!r}: {state.num_cached_tokens} cached of {state.num_tokens} tokens, "
                f"capacity {handle.capacity}"
            )
    references, host_references = _count_references(sequences)
    prefixes.pool.check(references)
    host_pool.check(host_references)
    prefixes.index.check()
    for kind in prefixes.kinds:
        kind.check(sequences.holders())


class KvInspection:
    """Base of `PagedKvCacheManager` with the methods that access its memory."""

    _guard: CacheGuard
    _prefixes: PrefixCache
    _sequences: LiveSequences
    _slots: KvSlotAllocator
    _tensors: KvCacheTensors

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._tensors.storage.device

    @property
    def tensors(self) -> KvCacheTensors:
        """Memory of the cache. Its `listener` is called when blocks move or are cleared, so that others mirror it."""
        return self._tensors

    def k_cache(self, layer: int) -> torch.Tensor:
        """Return the keys of one layer, a view [num_blocks + 1, block_size, num_kv_heads, head_dim].

        Raises:
            InvalidInputError: the layer does not exist, or has no K/V of its own.
        """
        return self._tensors.k_cache(layer)

    def v_cache(self, layer: int) -> torch.Tensor:
        """Return the values of one layer, as `k_cache`; the last dimension is the group's v_head_dim."""
        return self._tensors.v_cache(layer)

    def entries(self, layer: int, index: int = 0) -> torch.Tensor:
        """Return the pooled keys of a layer in a `PooledGroup`, a view [num_blocks + 1, pools of a block, entry_size].

        Entry i of a block is of its positions i * pool_size to (i + 1) * pool_size - 1. index: which of the entries of
        an `EntriesGroup`.

        Raises:
            InvalidInputError: the layer does not exist, or has no such entries.
        """
        return self._tensors.entries(layer, index)

    def open_rows(self, layer: int) -> torch.Tensor:
        """Return the rows of open pools of a layer in an `OpenPoolGroup`, float32 [num_slots + 1, num_rows, size].

        A sequence's position p has row p % num_rows of the sequence's slot, see `AttentionMetadata.recurrent`.

        Raises:
            InvalidInputError: the layer has no such rows.
        """
        return self._tensors.open_rows(layer)

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return `k_scale` and `v_scale` of a layer for the kernels; None for keys or values without scales of rows.

        Each is [num_blocks + 1, block_size, num_kv_heads], and has an axis of groups if a row has several scales.
        Raises the same errors as `k_cache`.
        """
        return self._tensors.scales(layer)

    def table_of(self, layer: int) -> int:
        """Return the index of a layer's table, for `AttentionMetadata.table`; raises the same errors as `k_cache`."""
        return self._tensors.table_of(layer)

    def state(self, layer: int) -> RecurrentState:
        """Return the state slots of one recurrent layer.

        Raises:
            InvalidInputError: the layer has no recurrent state.
        """
        states, layer = self._tensors.states, as_int("layer", layer)
        if states is None or layer not in states.layers:
            raise InvalidInputError(f"layer: {shown(layer)} has no recurrent state")
        return states.layer(layer)

    def write_kv(
        self, handle: KvCacheHandle, layer: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V of one or more tokens from `position` on. Slow: for tests and inspection.

        The length does not change, and positions may lie anywhere within the capacity. Values are converted to the
        cache's dtype. 8-bit floats are saturated, not scaled. Caches with scales get both rows and scales.

        Args:
            key: [num_kv_heads, head_dim], or [num_tokens, num_kv_heads, head_dim].
            value: the same, with the head size of the values.

        Raises:
            InvalidInputError: the layer, position or a shape is invalid.
            OutOfBlocksError: a shared block has to be copied and none is free.
        """
        layer, position = self._tensors.layer(layer), as_int("position", position)
        key, value = self._tensors.rows(layer, key, value)
        with self._guard:
            state = self._sequences.state(handle)
            end = position + len(key)
            rollback = self._guard.rollback
            if end > handle.capacity:
                raise InvalidInputError(f"position: {position}..{end}, expected within the capacity {handle.capacity}")
            self._check_read(state, layer, position, end)
            self._slots.make_exclusive([(state, position, end)])
            if position < state.num_tokens:  # the rollback of an open reservation must not restore the previous ids
                state.begin_change(rollback)
            else:
                state.keep(rollback)
            if len(key):  # the new K/V may not match the ids at these positions
                state.chain.cut(position, position // self._tensors.block_size, rollback)
            self._tensors.write(layer, state.blocks, position, key, value, rollback)
            readable = max(state.num_tokens, state.num_written)
            if position <= readable:
                state.num_written = max(readable, end)

    def read_kv(
        self, handle: KvCacheHandle, layer: int, start: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V at `num_tokens` positions from `start` on. Slow: for tests and inspection.

        Each is [num_tokens, num_kv_heads, head_dim] in the cache's dtype, without the scales of an 8-bit float cache.
        Rows with scales in the cache are returned as float32, multiplied by them.

        Raises:
            InvalidInputError: the layer does not exist or has no K/V of its own, or a position is not written or lies
                behind the sliding window. Written positions are the sequence's `num_tokens` and any that `write_kv`
                added after them without a gap.
        """
        layer, start = self._tensors.layer(layer), as_int("start", start)
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            end, readable = start + num_tokens, max(state.num_tokens, state.num_written)
            if end > readable:
                raise InvalidInputError(f"num_tokens: positions {start}..{end}, expected within the {readable} written")
            self._check_read(state, layer, start, end)
            return self._tensors.read(layer, state.blocks, start, end)

    def _check_read(self, state: SequenceState, layer: int, start: int, end: int) -> None:
        """Raise InvalidInputError if the layer's table lacks one of the positions start..end."""
        column = self.table_of(layer)
        for kind in self._prefixes.kinds:
            kind.check_read(state, column, start, end)
