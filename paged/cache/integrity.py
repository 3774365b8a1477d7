"""Recount of references from live sequences and open reservations, and comparison with the stored counts."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from paged.cache.blocks.pool import BlockPool
from paged.cache.live_sequences import LiveSequences
from paged.cache.prefix_cache import PrefixCache
from paged.errors import PagedError


def _count_references(sequences: LiveSequences) -> tuple[Counter[int], Counter[int]]:
    """Count the references to blocks on the device and on the host."""
    states = [handle._state for handle in sequences.handles.values()]
    reservations = {state.reservation for state in states if state.reservation is not None}
    on_device = [*(state.blocks for state in states), *(reservation.kept_blocks for reservation in reservations)]
    references = Counter(chain.from_iterable(on_device))
    del references[0]
    return references, Counter(chain.from_iterable((state.host_blocks or {}).values() for state in states))


def recount(sequences: LiveSequences, prefixes: PrefixCache, host_pool: BlockPool) -> None:
    """Derive all counts from the sequences and published blocks that a rollback has restored."""
    states = [handle._state for handle in sequences.handles.values()]
    sequences.tables.recount(states)
    prefixes.index.recount()
    references, host_references = _count_references(sequences)
    prefixes.pool.recount(references)
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
        prefixes.recurrent.check_integrity([handle._state for handle in sequences.handles.values()])
