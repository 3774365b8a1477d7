"""A cache whose contents tell which tokens they belong to, and a subscriber that follows its index."""

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paged import KvCacheHandle, PagedKvCacheConfig, PagedKvCacheManager, UnifiedBatchItem
from paged.cache.events import BlockRemoved, BlocksStored, CacheEvent
from paged.seq_id import as_namespace
from paged.step.batch_step import step_of
from tests.cache.snapshot import published_hashes

BLOCK = 4
CONFIG = PagedKvCacheConfig(num_layers=2, num_kv_heads=1, head_dim=8, block_size=BLOCK, num_blocks=12)
# Hashes of a block alone, whatever came before it, which it shares with others, or with all.
FORGED: list[Callable[[Any], int]] = [
    lambda block: 7,
    lambda block: int(block.sum()) % 3,
    lambda block: hash(tuple(block.tolist())),
]


def forged_chain(hash_of: Callable[[Any], int]) -> Callable[..., list[int]]:
    """In place of `ChainHash.extend` and `extend_each`."""
    return lambda self, previous, blocks, contents=None: [hash_of(block) for block in blocks]


class Cache:
    """A manager, and a forward whose K at a position is a number of the namespace, the layer and all tokens up to it.

    V is the negative, so that any block in the wrong order, or of another prompt, is seen by `check`.
    """

    def __init__(self, manager: PagedKvCacheManager | None = None, **changes: Any) -> None:
        self.manager = manager or PagedKvCacheManager(replace(CONFIG, **changes))
        self.layers = [layer for table in self.manager.config.tables for layer in table.layers]
        self.tokens: dict[KvCacheHandle, list[int]] = {}

    def begin(self, seq_id: str | int, tokens: Sequence[int], namespace: Hashable = None) -> KvCacheHandle:
        """Allocate, and see that the cached prefix is right."""
        handle = self.manager.allocate(seq_id, token_ids=tokens, namespace=namespace)
        self.tokens[handle] = list(tokens[: handle.num_tokens])
        self.check(handle)
        return handle

    def run(self, seq_id: str | int, tokens: Sequence[int], namespace: Hashable = None) -> KvCacheHandle:
        """Allocate, and compute what is not cached."""
        handle = self.begin(seq_id, tokens, namespace)
        self.feed(handle, tokens[handle.num_tokens :])
        return handle

    def feed(self, handle: KvCacheHandle, tokens: Sequence[int]) -> None:
        """One forward of one sequence."""
        item = UnifiedBatchItem(handle.cache_id, tokens, kv_cache=handle, pos_offset=handle.num_tokens)
        known = [*self.tokens[handle], *tokens]
        with step_of(self.manager, [item]) as step:
            for layer in self.layers:
                rows = self.expected(handle.namespace, layer, known)[handle.num_tokens :]
                _, slots = step.metadata.table(self.manager.table_of(layer))
                self.write(layer, slots, rows.to(slots.device))
        self.tokens[handle] = known

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write what a forward has computed."""
        self.manager.k_cache(layer).flatten(0, 1)[slots] = rows
        self.manager.v_cache(layer).flatten(0, 1)[slots] = -rows

    def fork(self, handle: KvCacheHandle, seq_id: str | int) -> KvCacheHandle:
        fork = self.manager.fork(handle, seq_id)
        self.tokens[fork] = list(self.tokens[handle])
        return fork

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        self.manager.truncate(handle, num_tokens)
        del self.tokens[handle][num_tokens:]

    def free(self, handle: KvCacheHandle) -> None:
        self.manager.free(handle)
        del self.tokens[handle]

    def found(self, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """Tokens that the index knows of a prompt; changes nothing."""
        return BLOCK * len(self.manager._prefixes.index.match(list(tokens), as_namespace("namespace", namespace))[0])

    def check(self, *handles: KvCacheHandle) -> None:
        """The sequences, or all, hold their own data, and the cache is sound."""
        for handle in handles or self.tokens:
            self.check_data(handle)
        self.manager.check_integrity()

    def check_data(self, handle: KvCacheHandle) -> None:
        """Of what lies behind a sliding window nothing is asked."""
        count, tables = handle.num_tokens, self.manager.config.tables
        assert count == len(self.tokens[handle])
        for layer in self.layers:
            table = self.manager.table_of(layer)
            has_window = tables[table].most_seen is not None
            start = handle.blocks[table :: len(tables)][: -(-count // BLOCK)].count(0) * BLOCK if has_window else 0
            key, value = self.manager.read_kv(handle, layer, start, count - start)
            expected = self.expected(handle.namespace, layer, self.tokens[handle])[start:]
            assert torch.equal(key.cpu(), expected)
            assert torch.equal(value.cpu(), -expected)

    @staticmethod
    def expected(namespace: Hashable, layer: int, tokens: Sequence[int]) -> torch.Tensor:
        digest, numbers = zlib.crc32(f"{namespace} {layer}".encode()), []
        for token in tokens:
            digest = zlib.crc32(token.to_bytes(4, "little"), digest)
            numbers.append(digest % (1 << 24))  # exact in float32
        return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, CONFIG.head_dim)

    def hashes(self) -> set[int | bytes]:
        """Of all published blocks."""
        return set(published_hashes(self.manager).values())


class Mirror:
    """What a subscriber knows of the index, and the removals it could not make sense of."""

    def __init__(self, manager: PagedKvCacheManager) -> None:
        self.hashes: set[int | bytes] = set()
        self.events: list[CacheEvent] = []
        self.unknown: list[CacheEvent] = []
        manager.subscribe(self.hear)

    def hear(self, event: CacheEvent) -> None:
        self.events.append(event)
        if isinstance(event, BlocksStored):
            self.hashes |= set(event.hashes)
        elif isinstance(event, BlockRemoved):
            if event.hash not in self.hashes:
                self.unknown.append(event)
            self.hashes.discard(event.hash)
        else:
            self.hashes.clear()
