"""What the check of reference counts finds, and how long blocks live and wait."""

import pytest

from paged import PagedError
from paged.cache.pool import BlockPool


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
