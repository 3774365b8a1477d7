"""The cache's memory: its shape, and what it holds in every dtype."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError
from tests.cache.random_kv import make_manager, random_rows


def test_tensors_follow_the_config(device: torch.device) -> None:
    manager = make_manager(dtype=torch.float16, device=device)
    assert manager.k_cache(1).shape == manager.v_cache(0).shape == (7, 4, 2, 8)
    assert manager.k_cache(0).dtype == torch.float16
    assert manager.device.type == device.type
    assert manager.stats().bytes_per_block == 2 * 2 * 4 * 2 * 8 * 2
    assert make_manager(dtype=None).k_cache(0).dtype == torch.get_default_dtype()
    with pytest.raises(InvalidInputError, match="dtype"):
        make_manager(dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
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
