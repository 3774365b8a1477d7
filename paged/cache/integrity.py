"""Whether all that the cache counts agrees."""

from __future__ import annotations

from collections import Counter

from paged.cache.blocks.pool import BlockPool
from paged.cache.live_sequences import LiveSequences
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_reservation import KvSlotReservation
from paged.errors import PagedError


def check_integrity(sequences: LiveSequences, prefixes: PrefixCache, host_pool: BlockPool) -> None:
    """Recount every reference from the live sequences and open reservations.

    Raises:
        PagedError: names the first contradiction.
    """
    references: Counter[int] = Counter()
    host_references: Counter[int] = Counter()
    reservations: set[KvSlotReservation] = set()
    for handle in sequences.handles.values():
        state = sequences.state(handle, may_be_swapped=True)
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
    prefixes.pool.check(references)
    host_pool.check(host_references)
    prefixes.index.check()
