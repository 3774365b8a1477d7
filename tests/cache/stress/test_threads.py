"""One manager under many threads: nothing is lost, nothing is held twice, none reads another's K/V."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from paged import MemoryPressure, OutOfBlocksError
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from tests.cache.prefix_cache import BLOCK, Cache

NUM_THREADS = 8
NUM_STEPS = 250
# Sequences of a thread before it frees one; all threads together then want more blocks than there are.
MAX_SEQUENCES = 6
CONFIG = PagedKvCacheConfig(1, 1, 8, BLOCK, 64, num_swap_blocks=24, dtype=torch.float32, device="cpu")


class Worker(Cache):
    """Calls in random order, from a thread of its own, until it has made `num_steps`."""

    def __init__(self, manager: PagedKvCacheManager, number: int, num_steps: int) -> None:
        super().__init__(manager)
        self.number, self.num_steps = number, num_steps
        self.random = random.Random(number)
        self.num_made = self.num_refused = 0
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            for _ in range(self.num_steps):
                try:
                    self.step()
                except OutOfBlocksError:
                    self.num_refused += 1
                    if self.tokens:
                        self.free(self.pick())
            for handle in list(self.tokens):
                self.free(handle)
        except BaseException as error:
            self.error = error

    def pick(self, *, is_swapped: bool | None = None) -> KvCacheHandle | None:
        found = [handle for handle in self.tokens if is_swapped in (None, handle.is_swapped)]
        return self.random.choice(found) if found else None

    def step(self) -> None:
        ready, swapped = self.pick(is_swapped=False), self.pick(is_swapped=True)
        if len(self.tokens) >= MAX_SEQUENCES:
            self.free(self.pick())
        elif ready is None or self.random.random() < 0.3:
            self.allocate()
        elif swapped is not None and self.random.random() < 0.3:
            self.manager.swap_in(swapped)
            self.check_data(swapped)
        else:
            actions: list[Callable[[], object]] = [
                lambda: self.extend(ready, self.new_ids()),
                lambda: self.feed(ready, self.new_ids()),
                lambda: self.fork(ready, self.new_name()),
                lambda: self.manager.swap_out(ready),
                lambda: self.free(ready),
            ]
            self.random.choice(actions)()

    def allocate(self) -> None:
        """Room alone, or for a prompt of few distinct blocks, which other threads have begun with too."""
        if self.random.random() < 0.3:
            self.tokens[self.manager.allocate(self.new_name(), self.random.randrange(12))] = []
            return
        prompt = [self.random.randrange(2) for _ in range(2) for _ in range(BLOCK)] + self.new_ids()
        handle = self.manager.allocate(self.new_name(), token_ids=prompt)
        self.tokens[handle] = prompt[: handle.num_tokens]
        self.check_data(handle)
        self.feed(handle, prompt[handle.num_tokens :])

    def extend(self, handle: KvCacheHandle, new_ids: list[int]) -> None:
        """Room first, then what stands there, then its ids."""
        self.manager.extend(handle, len(new_ids))
        start = len(self.tokens[handle])
        self.tokens[handle] += new_ids
        key = self.expected(handle.namespace, 0, self.tokens[handle])[start:]
        self.manager.write_kv(handle, 0, start, key, -key)
        self.manager.commit(handle, self.tokens[handle])

    def free(self, handle: KvCacheHandle) -> None:
        if not handle.is_swapped:
            self.check_data(handle)
        super().free(handle)

    def new_name(self) -> str:
        self.num_made += 1
        return f"{self.number}.{self.num_made}"

    def new_ids(self) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randrange(1, 6))]


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Threads take turns every 10 us, where 5 ms let most calls run alone."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_frequent_switches")
def test_threads_lose_nothing() -> None:
    manager = PagedKvCacheManager(CONFIG)
    levels = [MemoryPressure.LOW]
    manager.on_pressure(levels.append)
    workers = [Worker(manager, number, NUM_STEPS) for number in range(NUM_THREADS)]
    threads = [threading.Thread(target=worker.work) for worker in workers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.02)
        manager.check_integrity()
    assert [worker.error for worker in workers] == [None] * NUM_THREADS
    manager.check_integrity()
    stats = manager.stats()
    assert (stats.num_sequences, stats.free_blocks, stats.swap_blocks_free) == (0, 64, 24)
    assert manager.pressure is MemoryPressure.LOW
    # The run met what it is about.
    assert MemoryPressure.CRITICAL in levels
    assert sum(worker.num_refused for worker in workers) == stats.allocation_failures > 0
    assert all(worker.num_made > worker.num_refused for worker in workers)
    assert min(stats.prefix_hits, stats.evictions, stats.cow_copies, stats.swapped_in_blocks) > 0
