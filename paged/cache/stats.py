"""The cache's figures."""

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
    """The cache at one moment, counted when asked for.

    free_blocks: those that could be handed out; cached_blocks of them still hold K/V that a prompt may begin with.
    published_blocks: all that a prompt may begin with, those in use included.
    prefix_hits, prefix_misses: prompts that found a prefix or none; prefix_hit_tokens: tokens not computed again.
    evictions: cached blocks handed out or withdrawn. swapped_out_blocks, swapped_in_blocks: moved since the start.
    swap_blocks_free: host blocks left.
    num_tokens: lengths of all sequences added up, so a shared position counts once a sequence.
    capacity_tokens: the longest sequence that the whole pool has room for.
    utilization: used_blocks / num_blocks.
    cow_copies, allocation_failures, and the counts of hits, evictions and swaps: since the cache was made.
    bytes_per_block: K and V of all layers of a table, scales included.
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


def count_stats(
    config: PagedKvCacheConfig,
    sequences: LiveSequences,
    prefixes: PrefixCache,
    slots: KvSlotAllocator,
    swap: SwapSpace,
    tensors: KvCacheTensors,
) -> CacheStats:
    """What the parts of a cache have counted, and hold now."""
    pool = prefixes.pool
    free, total = pool.num_free, pool.num_blocks
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
        cached_blocks=pool.num_cached,
        published_blocks=len(prefixes.index.published),
        prefix_hits=prefixes.num_hits,
        prefix_misses=prefixes.num_misses,
        prefix_hit_tokens=prefixes.num_hit_tokens,
        evictions=prefixes.num_evictions,
        swapped_out_blocks=swap.num_blocks_out,
        swapped_in_blocks=swap.num_blocks_in,
        swap_blocks_free=swap.pool.num_free,
    )
