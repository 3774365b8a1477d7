"""What can be asked of a cache: counts, a check of its integrity, tensors of layers, K and V of single sequences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from paged.cache.guard import CacheGuard
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences
from paged.cache.pool import BlockPool
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_allocator import KvSlotAllocator, SlidingWindow
from paged.cache.slot_reservation import KvSlotReservation
from paged.cache.swap_space import SwapSpace
from paged.cache.tensors import KvCacheTensors
from paged.errors import InvalidInputError, PagedError
from paged.kernels.common.scalars import as_int, shown
from paged.kernels.recurrent.metadata import RecurrentState


@dataclass(frozen=True)
class CacheStats:
    """Counts of a KV cache at one moment; hits, evictions, swaps, copies and failures count from its creation.

    Attributes:
        free_blocks: blocks that can be handed out, cached ones included.
        used_blocks: blocks that are not free.
        shared_blocks: blocks with more than one reference.
        num_tokens: sum of all lengths; a shared position counts once for each sequence.
        capacity_tokens: length of the longest sequence that fits into the pool.
        utilization: used_blocks / num_blocks.
        cow_copies: shared blocks copied before a write.
        allocation_failures: calls that failed for lack of blocks on the device or on the host.
        bytes_per_block: K and V of all layers of a table, scales included.
        cached_blocks: free blocks with K/V that a prompt may begin with.
        published_blocks: all blocks that a prompt may begin with, including those in use.
        prefix_hits, prefix_misses: prompts that found a published prefix, or none.
        prefix_hit_tokens: prompt tokens found in the cache, so not computed again.
        evictions: cached blocks that were handed out or withdrawn.
        swapped_out_blocks, swapped_in_blocks: blocks moved to the host, and back.
        swap_blocks_free: free host blocks.
        num_state_slots, free_state_slots: slots for states of recurrent layers, and those that can be handed out,
            snapshots included.
        state_snapshots: states kept for prompts that begin alike.
        state_hits: prompts that began with one.
        state_evictions: snapshots whose slot was handed out.
        bytes_per_state: memory of a slot, over all recurrent layers.
        host_blocks: host blocks of the tier and of swapped sequences together; 0 without a tier.
        host_cached_blocks: host blocks that a prompt may begin with.
        host_stored_blocks, host_loaded_blocks: evicted blocks copied to the tier, and blocks copied back for a prompt.
        host_dropped_blocks: evicted blocks for which the tier had no memory.
        host_hits, host_misses: prompts that the tier has continued, or not.
        host_query_tokens, host_hit_tokens: prompt tokens that the device did not have, and those that the tier had.
        host_states, host_loaded_states: states of recurrent layers in the tier, and states copied back for a prompt.
        folder_read_blocks, folder_written_blocks: blocks read from the cache folder, and written to it.
        folder_dropped_blocks: blocks that were not written.
        folder_faults: files or folders that could not be read or written, or were damaged.
        folder_late_reads: prompts that did not wait for the folder any longer.
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
        """Return the counts of host memory and of the cache folder; none without a tier."""
        if not self.host_blocks:
            return {}
        return {name: value for name, value in vars(self).items() if name.startswith(("host_", "folder_"))}


def count_stats(
    config: PagedKvCacheConfig,
    sequences: LiveSequences,
    prefixes: PrefixCache,
    swap: SwapSpace,
    tensors: KvCacheTensors,
    guard: CacheGuard,
) -> CacheStats:
    """Collect the counts of a cache's parts."""
    pool = prefixes.pool
    free, total = pool.num_free, pool.num_blocks
    of_states = {}
    if (recurrent := prefixes.recurrent) is not None:
        of_states = {
            "num_state_slots": recurrent.spec.num_slots,
            "free_state_slots": recurrent.num_free,
            "state_snapshots": len(recurrent.snapshots),
            "bytes_per_state": recurrent.tensors.bytes_per_slot,
        }
    of_tier = {}
    if (tier := prefixes.tier) is not None:
        of_tier = {
            "host_blocks": tier.pool.num_blocks,
            "host_cached_blocks": len(tier.entries),
        }
        if recurrent is not None and recurrent.tier is not None:
            of_tier["host_states"] = len(recurrent.tier.entries)
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
        allocation_failures=pool.num_refused + swap.pool.num_refused,
        bytes_per_block=tensors.bytes_per_block,
        cached_blocks=len(pool.cached),
        published_blocks=len(prefixes.index.published),
        swap_blocks_free=swap.num_free,
        **guard.counts.by_name,
        **of_states,
        **of_tier,
    )


def _count_references(sequences: LiveSequences) -> tuple[Counter[int], Counter[int]]:
    """Count the references to blocks on the device and on the host."""
    on_device = Counter[int]()
    on_host = Counter[int]()
    reservations: set[KvSlotReservation] = set()
    for state in sequences.states():
        on_device.update(state.blocks)
        if state.host_blocks is not None:
            on_host.update(state.host_blocks.values())
        if state.reservation is not None:
            reservations.add(state.reservation)
    for reservation in reservations:
        on_device.update(reservation.kept_blocks)
    del on_device[0]
    return on_device, on_host


def recount(sequences: LiveSequences, prefixes: PrefixCache, host_pool: BlockPool) -> None:
    """Derive all counts from the sequences and published blocks that a rollback has restored."""
    states = sequences.states()
    sequences.tables.recount(states)
    prefixes.index.recount()
    references, host_references = _count_references(sequences)
    prefixes.pool.recount(references)
    if prefixes.tier is not None:
        prefixes.tier.recount()
    host_pool.recount(host_references)
    if prefixes.recurrent is not None:
        prefixes.recurrent.recount(states)


def check_integrity(sequences: LiveSequences, prefixes: PrefixCache, host_pool: BlockPool) -> None:
    """`PagedKvCacheManager.check_integrity`."""
    for handle in sequences.handles.values():
        state = sequences.state(handle, may_be_swapped=True)
        held = [block for block in state.blocks if block]
        if len(set(held)) != len(held):
            raise PagedError(f"{state.request_id!r} holds a block twice: {state.blocks}")
        if not state.num_cached_tokens <= state.num_tokens <= handle.capacity:
            raise PagedError(
                f"{state.request_id!r}: {state.num_cached_tokens} cached of {state.num_tokens} tokens, "
                f"capacity {handle.capacity}"
            )
    references, host_references = _count_references(sequences)
    prefixes.pool.check(references)
    host_pool.check(host_references)
    prefixes.index.check()
    if prefixes.recurrent is not None:
        prefixes.recurrent.check_integrity(sequences.states())


class KvInspection:
    """The part of a `PagedKvCacheManager` that accesses its memory."""

    _guard: CacheGuard
    _sequences: LiveSequences
    _slots: KvSlotAllocator
    _tensors: KvCacheTensors
    _window: SlidingWindow

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._tensors.storage.device

    @property
    def tensors(self) -> KvCacheTensors:
        """Memory of the cache. Its `listener` is called for every move or clearing of blocks, to mirror it."""
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

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return `k_scale` and `v_scale` of an int8 layer, as the kernels take them; (None, None) for other dtypes.

        Each is float32 [num_blocks + 1, block_size, num_kv_heads]. Errors are those of `k_cache`.
        """
        return self._tensors.scales(layer)

    def table_of(self, layer: int) -> int:
        """Return the index of a layer's table, for `AttentionMetadata.table`; errors are those of `k_cache`."""
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
        """Write K and V of the token at `position`, or of several from there on. Slow: for tests and inspection.

        The length does not change, and positions may lie anywhere within the capacity. Values are converted to the
        cache's dtype; 8-bit floats are saturated and not scaled, int8 rows are scaled and their scales are written.

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
            self._window.check_seen(state, self.table_of(layer), position, end)
            self._slots.make_exclusive([(state, position, end)])
            if position < state.num_tokens:  # a rollback must not restore the previous ids
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
        int8 is returned as float32, multiplied by its scales.

        Raises:
            InvalidInputError: the layer does not exist or has no K/V of its own, or a position is not written or lies
                behind the sliding window. Written positions are the first `num_tokens` and those that `write_kv` added
                after them without a gap.
        """
        layer, start = self._tensors.layer(layer), as_int("start", start)
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            end, readable = start + num_tokens, max(state.num_tokens, state.num_written)
            if end > readable:
                raise InvalidInputError(f"num_tokens: positions {start}..{end}, expected within the {readable} written")
            self._window.check_seen(state, self.table_of(layer), start, end)
            return self._tensors.read(layer, state.blocks, start, end)
