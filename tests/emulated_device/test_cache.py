"""The cache on an emulated GPU: copy-on-write by the kernel, swap on its stream, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch

import paged.cache.host_blocks
from paged import UnsupportedError, copy_blocks
from paged.batch import KvSlotRequest
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.kernels.cache.copy_blocks import BlockCopy
from tests.cache.random_kv import assert_holds, grow, make_manager
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.planted import captured, kinds

Rows = dict[str, tuple[KvCacheHandle, tuple[object, object]]]


def make(manager: PagedKvCacheManager, name: str, count: int) -> tuple[KvCacheHandle, tuple[object, object]]:
    handle = manager.allocate(name)
    return handle, grow(manager, handle, count)


def check(manager: PagedKvCacheManager, handle: KvCacheHandle, rows: tuple[object, object]) -> None:
    assert_holds(manager, handle, *rows)  # type: ignore[arg-type]


def copy_on_write(manager: PagedKvCacheManager, forget: Callable[[], None]) -> None:
    """Two that share a block go on by themselves."""
    first, rows = make(manager, "a", 6)
    second = manager.fork(first, "b")
    forget()
    manager.extend(second, 1)
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    check(manager, first, rows)
    manager.truncate(second, 6)
    check(manager, second, rows)


def swap(manager: PagedKvCacheManager, forget: Callable[[], None]) -> None:
    """Out, while another takes and writes the blocks at once; and back, while the first copies may be under way."""
    first, rows = make(manager, "a", 15)
    forget()
    manager.swap_out(first)
    second, other_rows = make(manager, "b", 16)
    check(manager, second, other_rows)
    manager.free(second)
    manager.swap_in(first)
    manager.swap_out(first)
    manager.swap_in(first)
    check(manager, first, rows)


WAYS = {"copy-on-write": copy_on_write, "swap": swap}


@pytest.mark.parametrize("way", WAYS)
def test_data_are_right(way: str, cuda: EmulatedCuda) -> None:
    WAYS[way](make_manager(device="cuda", num_swap_blocks=6), lambda: None)
    assert not cuda.report.hazards
    assert {launch.kernel for launch in cuda.report.launches} == {"_copy_blocks_kernel"}


@pytest.mark.parametrize("num_staged", [1, 2, 3, 6])
def test_swap_in_chunks(num_staged: int, monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    block = make_manager().stats().bytes_per_block
    monkeypatch.setattr(paged.cache.host_blocks, "_STAGED_BYTES", num_staged * block)
    swap(make_manager(device="cuda", num_swap_blocks=6), lambda: None)
    assert not cuda.report.hazards


@dataclass
class Work:
    """What the device was given: launches, copies from the host and to it; and how often the host waited."""

    launches: int
    sent: int
    received: int
    waits: int


def work_of(run: Callable[[], object], cuda: EmulatedCuda) -> Work:
    mark = cuda.report.mark()
    real = cuda.transfers
    with mock.patch.object(cuda, "transfers", mock.Mock(wraps=real)) as transfers:
        run()
    waits = sum(cuda.report.synchronised_after(mark).values())
    launches = len(cuda.report.launches) - mark.launches
    return Work(launches, transfers.send.call_count, transfers.receive.call_count, waits)


def test_work_of_copy_on_write(cuda: EmulatedCuda) -> None:
    """One copy of the pairs and one launch, whatever the number of sequences and layers."""
    manager = make_manager(device="cuda", num_layers=5, num_blocks=12)
    first = manager.allocate("a", 6)
    manager.advance(first, 6)
    forks = [manager.fork(first, name) for name in "bcd"]
    assert work_of(lambda: manager.reserve([KvSlotRequest(f.cache_id, 7) for f in forks]), cuda) == Work(1, 1, 0, 0)
    assert manager.stats().cow_copies == 3
    assert not cuda.report.hazards


@pytest.mark.parametrize("num_staged", [3, 100])
def test_work_of_swap(num_staged: int, monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    """A launch for each chunk, a copy for each run of neighbours there: not for each layer and cache. And the pairs."""
    block = make_manager(num_layers=5).stats().bytes_per_block
    monkeypatch.setattr(paged.cache.host_blocks, "_STAGED_BYTES", num_staged * block)
    manager = make_manager(device="cuda", num_layers=5, num_blocks=24, num_swap_blocks=24)
    handles = [manager.allocate(name, 20) for name in "abc"]
    for handle in handles:
        manager.advance(handle, 20)
    chunks = 2 if num_staged == 3 else 1
    out, back = Work(chunks, 1, chunks, 0), Work(chunks, 1 + chunks, 0, 0)
    for number in (0, 1):
        assert work_of(partial(manager.swap_out, handles[number]), cuda) == out
    assert work_of(partial(manager.swap_in, handles[0]), cuda) == back
    manager.free(handles[1])
    assert work_of(partial(manager.swap_out, handles[2]), cuda) == out
    assert not cuda.report.hazards


def test_runs_on_the_host(cuda: EmulatedCuda) -> None:
    """Host blocks apart are a copy each, of all layers; where they come from on the device makes no difference."""
    host = make_manager(device="cuda", num_swap_blocks=6)._tensors.host_blocks[0]
    assert work_of(lambda: host.swap_out([(4, 6), (1, 5), (3, 2), (6, 4)]), cuda) == Work(1, 1, 2, 0)
    assert work_of(lambda: host.swap_in([(6, 1), (2, 2)]), cuda) == Work(1, 3, 0, 0)


def test_copies_in_a_graph(cuda: EmulatedCuda) -> None:
    """The pairs are read when it is replayed; what sends addresses is refused."""
    cache = torch.arange(24.0, device="cuda").view(2, 6, 2)
    copy, pairs = BlockCopy(cache.unbind(), cache.unbind()), torch.tensor([[1, 2], [0, 0]], device="cuda")
    copy(pairs)
    graph = captured(lambda: copy(pairs))
    pairs.copy_(torch.tensor([[1, 3], [0, 5]], device="cuda"))
    graph.replay()
    assert cache[0].tolist() == [[0, 1], [2, 3], [2, 3], [2, 3], [8, 9], [0, 1]]
    with pytest.raises(UnsupportedError, match="make a BlockCopy before it"):
        captured(lambda: copy_blocks([cache[0]], pairs))
    assert kinds(cuda) == []


@pytest.mark.parametrize("way", WAYS)
def test_on_the_second_device(way: str) -> None:
    with EmulatedCuda(num_devices=2) as machine:
        WAYS[way](make_manager(device="cuda:1", num_swap_blocks=6), lambda: None)
        assert machine.report.hazards == []
