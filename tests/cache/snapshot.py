"""All that a cache knows, for comparing it with itself after a call that failed."""

from dataclasses import replace
from typing import Any

import torch

from paged import KvCacheHandle, PagedKvCacheManager


def snapshot(manager: PagedKvCacheManager) -> dict[str, Any]:
    """What every part of a sound cache holds, K/V included where anybody could read them."""
    manager.check_integrity()
    pool, index = manager._pool, manager._prefixes.index
    held = {block for handle in manager.handles() for block in handle.blocks} | set(index.published)
    host = manager._swap.shelf.pool
    return {
        # Of the order of sequences nothing depends; one whose `free` failed is the newest.
        "handles": {handle.cache_id: (handle, _state(handle)) for handle in manager.handles()},
        "free": (list(pool._free), list(pool.cached), dict(pool._extra_references)),
        "retained": (dict(pool.priorities.levels), list(manager._sequences.pinned)),
        "host": (list(host._free), manager._swap.num_sequences),
        "published": (dict(index._hash_of), dict(index._block_of)),
        "beside": (dict(index.locations), index.rows.tolist()),
        "serials": {block: int(index._serials[block]) for block in index.published},
        "roots": {name: (one.hash, one.serial, one.num_blocks) for name, one in index._roots.items()},
        "roots by block": {
            block: (name, root.serial) for block, (name, root) in index._root_of.items() if name in index._roots
        },
        "counts": replace(manager.stats(), allocation_failures=0),
        "rows": sum(owner is not None for owner in manager._sequences.tables._owners),
        "K/V": {
            block: [one[:, block].view(torch.uint8).numpy().tobytes() for one in manager._tensors.storages]
            for block in sorted(held - {0})
        },
    }


def comparable(parts: dict[str, Any]) -> dict[str, Any]:
    """A snapshot without handles, to compare those of two managers."""
    return parts | {"handles": {name: state[:3] for name, (_, state) in parts["handles"].items()}}


def published_hashes(manager: PagedKvCacheManager) -> dict[int, int | bytes]:
    """The hash of every published block; blocks of further tables have that of the first table's block."""
    index = manager._prefixes.index
    return {block: index._hash_of[index.locations.get(block, (block, 0))[0]] for block in index.published}


def _state(handle: KvCacheHandle) -> Any:
    state = handle._state
    room = state.reservation
    return (
        (state.namespace, state.blocks, state.num_tokens, state.num_cached_tokens, state.num_written, state.is_valid),
        (state.chain.ids.copy(), state.chain.hashes.copy(), state.chain.serials.copy()),
        state.host_blocks and dict(state.host_blocks),
        room and (id(room), room.is_open, room._is_whole, sorted(room.kept_blocks)),
    )
