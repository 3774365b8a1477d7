"""The cache's memory: its shape, and what it holds in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged import InvalidInputError, KvCacheHandle
from paged.cache.groups import CacheGroup
from tests.cache.random_kv import make_manager, random_rows


def test_tensors_follow_the_config(device: torch.device) -> None:
    manager = make_manager(dtype=torch.float16, device=device)
    assert manager.k_cache(1).shape == manager.v_cache(0).shape == (7, 4, 2, 8)
    assert manager.k_cache(0).dtype == torch.float16
    assert manager.device.type == device.type
    assert manager.stats().bytes_per_block == 2 * 2 * 4 * 2 * 8 * 2
    assert make_manager(dtype=None).k_cache(0).dtype == torch.get_default_dtype()
    with pytest.raises(InvalidInputError, match="dtype"):
        make_manager(dtype=torch.int16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_slow_access_converts_to_the_cache_dtype(dtype: torch.dtype, device: torch.device) -> None:
    manager = make_manager(dtype=dtype, device=device)
    handle = manager.allocate("a", 6)
    key, value = random_rows(6)
    manager.write_kv(handle, 0, 0, key, value)
    manager.extend(manager.fork(handle, "b"), 1)
    got_key, got_value = manager.read_kv(handle, 0, 0, 6)
    assert torch.equal(got_key.cpu().float(), key.to(dtype).float())
    assert torch.equal(got_value.cpu().float(), value.to(dtype).float())


@pytest.mark.usefixtures("backend")
def test_an_8_bit_cache_moves_its_bytes(device: torch.device) -> None:
    """Saturated, cleared, shared, copied before a write, swapped out and back: half the bytes of 16 bits."""
    manager = make_manager(dtype=torch.float8_e4m3fn, device=device, num_swap_blocks=6)
    assert manager.stats().bytes_per_block == 2 * 2 * 4 * 2 * 8
    parent = manager.allocate("a", 6)
    key, value = (400 * torch.randn(6, 2, 8) for _ in range(2))
    key[0, 0, :3] = torch.tensor([torch.inf, -1e6, torch.nan])
    manager.advance(parent, 6)
    for layer in range(2):
        manager.write_kv(parent, layer, 0, key, value)
    child = manager.fork(parent, "b")
    manager.extend(child, 1)
    assert manager.stats().cow_copies == 1
    manager.swap_out(parent)
    manager.swap_in(parent)
    for handle, layer in ((parent, 0), (parent, 1), (child, 0), (child, 1)):
        stored = manager.read_kv(handle, layer, 0, 6)
        for got, rows in zip(stored, (key, value), strict=True):
            assert got.dtype == torch.float8_e4m3fn
            want = rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()
            torch.testing.assert_close(got.float().cpu(), want, rtol=0, atol=0, equal_nan=True)
    new_key, _ = manager.read_kv(child, 1, 6, 1)
    assert not new_key.float().any()


def _quantised(rows: torch.Tensor) -> torch.Tensor:
    """What int8 holds of rows: the largest magnitude of each is 127 steps."""
    step = rows.double().abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (rows / step).round() * step, 0.0)


def test_int8_takes_132_bytes_where_16_bits_take_256(device: torch.device) -> None:
    sizes = {"num_kv_heads": 8, "head_dim": 128, "block_size": 16, "device": device}
    halves, quarters = (make_manager(dtype=dtype, **sizes) for dtype in (torch.float16, torch.int8))
    assert halves.stats().bytes_per_block * 132 == quarters.stats().bytes_per_block * 256
    assert halves.scales(0) == (None, None)
    k_scale, v_scale = quarters.scales(1)
    assert k_scale is not None
    assert v_scale is not None
    assert k_scale.shape == v_scale.shape == quarters.k_cache(1).shape[:3]
    assert k_scale.dtype == v_scale.dtype == torch.float32


GROUPS = (CacheGroup((0,), 2, 8), CacheGroup((1, 2), 1, 4, 6, sliding_window=5), CacheGroup((3,), 3, 2))


@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 4, "groups": GROUPS, "num_blocks": 12}, {"head_dim": 3}], ids=str
)
def test_int8_rows_and_scales_lie_apart(changes: dict[str, Any], device: torch.device) -> None:
    """Every byte belongs to one row or one scale at the most, and none to two blocks."""
    manager = make_manager(dtype=torch.int8, device=device, **changes)
    storages, layers = manager._tensors.storages, range(manager.config.num_layers)
    caches = {layer: (manager.k_cache(layer), manager.v_cache(layer), *manager.scales(layer)) for layer in layers}
    for table in {manager.table_of(layer) for layer in layers}:
        num_bytes = 0
        for storage in storages:
            storage.zero_()
        for layer in (one for one in layers if manager.table_of(one) == table):
            for cache in caches[layer]:
                assert cache is not None
                cache[3].view(torch.uint8).fill_(255)
                num_bytes += cache[3].nbytes
        filled = [storage.view(torch.uint8).view(*storage.shape[:2], -1) == 255 for storage in storages]
        assert sum(int(one.sum()) for one in filled) == num_bytes == sum(int(one[:, 3].sum()) for one in filled)
    num_bytes = sum(storage[:, 3].nbytes for storage in storages)
    assert num_bytes == manager.stats().bytes_per_block == manager.config.block_bytes(torch.int8)


@pytest.mark.usefixtures("backend")
def test_int8_scales_go_where_their_rows_go(device: torch.device) -> None:
    """Shared, copied before a write, swapped out and back, found as a prefix, rolled back, cleared; NaN is told."""
    manager = make_manager(dtype=torch.int8, device=device, num_swap_blocks=6, num_blocks=9)
    parent = manager.allocate("a", token_ids=list(range(7)))
    key, value = (torch.randn(7, 2, 8) * 10.0 ** torch.randint(-3, 4, (7, 2, 1)) for _ in range(2))
    key[0, 0, 3], value[2, 1, 0], value[4] = torch.nan, -torch.inf, 0.0
    for layer in range(2):
        manager.write_kv(parent, layer, 0, key, value)
    manager.advance(parent, 7)
    manager.commit(parent, list(range(7)))
    expected = _quantised(key), _quantised(value)
    expected[0][0, 0], expected[1][2, 1] = torch.nan, torch.nan

    def check(handle: KvCacheHandle, count: int) -> None:
        for layer in range(2):
            for got, want in zip(manager.read_kv(handle, layer, 0, count), expected, strict=True):
                assert got.dtype == torch.float32
                torch.testing.assert_close(got.cpu().double(), want[:count], rtol=1e-6, atol=1e-6, equal_nan=True)

    child = manager.fork(parent, "b")
    manager.write_kv(child, 0, 6, torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    assert manager.stats().cow_copies == 1
    check(parent, 7)
    check(child, 6)
    manager.swap_out(parent)
    manager.swap_in(parent)
    check(parent, 7)
    manager.truncate(parent, 3)
    check(parent, 3)
    with pytest.raises(InvalidInputError, match="expected within the capacity"):
        manager.write_kv(parent, 0, 3, key, value)
    check(parent, 3)
    found = manager.allocate("c", token_ids=list(range(7)))
    assert found.num_cached_tokens == 4
    check(found, 4)
    manager.extend(found, 3)  # positions that nothing was written to
    for got in manager.read_kv(found, 1, 4, 3):
        assert not got.any()
