"""Caches whose contents depend on the weights, of one rank, and of a rank 0 whose work another repeats."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from paged import KvCacheHandle, PagedKvCacheManager
from paged.cache.tiers.block_store import BlockStore
from paged.cache.tiers.files import FileRead
from paged.cache.tiers.follower import FollowerFiles
from tests.cache.prefix_cache import BLOCK, Cache
from tests.deadline import HANG_S


class WeightedCache(Cache):
    """K and V depend on a number that stands for the model's weights, too."""

    weights = 0

    def expected(self, namespace: Hashable, layer: int, tokens: Sequence[int]) -> torch.Tensor:  # type: ignore[override]
        return Cache.expected((self.weights, namespace), layer, tokens)

    def attach(self, make_store: Callable[[], BlockStore]) -> None:
        self.manager.attach_store(make_store())

    def set_weights(self, weights: int) -> None:
        self.weights = weights
        self.manager.set_fingerprint(b"%d" % weights)

    def close(self, timeout_s: float) -> None:
        self.manager.close_tiers(timeout_s)


class RankedCache(WeightedCache):
    """Rank 0, and another rank that repeats its moves. Its K are the V of rank 0, and its V the K."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.other = PagedKvCacheManager(self.manager.config)
        self.messages: deque[tuple[str, tuple[Any, ...]]] = deque()
        # A thread, so that calls that are made to fail are those of rank 0.
        self.obeying = ThreadPoolExecutor(1)

    def attach(self, make_store: Callable[[], BlockStore]) -> None:
        for manager in (self.manager, self.other):
            manager.attach_store(make_store())
        leading, following = self.manager.files, self.other.files
        assert leading is not None
        assert following is not None
        self.other_files = FollowerFiles(following, self.other.tensors)
        leading.tell, leading.compare = self.tell, self.compare
        self.manager.tensors.listener = self.tell

    def set_weights(self, weights: int) -> None:
        self.send()
        super().set_weights(weights)
        self.other.set_fingerprint(b"%d, another rank" % weights)

    def close(self, timeout_s: float) -> None:
        self.manager.evict(self.manager.config.num_blocks)
        self.send()
        self.other_files.close(timeout_s)
        super().close(timeout_s)

    def tell(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.messages.append((name, tuple(np.array(argument, np.int64) for argument in arguments)))

    def send(self) -> None:
        self.obeying.submit(self.obey).result(HANG_S)

    def obey(self) -> None:
        while self.messages:
            name, arrays = self.messages.popleft()
            owner = self.other_files if name.endswith("_files") else self.other.tensors
            getattr(owner, name)(*(array.tolist() for array in arrays))

    def compare(self, read: FileRead) -> list[Any]:
        self.send()
        assert self.manager.files is not None
        return [
            self.manager.files.progress(read),
            self.obeying.submit(partial(self.other_files.progress, read.number, is_late=read.is_late)).result(HANG_S),
        ]

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        super().write(layer, slots, rows)
        self.send()
        self.other.k_cache(layer).flatten(0, 1)[slots] = -rows
        self.other.v_cache(layer).flatten(0, 1)[slots] = rows

    def check_data(self, handle: KvCacheHandle) -> None:
        super().check_data(handle)
        self.send()
        for layer in self.layers:
            blocks = handle.blocks[self.manager.table_of(layer) :: len(self.manager.config.tables)]
            start = blocks[: -(-handle.num_tokens // BLOCK)].count(0) * BLOCK
            key, value = self.manager.tensors.read(layer, handle.blocks, start, handle.num_tokens)
            other_key, other_value = self.other.tensors.read(layer, handle.blocks, start, handle.num_tokens)
            assert torch.equal(other_key, value)
            assert torch.equal(other_value, key)
