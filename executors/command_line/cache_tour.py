"""A small workload that leaves a cache with a block of every kind, to look at."""

from __future__ import annotations

from collections.abc import Sequence

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from paged.executors.llm_executor import LlmExecutor
from paged.seq_id import SeqId


def run_tour(executor: LlmExecutor) -> None:
    """Run, in blocks of the cache's size: a prompt that ends and stays cached; two questions that share three blocks
    of instructions with it; a fork of one that has written since, and one that has not; a sequence that is swapped out.
    """
    manager = executor.kv_manager
    assert manager is not None
    size, vocab_size = manager.config.block_size, executor.info().vocab_size

    def ids(first: int, count: int) -> list[int]:
        return [(first + 7 * index) % vocab_size for index in range(count)]

    def extend(handle: KvCacheHandle, token_ids: Sequence[int]) -> None:
        item = UnifiedBatchItem(handle.cache_id, token_ids, kv_cache=handle, pos_offset=handle.num_tokens)
        executor.unified_decode(UnifiedBatch([item]))

    def start(name: SeqId, token_ids: list[int]) -> KvCacheHandle:
        handle = manager.allocate(name, token_ids=token_ids)
        extend(handle, token_ids[handle.num_tokens :])
        return handle

    instructions = ids(3, 3 * size)
    manager.free(start("finished", instructions + ids(4, 4 * size)))
    first = start("question 1", instructions + ids(5, 2 * size + size // 2))
    second = start("question 2", instructions + ids(6, size + size // 2))
    extend(manager.fork(first, "its fork"), ids(8, 1))
    manager.fork(second, "an idle fork")
    manager.swap_out(start("swapped out", ids(9, 2 * size)))
