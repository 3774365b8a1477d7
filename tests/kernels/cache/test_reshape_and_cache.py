"""reshape_and_cache against its definition, on both backends, over caches of every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paged import InvalidInputError, reshape_and_cache
from paged.kernels.cache import reference
from tests.tolerance import assert_close, dtypes

NUM_BLOCKS, BLOCK_SIZE = 9, 8

# layout -> k_cache and v_cache [num_blocks, block_size, num_kv_heads, head_dim]
LAYOUTS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "separate": lambda full, blocks, slots, heads, dim: (
        full(blocks, slots, heads, dim),
        full(blocks, slots, heads, dim),
    ),
    "interleaved": lambda full, blocks, slots, heads, dim: full(blocks, 2, slots, heads, dim).unbind(1),
    "head-major blocks": lambda full, blocks, slots, heads, dim: (
        full(2, blocks, heads, slots, dim).transpose(2, 3).unbind(0)
    ),
    "heads outermost": lambda full, blocks, slots, heads, dim: (
        full(2, heads, blocks, slots, dim).permute(0, 2, 3, 1, 4).unbind(0)
    ),
}


def _slots(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Distinct slots in random order, every third one negative."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slots[1::3] = -1
    return slots.to(device)


def _assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        *(((7, 3, 80), layout) for layout in LAYOUTS),
        ((1, 1, 32), "separate"),
        ((33, 8, 128), "interleaved"),
        ((5, 2, 256), "separate"),
        ((5, 2, 512), "head-major blocks"),
        ((0, 2, 64), "separate"),
    ],
)
def test_writes_the_slots_and_nothing_else(
    shape: tuple[int, int, int], dtype: torch.dtype, layout: str, device: torch.device
) -> None:
    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, float("nan"), dtype=dtype, device=device)

    k_cache, v_cache = LAYOUTS[layout](full, NUM_BLOCKS, BLOCK_SIZE, *shape[1:])
    key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    slots = _slots(shape[0], device)
    expected = reference.reshape_and_cache(key, value, k_cache, v_cache, slots)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    _assert_same(k_cache, expected[0])
    _assert_same(v_cache, expected[1])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("sizes", [(192, 128), (72, 512)])
def test_values_of_another_size(sizes: tuple[int, int], device: torch.device) -> None:
    key, value = (torch.randn(7, 3, size, device=device) for size in sizes)
    k_cache, v_cache = (torch.full((NUM_BLOCKS, BLOCK_SIZE, 3, size), torch.nan, device=device) for size in sizes)
    slots = _slots(7, device)
    expected = reference.reshape_and_cache(key, value, k_cache, v_cache, slots)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    _assert_same(k_cache, expected[0])
    _assert_same(v_cache, expected[1])


@pytest.mark.usefixtures("backend")
def test_reads_slices_of_a_fused_projection_and_converts(device: torch.device) -> None:
    qkv = torch.randn(6, 8, 96, device=device)
    slots = torch.stack([_slots(6, device)] * 2, 1)[:, 0]
    k_cache, v_cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, 96, dtype=torch.float16, device=device).unbind()
    expected = reference.reshape_and_cache(qkv[:, 4:6], qkv[:, 6:], k_cache, v_cache, slots)
    reshape_and_cache(qkv[:, 4:6], qkv[:, 6:], k_cache, v_cache, slots)
    assert k_cache.any()
    _assert_same(k_cache, expected[0])
    _assert_same(v_cache, expected[1])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_8_bit_floats_round_and_saturate(
    dtype: torch.dtype, cache_dtype: torch.dtype, layout: str, device: torch.device
) -> None:
    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, float("nan"), device=device).to(cache_dtype)

    k_cache, v_cache = LAYOUTS[layout](full, NUM_BLOCKS, BLOCK_SIZE, 3, 80)
    key, value = (torch.randn(7, 3, 80, device=device).to(dtype) * factor for factor in (200, 0.01))
    key[0, 1, :6] = torch.tensor([448, 470, 6e4, -500, torch.inf, -torch.inf])
    key[0, 2, 3] = torch.nan
    slots = _slots(7, device)
    expected = reference.reshape_and_cache(key, value, k_cache, v_cache, slots)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert k_cache.float().nan_to_num().abs().max() == torch.finfo(cache_dtype).max
    _assert_same(k_cache.float(), expected[0].float())
    _assert_same(v_cache.float(), expected[1].float())


def _scales(shape: tuple[int, ...] | None, device: torch.device) -> torch.Tensor | None:
    return None if shape is None else torch.rand(shape, device=device) + 0.1


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, *dtypes()])
@pytest.mark.parametrize(
    ("k_shape", "v_shape", "num_heads"),
    [((), (3,), 3), ((3,), (1,), 3), (None, (3,), 3), ((1,), None, 3), ((1,), (1,), 1)],
)
def test_divides_by_the_scale_of_the_head(
    k_shape: tuple[int, ...] | None,
    v_shape: tuple[int, ...] | None,
    num_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    key, value = torch.randn(2, 7, num_heads, 80, device=device).unbind()
    k_cache, v_cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, num_heads, 80, device=device).to(dtype).unbind()
    slots, scales = _slots(7, device), {"k_scale": _scales(k_shape, device), "v_scale": _scales(v_shape, device)}
    wide = [cache.cpu().double() for cache in (k_cache, v_cache)]
    expected = reference.reshape_and_cache(key, value, *wide, slots, **scales)
    reshape_and_cache(key, value, k_cache, v_cache, slots, **scales)
    for name, cache, want, rows in zip(scales, (k_cache, v_cache), expected, (key, value), strict=True):
        assert_close(cache, want)
        unscaled = reference.reshape_and_cache(rows, rows, *wide, slots)[0]
        assert torch.equal(want, unscaled) == (scales[name] is None)


@pytest.mark.usefixtures("backend")
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    # 2^31 elements lie between block 0 and block 2; the pages between them are never touched, so they cost no memory.
    pool = torch.empty(2**31 + 4096, dtype=torch.float16, device=device)
    k_cache, v_cache = (pool.as_strided((3, 8, 1, 32), (2**30, 32, 32, 1), start) for start in (0, 2048))
    key, value = torch.randn(2, 1, 1, 32, device=device).half().unbind()
    reshape_and_cache(key, value, k_cache, v_cache, torch.tensor([2 * 8 + 5], device=device))
    assert torch.equal(k_cache[2, 5], key[0])
    assert torch.equal(v_cache[2, 5], value[0])


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    key = torch.randn(3, 2, 32, device=device)
    cache = torch.zeros(4, 8, 2, 32, device=device)
    slots = torch.tensor([0, 5, -1], device=device)
    reshape_and_cache(key, key, cache, cache.clone(), slots)
    with pytest.raises(InvalidInputError, match=r"slot_mapping: shape \[2\], expected \[3\]"):
        reshape_and_cache(key, key, cache, cache, slots[:2])
    with pytest.raises(InvalidInputError, match=r"slot_mapping: dtype torch.int32"):
        reshape_and_cache(key, key, cache, cache, slots.int())
    with pytest.raises(InvalidInputError, match="value: shape"):
        reshape_and_cache(key, key[:2], cache, cache, slots)
    with pytest.raises(InvalidInputError, match=r"k_cache: shape \[4, 8, 1, 32\]"):
        reshape_and_cache(key, key, cache[:, :, :1], cache, slots)
    with pytest.raises(InvalidInputError, match="v_cache: last dimension has stride 2"):
        reshape_and_cache(key, key, cache, torch.zeros(4, 8, 2, 64, device=device)[..., ::2], slots)
    with pytest.raises(InvalidInputError, match=r"k_cache: dtype torch\.uint8"):
        reshape_and_cache(key, key, cache.byte(), cache.byte(), slots)
    with pytest.raises(InvalidInputError, match=r"v_scale: shape \[3\], expected \[\], \[1\] or \[2\]"):
        reshape_and_cache(key, key, cache, cache, slots, v_scale=torch.ones(3, device=device))
