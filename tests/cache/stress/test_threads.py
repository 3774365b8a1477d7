"""One manager under many threads: nothing is lost, nothing is held twice, none reads another's K/V."""

from __future__ import annotations

import random
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from paged import MemoryPressure, OutOfBlocksError
from paged.batch import KvSlotRequest
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager

SECONDS = 30.0
NUM_THREADS = 8
BLOCK_SIZE = 4
# Sequences of a thread before it frees one; all threads together then want more blocks than there are.
MAX_SEQUENCES = 6
CONFIG = PagedKvCacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=BLOCK_SIZE,
    num_blocks=64,
    num_swap_blocks=24,
    dtype=torch.float32,
    device="cpu",
)


@dataclass
class Sequence:
    """What a thread knows of one of its sequences: the ids at all positions, and whether it is in host memory."""

    handle: KvCacheHandle
    ids: list[int]
    is_swapped: bool = False


class Worker(threading.Thread):
    """Calls in random order until `end`. The K of a token is a checksum of all ids up to it, so a prefix that serves
    another prompt's K/V is seen.
    """

    def __init__(self, manager: PagedKvCacheManager, number: int, end: float) -> None:
        super().__init__()
        self.manager = manager
        self.number = number
        self.end = end
        self.random = random.Random(number)
        self.sequences: list[Sequence] = []
        self.num_made = 0
        self.num_refused = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self.end:
                try:
                    self.step()
                except OutOfBlocksError:
                    self.num_refused += 1
                    if self.sequences:
                        self.free(self.random.choice(self.sequences))
            for sequence in self.sequences.copy():
                self.free(sequence)
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        ready = [sequence for sequence in self.sequences if not sequence.is_swapped]
        swapped = [sequence for sequence in self.sequences if sequence.is_swapped]
        if len(self.sequences) >= MAX_SEQUENCES:
            self.free(self.random.choice(self.sequences))
        elif not ready or self.random.random() < 0.3:
            self.allocate()
        elif swapped and self.random.random() < 0.3:
            self.swap_in(self.random.choice(swapped))
        else:
            action = self.random.choice([self.extend, self.reserve, self.fork, self.swap_out, self.free])
            action(self.random.choice(ready))

    def allocate(self) -> None:
        """Room alone, or for a prompt of few distinct blocks, which other threads have begun with too."""
        if self.random.random() < 0.3:
            self.add(self.manager.allocate(self.new_name(), self.random.randrange(12)), [])
            return
        prompt = [self.random.randrange(2) for _ in range(2) for _ in range(BLOCK_SIZE)] + self.new_ids()
        handle = self.manager.allocate(self.new_name(), token_ids=prompt)
        sequence = self.add(handle, prompt[: handle.num_tokens])
        self.check(sequence)
        self.run_model(sequence, prompt[handle.num_tokens :])

    def extend(self, sequence: Sequence) -> None:
        """Room first, then what stands there, then its ids."""
        start, ids = len(sequence.ids), sequence.ids + self.new_ids()
        self.manager.extend(sequence.handle, len(ids) - start)
        sequence.ids = ids
        key = checksums(ids)[start:]
        self.manager.write_kv(sequence.handle, 0, start, key, -key)
        self.manager.commit(sequence.handle, ids)

    def reserve(self, sequence: Sequence) -> None:
        self.run_model(sequence, self.new_ids())

    def run_model(self, sequence: Sequence, new_ids: list[int]) -> None:
        """As an executor adds tokens."""
        handle, start, ids = sequence.handle, len(sequence.ids), sequence.ids + new_ids
        with self.manager.reserve([KvSlotRequest(handle.cache_id, len(ids))]) as reservation:
            slots = self.manager.build_metadata([(handle, len(new_ids))]).slot_mapping
            key = checksums(ids)[start:]
            self.manager.k_cache(0).flatten(0, 1)[slots] = key
            self.manager.v_cache(0).flatten(0, 1)[slots] = -key
            reservation.commit()
        sequence.ids = ids
        self.manager.append_tokens([(handle, new_ids)])

    def fork(self, sequence: Sequence) -> None:
        self.add(self.manager.fork(sequence.handle, self.new_name()), sequence.ids)

    def swap_out(self, sequence: Sequence) -> None:
        self.manager.swap_out(sequence.handle)
        sequence.is_swapped = True

    def swap_in(self, sequence: Sequence) -> None:
        self.manager.swap_in(sequence.handle)
        sequence.is_swapped = False
        self.check(sequence)

    def free(self, sequence: Sequence) -> None:
        if not sequence.is_swapped:
            self.check(sequence)
        self.manager.free(sequence.handle)
        self.sequences.remove(sequence)

    def check(self, sequence: Sequence) -> None:
        assert sequence.handle.num_tokens == len(sequence.ids)
        key, value = self.manager.read_kv(sequence.handle, 0, 0, len(sequence.ids))
        assert torch.equal(key, checksums(sequence.ids).expand_as(key))
        assert torch.equal(value, -key)

    def add(self, handle: KvCacheHandle, ids: list[int]) -> Sequence:
        self.sequences.append(Sequence(handle, ids))
        return self.sequences[-1]

    def new_name(self) -> str:
        self.num_made += 1
        return f"{self.number}.{self.num_made}"

    def new_ids(self) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randrange(1, 6))]


def checksums(ids: list[int]) -> torch.Tensor:
    """Of ids[: i + 1] for every i, float32 [len(ids), 1, 8]; 24 bits, which float32 holds exactly."""
    sums = [zlib.crc32(bytes(ids[: i + 1])) & 0xFFFFFF for i in range(len(ids))]
    return torch.tensor(sums, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, 8)


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Threads take turns every 10 us, where 5 ms let most calls run alone."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_frequent_switches", "torch_backend")
def test_threads_lose_nothing() -> None:
    manager = PagedKvCacheManager(CONFIG)
    levels = [MemoryPressure.LOW]
    manager.on_pressure(levels.append)
    end = time.monotonic() + SECONDS
    workers = [Worker(manager, number, end) for number in range(NUM_THREADS)]
    for worker in workers:
        worker.start()
    while time.monotonic() < end:
        time.sleep(0.1)
        manager.check_integrity()
    for worker in workers:
        worker.join()
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
