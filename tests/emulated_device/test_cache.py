"""The cache on an emulated GPU: copy-on-write by the kernel, swap on its stream, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from tests.cache.random_kv import assert_holds, grow, make_manager
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.known import xfailing

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
    assert {launch.kernel for launch in cuda.report.launches} <= {"_copy_blocks_kernel"}
    assert bool(cuda.report.launches) == (way == "copy-on-write")


def waits_of(way: str, cuda: EmulatedCuda) -> list[str]:
    """Where the cache waits, but for the accesses for tests and inspection."""
    marks = []
    WAYS[way](make_manager(device="cuda", num_swap_blocks=6), lambda: marks.append(cuda.report.mark()))
    return sorted(
        wait.place for wait in cuda.report.synchronised_after(marks[0]) if not wait.place.startswith("tests/")
    )


@pytest.mark.parametrize("way", xfailing(WAYS, {"copy-on-write": "pairs and addresses go there from pageable memory"}))
def test_the_host_does_not_wait(way: str, cuda: EmulatedCuda) -> None:
    slow = "paged/cache/tensors.py"  # write_kv and read_kv
    assert [place for place in waits_of(way, cuda) if not place.startswith(slow)] == []


@pytest.mark.parametrize("way", WAYS)
def test_on_the_second_device(way: str) -> None:
    with EmulatedCuda(num_devices=2) as machine:
        WAYS[way](make_manager(device="cuda:1", num_swap_blocks=6), lambda: None)
        assert machine.report.hazards == []
