"""A manager with known contents: makes calls, tells what can be seen of it, and recognizes states that are alike."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import torch

from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.errors import OutOfBlocksError
from paged.step.batch import KvSlotRequest
from tests.cache.model_check.specification import SpecificationError, require
from tests.cache.model_check.view import BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS, Call, Chain, Sequence, View, tag

CONFIG = PagedKvCacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    num_swap_blocks=NUM_SWAP_BLOCKS,
    dtype=torch.float32,
    device="cpu",
)
NAMES = ("a", "b")
TOKENS = (0, 1)
CAPACITY = NUM_BLOCKS * BLOCK_SIZE

BLOCKS_OF_TOKENS = list(product(TOKENS, repeat=BLOCK_SIZE))


Key = tuple[Any, ...]
"""A state without the names of things."""


def _all_chains(namespaces: tuple[str | None, ...]) -> dict[int, Chain]:
    """Return every chain that fits into the cache, by its tag."""
    chains = {}
    for namespace in namespaces:
        for length in range(CAPACITY + 1):
            for tokens in product(TOKENS, repeat=length):
                chains[tag((namespace, tokens))] = namespace, tokens
    return chains


CHAINS = _all_chains((None, "n"))


class Names(dict[Any, int]):
    """Numbers things in the order in which they first occur."""

    def __missing__(self, thing: Any) -> int:
        self[thing] = len(self)
        return self[thing]


class InjectedError(Exception):
    """Makes a call fail at its end."""


class CheckedCache:
    """A manager and what it does not know: all token ids."""

    def __init__(self, path: tuple[Call, ...] = ()) -> None:
        self.manager = PagedKvCacheManager(CONFIG)
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.data = self.manager.k_cache(0).numpy().reshape(NUM_BLOCKS + 1, BLOCK_SIZE)
        (host,) = self.manager.tensors.host._parts
        # Each block has its keys, then its values.
        self.host_data = host._host.numpy().view(np.float32).reshape(NUM_SWAP_BLOCKS + 1, 2, BLOCK_SIZE)[:, 0]
        for call in path:
            try:
                self.make(call)
            except OutOfBlocksError:
                raise SpecificationError(f"{call} is refused when it is made again") from None

    def make(self, call: Call) -> None:
        """Make one call, and write the K/V of its tokens."""
        manager, tokens = self.manager, self.tokens
        if call.kind == "evict":
            manager.evict(call.count)
            return
        if call.kind == "clear":
            manager.clear_prefix_cache()
            return
        if call.kind == "allocate":
            handle = manager.allocate(call.name, call.count, token_ids=call.tokens, namespace=call.namespace)
            tokens[call.name] = call.tokens[: handle.num_tokens]
            return
        if call.kind == "fork":
            manager.fork(manager.get_handle(call.source), call.name)
            tokens[call.name] = tokens[call.source]
            return
        handle = manager.get_handle(call.name)
        assert handle is not None
        if call.kind in ("step", "rollback"):
            self._make_step(call)
        elif call.kind == "commit":
            manager.commit(handle, tokens[call.name])
        elif call.kind == "free":
            manager.free(handle)
            del tokens[call.name]
        elif call.kind == "truncate":
            manager.truncate(handle, call.count)
            tokens[call.name] = tokens[call.name][: call.count]
        elif call.kind == "share":
            manager.share_prefix_blocks(manager.get_handle(call.source), handle, call.count)
            tokens[call.name] = tokens[call.source][: call.count * BLOCK_SIZE]
        elif call.kind == "swap_out":
            manager.swap_out(handle)
        else:
            assert call.kind == "swap_in"
            manager.swap_in(handle)

    def _make_step(self, call: Call) -> None:
        handle = self.manager.get_handle(call.name)
        assert handle is not None
        known = self.tokens[call.name]
        longer = known + call.tokens
        reservation = self.manager.reserve([KvSlotRequest(call.name, len(longer))])
        for position in range(len(known), len(longer)):
            index, offset = divmod(position, BLOCK_SIZE)
            self.data[handle.blocks[index], offset] = tag((handle.namespace, longer[: position + 1]))
        if call.kind == "rollback":
            reservation.rollback()
            return
        reservation.commit([list(call.tokens) if call.has_ids else None])
        self.tokens[call.name] = longer

    def attempt(self, call: Call) -> tuple[View, Key] | None:
        """Make a call that fails at its end; return what it would have led to, or None if it was refused."""
        index = self.manager._prefixes.index
        tokens, data = self.tokens.copy(), self.data.copy()
        rows = index._tokens.copy(), index._parents.copy(), index._serials.copy()
        result = None
        try:
            with self.manager._guard:
                try:
                    self.make(call)
                    result = self.view(), self.key()
                except OutOfBlocksError:
                    pass
                raise InjectedError
        except InjectedError:
            pass
        self.tokens = tokens
        if call.kind in ("step", "rollback"):
            # The cache cannot undo what a forward writes. A step is two calls: its commit may have published new
            # content in a block that its reservation withdrew.
            self.data[:] = data
        else:
            self._check_rows(rows)
        index._tokens[:], index._parents[:], index._serials[:] = rows
        return result

    def _check_rows(self, rows: tuple[Any, ...]) -> None:
        """Raise SpecificationError unless what the index compares for published blocks is as it was."""
        index = self.manager._prefixes.index
        published = list(index.published)
        for now, before in zip((index._tokens, index._parents, index._serials), rows, strict=True):
            require((now[published] == before[published]).all(), "a failed call has changed a publication")

    def exact_state(self) -> tuple[Any, ...]:
        """Return all that `key` depends on under its own names, and the data of all blocks but plain free ones."""
        manager, pool, index = self.manager, self.manager._pool, self.manager._prefixes.index
        sequences = []
        for name in NAMES:
            handle = manager.get_handle(name)
            if handle is not None:
                state = handle._state
                chain = state.chain
                lists = chain.ids.copy(), chain.hashes.copy(), chain.serials.copy()
                host = state.host_blocks and state.host_blocks.copy()
                counts = state.num_tokens, state.num_cached_tokens, state.num_written
                sequences.append((name, state.blocks, counts, lists, host))
        roots = {namespace: (root.serial, root.num_blocks) for namespace, root in index._roots.items()}
        free = list(pool.free), list(pool.cached), pool._extra_references.copy()
        publications = index._hash_of.copy(), index._block_of.copy(), index.published.copy(), roots
        host_free = list(manager._swap.shelf.pool.free)
        data = self.data.copy()
        data[list(pool.free)] = 0
        host_data = self.host_data.copy()
        host_data[[0, *host_free]] = 0
        return sequences, free, publications, host_free, data.tolist(), host_data.tolist()

    def view(self) -> View:
        """Return all that can be seen."""
        manager, pool = self.manager, self.manager._pool
        sequences = {}
        references = {}
        for name in NAMES:
            handle = manager.get_handle(name)
            if handle is None:
                continue
            host = handle._state.host_blocks
            sequences[name] = Sequence(
                handle.namespace,
                self.tokens[name],
                handle.num_known_tokens,
                handle.num_cached_tokens,
                handle.blocks,
                None if host is None else dict(host),
            )
            require(handle.num_tokens == len(self.tokens[name]), f"{name}: length {handle.num_tokens}")
            for block in filter(None, handle.blocks):
                references[block] = pool.num_references(block)
        return View(
            sequences,
            self._found(),
            frozenset(manager._prefixes.index.published),
            manager.cached_blocks(),
            tuple(pool.free),
            references,
            manager._swap.shelf.pool.num_free,
            self.data.tolist(),
            self.host_data.tolist(),
        )

    def _found(self) -> dict[Chain, int]:
        """Return the block of each chain that the index finds, and look up all chains that are one block longer."""
        index = self.manager._prefixes.index
        found: dict[Chain, int] = {}
        for namespace in self.manager.namespaces():
            chains: list[tuple[int, ...]] = [()]
            for chain in chains:
                if len(chain) == CAPACITY:
                    break
                for block_tokens in BLOCKS_OF_TOKENS:
                    longer = chain + block_tokens
                    blocks, _ = index.match(list(longer), namespace)
                    if len(blocks) * BLOCK_SIZE == len(longer):
                        found[namespace, longer] = blocks[-1]
                        chains.append(longer)
        return found

    def key(self) -> Key:
        """Return a value that two states share only if every further call does the same in both.

        It contains more than can be seen: serial numbers, and contents of earlier publications.
        """
        keys = [self._key_in_order(handles) for handles in permutations(self.manager.handles())]
        return min(keys, key=repr)

    def _key_in_order(self, handles: tuple[KvCacheHandle, ...]) -> Key:
        """Return the key with the sequences in this order, and things named as they occur."""
        pool, index = self.manager._pool, self.manager._prefixes.index
        tokens, namespaces = Names(), Names()
        blocks, serials = Names({0: 0}), Names({0: 0})
        sequences = []
        for handle in handles:
            state = handle._state
            host = state.host_blocks
            sequences.append(
                (
                    namespaces[state.namespace],
                    tuple(tokens[token] for token in self.tokens[state.seq_id]),
                    state.num_cached_tokens,
                    len(state.chain.ids),
                    tuple(blocks[block] for block in state.blocks),
                    tuple(serials[serial] for serial in state.chain.serials),
                    None if host is None else tuple(host),
                )
            )
        cached = tuple(blocks[block] for block in pool.cached)
        plain = tuple(blocks[block] for block in reversed(pool.free))
        roots = tuple((namespaces[name], serials[root.serial], root.num_blocks) for name, root in index._roots.items())
        publications = []
        for block in list(blocks)[1:]:
            chain: tuple[Any, ...] = ()
            if block in index.published:
                namespace, ids = CHAINS.get(int(self.data[block, -1]), (None, ()))
                chain = namespaces[namespace], tuple(tokens[token] for token in ids)
            publications.append(
                (
                    chain,
                    tuple(tokens[token] for token in index._tokens[block].tolist()),
                    serials[int(index._parents[block])],
                    serials[int(index._serials[block])],
                )
            )
        return tuple(sequences), cached, plain, roots, tuple(publications)
