"""Reference counts and the free list."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paged import OutOfBlocksError, PagedError
from paged.block_pool import BlockPool


def test_hands_out_every_block_but_block_0() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    with pytest.raises(OutOfBlocksError) as caught:
        pool.allocate(1)
    assert (caught.value.needed, caught.value.free) == (1, 0)
    assert pool.allocate(0) == []


def test_a_block_is_free_when_its_last_reference_drops() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    assert len(pool.shared) == 1
    pool.release(blocks)
    assert (pool.num_free, len(pool.shared), pool.ref_count(blocks[0])) == (2, 0, 1)
    pool.release(blocks[:1])
    assert pool.num_free == 3
    pool.check({})


def test_blocks_given_back_are_reused_first_and_in_order() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(3) == blocks


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


def test_bookkeeping_takes_no_torch() -> None:
    code = "import sys, paged.block_pool, paged.kv_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
