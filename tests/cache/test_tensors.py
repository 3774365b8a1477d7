"""The cache's memory: its shape, and what it holds in every dtype."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import InvalidInputError, KvCacheHandle
from paged.cache import tensors
from paged.cache.groups import CacheGroup
from paged.kernels.core.device import default_device
from paged.kernels.core.dtypes import kv_kind
from paged.models.loading.load_options import LoadOptions
from tests.cache.random_kv import make_manager
from tests.float64 import to_float8
from tests.tolerance import assert_within

GROUPS = (CacheGroup((0,), 2, 8), CacheGroup((1, 2), 1, 4, 6, sliding_window=5), CacheGroup((3,), 3, 2))
_FIVE_LAYERS = {"num_layers": 5, "groups": GROUPS, "num_blocks": 12}


def test_tensors_follow_the_config(device: torch.device) -> None:
    manager = make_manager(dtype=torch.float16, device=device)
    assert manager.k_cache(1).shape == manager.v_cache(0).shape == (7, 4, 2, 8)
    assert manager.k_cache(0).dtype == torch.float16
    assert manager.stats().bytes_per_block == 2 * 2 * 4 * 2 * 8 * 2
    assert make_manager(dtype=torch.float8_e4m3fn).stats().bytes_per_block == 2 * 2 * 4 * 2 * 8
    with pytest.raises(InvalidInputError, match="dtype"):
        make_manager(dtype=torch.int16)
    grouped = make_manager(num_layers=5, groups=GROUPS, device=device)
    caches = [cache(layer) for layer in range(4) for cache in (grouped.k_cache, grouped.v_cache)]
    assert [tuple(cache.shape[2:]) for cache in caches] == [(2, 8), (2, 8), *[(1, 4), (1, 6)] * 2, (3, 2), (3, 2)]


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        *itertools.product(({}, _FIVE_LAYERS, {"head_dim": 3}), (torch.int8, torch.float32)),
        (_FIVE_LAYERS | {"groups": [*GROUPS[:-1], replace(GROUPS[-1], head_dim=68)]}, torch.bits4x2),
    ],
    ids=str,
)
def test_rows_and_scales_lie_apart(changes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Every byte belongs to one row or one scale at the most, and none to two blocks."""
    manager = make_manager(dtype=dtype, device=device, **changes)
    storages = manager._tensors.storages
    for table in manager.config.tables:
        num_bytes = 0
        for storage in storages:
            storage.view(torch.uint8).zero_()
        for layer in table.layers:
            scales = manager.scales(layer)
            assert all((scale is not None) == (dtype != torch.float32) for scale in scales)
            for cache in (manager.k_cache(layer), manager.v_cache(layer), *scales):
                if cache is not None:
                    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
                    cache[3].view(bits).fill_(-1)
                    num_bytes += cache[3].nbytes
        filled = [storage.view(torch.uint8).view(*storage.shape[:2], -1) == 255 for storage in storages]
        assert sum(int(one.sum()) for one in filled) == num_bytes == sum(int(one[:, 3].sum()) for one in filled)
    num_bytes = sum(storage[:, 3].nbytes for storage in storages)
    assert num_bytes == manager.stats().bytes_per_block == manager.config.block_bytes(dtype)


def stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache holds of rows, float64; in int8 the largest magnitude of each is 127 steps."""
    if kv_kind(dtype).has_scales and dtype != torch.int8:
        return kv_kind(dtype).decode(*kv_kind(dtype).encode(rows, None), torch.float64)
    if dtype != torch.int8:
        return (to_float8(rows, dtype) if dtype.itemsize == 1 else rows.to(dtype)).double()
    step = rows.double().abs().amax(-1, keepdim=True) / 127
    return torch.where(step == 0, 0.0, (rows / step).round() * step)


PACKED = torch.bits8, torch.bits4x2, torch.float4_e2m1fn_x2


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, *PACKED], ids=str
)
def test_rows_and_their_scales_stay_together(dtype: torch.dtype, device: torch.device) -> None:
    """Shared, copied, swapped out and back, found as a prefix, rolled back, cleared; saturated; NaN is told."""
    manager = make_manager(dtype=dtype, device=device, num_swap_blocks=6, num_blocks=9)
    parent = manager.allocate("a", token_ids=list(range(7)))
    key, value = (torch.randn(7, 2, 8) * 10.0 ** torch.randint(-3, 4, (7, 2, 1)) for _ in range(2))
    key[0, 0, 3], value[2, 1, 0], value[4], key[1, 0, 1] = torch.nan, -torch.inf, 0.0, 1e6
    for layer in range(2):
        manager.write_kv(parent, layer, 0, key, value)
    manager.advance(parent, 7)
    manager.commit(parent, list(range(7)))
    expected = stored(key, dtype), stored(value, dtype)
    has_scales = kv_kind(dtype).has_scales
    limit = 1e-6 if has_scales else 0

    def check(handle: KvCacheHandle, count: int) -> None:
        for layer in range(2):
            for got, want in zip(manager.read_kv(handle, layer, 0, count), expected, strict=True):
                assert got.dtype == (torch.float32 if has_scales else dtype)
                assert_within(got, want[:count], limit * (1 + want[:count].abs()))

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
        assert not got.float().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_latents_are_stored_once_and_stay_what_they_are(dtype: torch.dtype, device: torch.device) -> None:
    """Beside keys and values of other layers: shared, copied, swapped out and back, found as a prefix, rolled back."""
    groups = [CacheGroup((0, 2), 1, 24, 16, latent=True), CacheGroup((1,), 1, 8)]
    manager = make_manager(num_layers=3, dtype=dtype, device=device, num_swap_blocks=8, num_blocks=12, groups=groups)
    k_cache, v_cache = manager.k_cache(2), manager.v_cache(2)
    assert k_cache.shape[2:] == (1, 24)
    assert v_cache.shape[2:] == (1, 16)
    assert v_cache.data_ptr() == k_cache.data_ptr()
    one = make_manager(num_layers=61, dtype=dtype, groups=[CacheGroup(tuple(range(61)), 1, 576, 512, latent=True)])
    assert one.stats().bytes_per_block == 61 * 576 * 4 * dtype.itemsize
    latents = {layer: torch.randn(7, 1, 24) for layer in (0, 2)}

    def write(handle: KvCacheHandle, layer: int, position: int, rows: torch.Tensor) -> None:
        manager.write_kv(handle, layer, position, rows, rows[..., :16])

    def check(handle: KvCacheHandle, count: int) -> None:
        for layer, rows in latents.items():
            key, value = manager.read_kv(handle, layer, 0, count)
            assert torch.equal(key.cpu().double(), stored(rows, dtype)[:count])
            assert torch.equal(value.cpu().double(), stored(rows[..., :16], dtype)[:count])

    parent = manager.allocate("a", token_ids=list(range(7)))
    for layer, rows in latents.items():
        write(parent, layer, 0, rows)
    manager.advance(parent, 7)
    manager.commit(parent, list(range(7)))
    child = manager.fork(parent, "b")
    write(child, 0, 6, torch.ones(1, 1, 24))
    check(parent, 7)
    check(child, 6)
    manager.swap_out(parent)
    manager.swap_in(parent)
    check(parent, 7)
    manager.truncate(parent, 5)
    check(parent, 5)
    found = manager.allocate("c", token_ids=list(range(7)))
    assert found.num_cached_tokens == 4
    check(found, 4)
    with pytest.raises(InvalidInputError, match="value: not the first 16 elements of the key"):
        manager.write_kv(parent, 0, 0, torch.ones(1, 1, 24), torch.zeros(1, 1, 16))
    with pytest.raises(InvalidInputError, match="expected a floating point dtype for latents"):
        make_manager(num_layers=3, dtype=torch.int8, groups=groups)
    with pytest.raises(InvalidInputError, match="v_head_dim: 30, expected at most head_dim 24"):
        make_manager(num_layers=1, groups=[CacheGroup((0,), 1, 24, 30, latent=True)])
    manager.check_integrity()


def test_caches_and_models_have_one_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU if there is one: an oracle made without a device checks the kernels that models run there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for is_there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=is_there: found)
        assert default_device().type == LoadOptions().device.type == kind
    monkeypatch.setattr(tensors, "default_device", lambda: torch.device("meta"))
    with pytest.raises(InvalidInputError, match="device: meta, expected one with memory"):
        make_manager()
    assert make_manager(device="cpu").device.type == "cpu"
