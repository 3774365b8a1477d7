"""Counts of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_allocator import KvSlotAllocator
from paged.cache.swap_space import SwapSpace
from paged.cache.tensors import KvCacheTensors


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


def count_stats(
    config: PagedKvCacheConfig,
    sequences: LiveSequences,
    prefixes: PrefixCache,
    slots: KvSlotAllocator,
    swap: SwapSpace,
    tensors: KvCacheTensors,
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
            "state_hits": recurrent.num_restored,
            "state_evictions": recurrent.num_evictions,
            "bytes_per_state": recurrent.tensors.bytes_per_slot,
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
        cow_copies=slots.num_copies,
        allocation_failures=pool.num_refused + swap.pool.num_refused,
        bytes_per_block=tensors.bytes_per_block,
        cached_blocks=len(pool.cached),
        published_blocks=len(prefixes.index.published),
        prefix_hits=prefixes.num_hits,
        prefix_misses=prefixes.num_misses,
        prefix_hit_tokens=prefixes.num_hit_tokens,
        evictions=prefixes.num_evictions,
        swapped_out_blocks=swap.num_blocks_out,
        swapped_in_blocks=swap.num_blocks_in,
        swap_blocks_free=swap.pool.num_free,
        **of_states,
    )
