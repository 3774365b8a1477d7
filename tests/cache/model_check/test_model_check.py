"""The cache does what the specification says in small scopes, and planted faults are found."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.cache.pool import BlockPool
from paged.cache.prefix_index import PrefixIndex
from paged.cache.slot_allocator import KvSlotAllocator
from paged.cache.slot_reservation import KvSlotReservation
from paged.cache.tensors import KvCacheTensors
from paged.cache.tiers.shelf import HostShelf
from paged.cache.token_chain import ChainHash, TokenChain
from tests.cache.model_check.explore import Scope, explore
from tests.cache.model_check.specification import SpecificationError
from tests.cache.prefix_cache import forged_chain

Patch = pytest.MonkeyPatch
SCOPES = [
    Scope(4),
    Scope(3, namespaces=(None, "n")),
    pytest.param(Scope(5), marks=pytest.mark.thorough),
    pytest.param(Scope(4, namespaces=(None, "n")), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("scope", SCOPES)
def test_every_sequence_of_calls(scope: Scope) -> None:
    levels = list(explore(scope))
    for level, next_level in pairwise(levels):
        assert next_level.num_states >= 4 * level.num_states
    assert levels[-1].num_refused > 0


def collide(patch: Patch) -> None:
    """Give all blocks of one sum the same hash, whatever came before them."""
    hashes = forged_chain(lambda block: int(block.sum()))
    patch.setattr(ChainHash, "extend", hashes)
    patch.setattr(ChainHash, "extend_each", hashes)


@pytest.mark.parametrize("depth", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_colliding_hashes_hide_chains_but_never_serve_others(depth: int, monkeypatch: Patch) -> None:
    collide(monkeypatch)
    levels = list(explore(Scope(depth, may_collide=True)))
    assert levels[-1].num_states >= 4 ** (depth - 1)


def wrap(patch: Patch, owner: type, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by `change`, whose first argument is the method."""
    method = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(method, *args, **kwargs)

    patch.setattr(owner, name, changed)


def free_a_block_twice(patch: Patch) -> None:
    def free(method: Any, manager: PagedKvCacheManager, handle: KvCacheHandle) -> None:
        blocks = handle.blocks
        method(manager, handle)
        manager._pool.release(blocks[:1])

    wrap(patch, PagedKvCacheManager, "free", free)


def write_published_blocks(patch: Patch) -> None:
    def needs(method: Any, *args: Any) -> Any:
        return [(state, replaced, [], missing) for state, replaced, _, missing in method(*args)]

    wrap(patch, KvSlotAllocator, "_needs", needs)


def write_shared_blocks(patch: Patch) -> None:
    def needs(method: Any, *args: Any) -> Any:
        return [(state, [], stale, missing) for state, _, stale, missing in method(*args)]

    wrap(patch, KvSlotAllocator, "_needs", needs)


def copy_nothing(patch: Patch) -> None:
    patch.setattr(KvCacheTensors, "copy", lambda tensors, pairs: None)


def compare_no_ids(patch: Patch) -> None:
    """A look-up ends at the first unknown hash, and compares nothing."""
    collide(patch)

    def match(index: PrefixIndex, token_ids: list[int], namespace: str | None) -> tuple[list[int], TokenChain]:
        chain = TokenChain()
        blocks = []
        for start in range(0, len(token_ids) - 1, 2):
            ids = token_ids[start : start + 2]
            block_hash = index.next_hash(0, ids)
            block = index._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
            chain.ids += ids
            chain.hashes.append(block_hash)
            chain.serials.append(int(index._serials[block]))
        return blocks, chain

    patch.setattr(PrefixIndex, "match", match)


def keep_ids_of_a_partial_block(patch: Patch) -> None:
    def cut(method: Any, chain: TokenChain, num_tokens: int, num_blocks: int, rollback: Any) -> None:
        method(chain, num_tokens + num_tokens % 2, num_blocks + num_tokens % 2, rollback)

    def truncate(method: Any, manager: PagedKvCacheManager, handle: KvCacheHandle, num_tokens: int) -> None:
        with pytest.MonkeyPatch.context() as during:
            wrap(during, TokenChain, "cut", cut)
            method(manager, handle, num_tokens)

    wrap(patch, PagedKvCacheManager, "truncate", truncate)


def swap_in_all_but_one(patch: Patch) -> None:
    wrap(patch, KvCacheTensors, "swap_in", lambda method, tensors, pairs, memory: method(tensors, pairs[:-1], memory))


def keep_host_blocks(patch: Patch) -> None:
    def swap_in(shelf: HostShelf, hosts: list[int], blocks: list[int]) -> None:
        shelf._tensors.swap_in(list(zip(hosts, blocks, strict=True)), shelf.memory)

    patch.setattr(HostShelf, "swap_in", swap_in)


def evict_beginnings_first(patch: Patch) -> None:
    wrap(patch, BlockPool, "release", lambda method, pool, blocks: method(pool, blocks[::-1]))


def roll_back_nothing(patch: Patch) -> None:
    patch.setattr(KvSlotReservation, "rollback", KvSlotReservation.leave)


def undo_no_lists(patch: Patch) -> None:
    """A failed call leaves token ids and hashes that it has added."""
    patch.setattr("paged.cache.guard.Rollback.keep_end", lambda rollback, items, start: None)


FAULTS = [
    (free_a_block_twice, ("free",), "held"),
    (write_published_blocks, ("truncate",), "found without being published"),
    (write_shared_blocks, ("fork",), "K/V|blocks"),
    (copy_nothing, ("fork",), "K/V"),
    (compare_no_ids, (), "is found, but K/V"),
    (keep_ids_of_a_partial_block, ("truncate",), "num_known"),
    (swap_in_all_but_one, ("swap_out", "swap_in"), "K/V"),
    (keep_host_blocks, ("swap_out", "swap_in"), "host blocks"),
    (evict_beginnings_first, ("free",), "cached blocks"),
    (roll_back_nothing, ("rollback",), "expected \\(\\)"),
    (undo_no_lists, ("commit",), "failed call"),
]


@pytest.mark.parametrize(("plant", "kinds", "message"), FAULTS, ids=[plant.__name__ for plant, _, _ in FAULTS])
def test_a_planted_fault_is_found(
    plant: Callable[[Patch], None], kinds: tuple[str, ...], message: str, monkeypatch: Patch
) -> None:
    scope = Scope(4, kinds=("allocate", "step", *kinds), may_collide=plant is compare_no_ids)
    plant(monkeypatch)
    with pytest.raises(SpecificationError, match=message):
        list(explore(scope))
