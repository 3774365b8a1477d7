"""K and V of a sequence are read back as they were written, and nothing else can be read."""

import pytest
import torch

from paged import InvalidInputError
from paged.cache.manager import PagedKvCacheManager
from tests.cache.random_kv import random_rows


def test_six_tokens_read_back_across_two_blocks(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 6)
    key, value = random_rows(6)
    for position in range(6):
        manager.write_kv(handle, 1, position, key[position], value[position])
    manager.advance(handle, 6)
    got_key, got_value = manager.read_kv(handle, 1, 0, 6)
    assert torch.equal(got_key.cpu(), key)
    assert torch.equal(got_value.cpu(), value)
    assert torch.equal(manager.read_kv(handle, 1, 3, 2)[0].cpu(), key[3:5])
    assert torch.equal(manager.k_cache(1)[handle.blocks[1], 1].cpu(), key[5])
    assert torch.equal(manager.v_cache(1)[handle.blocks[1], 1].cpu(), value[5])
    assert not manager.read_kv(handle, 0, 0, 6)[0].any()


def test_reads_stop_at_what_was_written_without_a_gap(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 8)
    key, value = random_rows(8)
    manager.write_kv(handle, 0, 0, key[:3], value[:3])
    manager.write_kv(handle, 0, 5, key[5:6], value[5:6])
    assert torch.equal(manager.read_kv(handle, 0, 0, 3)[0].cpu(), key[:3])
    with pytest.raises(InvalidInputError, match="expected within the 3 written"):
        manager.read_kv(handle, 0, 5, 1)
    manager.write_kv(handle, 0, 3, key[3:], value[3:])
    assert torch.equal(manager.read_kv(handle, 0, 0, 8)[1].cpu(), value)
    manager.advance(handle, 2)
    manager.truncate(handle, 1)
    with pytest.raises(InvalidInputError, match="expected within the 1 written"):
        manager.read_kv(handle, 0, 1, 1)
