"""The cache on an emulated GPU: copy-on-write by the kernel, swap on its stream, and what the host waits for."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch

import paged.cache.host_blocks
from paged import UnsupportedError, copy_blocks
from paged.cache.manager import PagedKvCacheManager
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.step.batch import KvSlotRequest
from tests.cache.random_kv import assert_holds, grow, make_manager
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.planted import captured, kinds

HOST_CACHE_BYTES = 12 * make_manager(device="cpu").stats().bytes_per_block


def copy_on_write(manager: PagedKvCacheManager) -> None:
    """Two that share a block go on by themselves."""
    first = manager.allocate("a")
    rows = grow(manager, first, 6)
    second = manager.fork(first, "b")
    manager.extend(second, 1)
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    assert_holds(manager, first, *rows)
    manager.truncate(second, 6)
    assert_holds(manager, second, *rows)


def swap(manager: PagedKvCacheManager) -> None:
    """Out, while another takes and writes the blocks at once; and back, while the first copies may be under way."""
    first = manager.allocate("a")
    rows = grow(manager, first, 15)
    manager.swap_out(first)
    second = manager.allocate("b")
    assert_holds(manager, second, *grow(manager, second, 16))
    manager.free(second)
    manager.swap_in(first)
    manager.swap_out(first)
    manager.swap_in(first)
    assert_holds(manager, first, *rows)


def tier(manager: PagedKvCacheManager) -> None:
    """Two prompts take turns in a pool for one of them: each turn stores the other's blocks and loads over them."""
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for turn, start in enumerate((0, 100, 0, 100)):
        tokens = list(range(start, start + 21))
        handle = manager.allocate(turn, token_ids=tokens)
        if handle.num_tokens:
            assert_holds(manager, handle, *(part[: handle.num_tokens] for part in rows[start]))
        else:
            rows[start] = grow(manager, handle, 21)
            manager.commit(handle, tokens)
        manager.free(handle)
    assert manager.stats().host_loaded_blocks == 10


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("way", [copy_on_write, swap, tier])
def test_data_are_right(way: Callable[[PagedKvCacheManager], None], device: str) -> None:
    with EmulatedCuda(num_devices=2) as machine:
        way(make_manager(device=device, num_swap_blocks=6, host_cache_bytes=HOST_CACHE_BYTES))
        assert not machine.report.hazards
        assert {launch.kernel for launch in machine.report.launches} == {"_copy_blocks_kernel"}


@pytest.mark.parametrize("num_staged", [1, 2, 3, 6])
def test_swap_in_chunks(num_staged: int, monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    block = make_manager().stats().bytes_per_block
    monkeypatch.setattr(paged.cache.host_blocks, "_STAGED_BYTES", num_staged * block)
    swap(make_manager(device="cuda", num_swap_blocks=6))
    assert not cuda.report.hazards


class Work(NamedTuple):
    """What the device was given: launches, copies from the host and to it; and how often the host waited."""

    launches: int
    sent: int
    received: int
    waits: int = 0


def work_of(run: Callable[[], object], cuda: EmulatedCuda) -> Work:
    mark = cuda.report.mark()
    with mock.patch.object(cuda, "transfers", mock.Mock(wraps=cuda.transfers)) as transfers:
        run()
    launches = len(cuda.report.launches) - mark.launches
    waits = cuda.report.synchronised_after(mark).total()
    return Work(launches, transfers.send.call_count, transfers.receive.call_count, waits)


def test_work_of_copy_on_write(cuda: EmulatedCuda) -> None:
    """One copy of the pairs and one launch, whatever the number of sequences and layers."""
    manager = make_manager(device="cuda", num_layers=5, num_blocks=12)
    first = manager.allocate("a", 6)
    manager.advance(first, 6)
    forks = [manager.fork(first, name) for name in "bcd"]
    assert work_of(lambda: manager.reserve([KvSlotRequest(f.cache_id, 7) for f in forks]), cuda) == Work(1, 1, 0)
    assert manager.stats().cow_copies == 3
    assert not cuda.report.hazards


@pytest.mark.parametrize(("num_staged", "chunks"), [(3, 2), (100, 1)])
def test_work_of_swap(num_staged: int, chunks: int, monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    """A launch for each chunk, a copy for each run of neighbours there: not for each layer and cache. And the pairs."""
    block = make_manager(num_layers=5).stats().bytes_per_block
    monkeypatch.setattr(paged.cache.host_blocks, "_STAGED_BYTES", num_staged * block)
    manager = make_manager(device="cuda", num_layers=5, num_blocks=24, num_swap_blocks=24)
    handles = [manager.allocate(name, 20) for name in "abc"]
    for handle in handles:
        manager.advance(handle, 20)
    out, back = Work(chunks, 1, chunks), Work(chunks, 1 + chunks, 0)
    for number in (0, 1):
        assert work_of(partial(manager.swap_out, handles[number]), cuda) == out
    assert work_of(partial(manager.swap_in, handles[0]), cuda) == back
    manager.free(handles[1])
    assert work_of(partial(manager.swap_out, handles[2]), cuda) == out
    assert not cuda.report.hazards


def test_runs_on_the_host(cuda: EmulatedCuda) -> None:
    """Host blocks apart are a copy each, of all layers; where they come from on the device makes no difference."""
    host = make_manager(device="cuda", num_swap_blocks=6).tensors.host
    assert work_of(lambda: host.swap_out([(4, 6), (1, 5), (3, 2), (6, 4)]), cuda) == Work(1, 1, 2)
    assert work_of(lambda: host.swap_in([(6, 1), (2, 2)]), cuda) == Work(1, 3, 0)


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
