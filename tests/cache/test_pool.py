"""Reference counts and the free list."""

import subprocess
import sys

import pytest

from paged import OutOfBlocksError, PagedError
from paged.cache.pool import BlockPool


def test_hands_out_every_block_but_block_0() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    with pytest.raises(OutOfBlocksError) as caught:
        pool.allocate(1)
    assert (caught.value.needed, caught.value.free) == (1, 0)
    assert pool.allocate(0) == []


def test_check_names_what_contradicts() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.check({first: 1, second: 1})
    with pytest.raises(PagedError, match=f"block {second}: reference count 1, but 0 references"):
        pool.check({first: 1})
    with pytest.raises(PagedError, match="block 0"):
        pool.check({0: 1, first: 1, second: 1})
    pool._free.append(first)
    with pytest.raises(PagedError, match=f"block {first}: reference count 0, but 1 references are held"):
        pool.check({first: 1, second: 1})
    pool._free.append(first)
    with pytest.raises(PagedError, match="twice"):
        pool.check({first: 1, second: 1})


def test_bookkeeping_and_its_picture_take_no_torch() -> None:
    code = "import paged, sys; paged.cache_picture, paged.KvCacheHandle; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ages_of_sampled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 16th call's block lives 5 ms (bucket of 4 to 8), waits 100 ms (64 to 128), and is then somebody else's."""
    now = 0.0
    monkeypatch.setattr("paged.cache.pool.time.monotonic", lambda: now)
    published: set[int] = set()
    pool = BlockPool(20, published)
    *_, block = [pool.allocate(1)[0] for _ in range(16)]
    published.add(block)
    now = 0.005
    pool.release([block])
    now = 0.105
    pool.share([block])
    assert pool.ages.lifetimes[3] == sum(pool.ages.lifetimes) == 1
    assert pool.ages.reuse_gaps[7] == sum(pool.ages.reuse_gaps) == 1
    published.clear()
    pool.release([block])
    assert sum(pool.ages.lifetimes) == 2
    assert pool.allocate(1) == [block]
    pool.release([block])
    assert sum(pool.ages.lifetimes) == 2
