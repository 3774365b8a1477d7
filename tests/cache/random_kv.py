"""A small cache, and random K and V in it."""

from dataclasses import replace
from typing import Any

import torch

from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager

CONFIG = PagedKvCacheConfig(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, num_blocks=6, dtype=torch.float32)


def make_manager(**changes: Any) -> PagedKvCacheManager:
    return PagedKvCacheManager(replace(CONFIG, **changes))


def random_rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `count` tokens in one layer."""
    return torch.randn(count, 2, 8), torch.randn(count, 2, 8)


def grow(manager: PagedKvCacheManager, handle: KvCacheHandle, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append `count` random tokens to `handle` in every layer and return what layer 0 got."""
    start = handle.num_tokens
    manager.extend(handle, count)
    key, value = random_rows(count)
    for layer in range(CONFIG.num_layers):
        manager.write_kv(handle, layer, start, key + layer, value + layer)
    return key, value


def assert_holds(manager: PagedKvCacheManager, handle: KvCacheHandle, key: torch.Tensor, value: torch.Tensor) -> None:
    """`handle` begins with what `grow` returned."""
    for layer in range(CONFIG.num_layers):
        got_key, got_value = manager.read_kv(handle, layer, 0, len(key))
        assert torch.equal(got_key.cpu(), key + layer)
        assert torch.equal(got_value.cpu(), value + layer)
