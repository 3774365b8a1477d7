"""reshape_and_cache against its definition, on all backends, over caches of every layout."""

from math import inf, nan

import pytest
import torch

from paged import reshape_and_cache
from paged.kernels.cache import definition
from tests.kernels.cache.rounding import rounded
from tests.kernels.refusals import assert_refuses
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close, assert_within

NUM_BLOCKS, BLOCK_SIZE = 9, 8
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
# What lies outermost: axes of [num_blocks, block_size, num_kv_heads]. "interleaved": K beside V in a block.
LAYOUTS = {"separate": (0, 1, 2), "interleaved": (), "head-major blocks": (0, 2, 1), "heads outermost": (2, 0, 1)}

pytestmark = pytest.mark.usefixtures("backend")


def _caches(
    layout: str, num_heads: int, k_size: int, v_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """k_cache and v_cache full of NaN."""
    if layout == "interleaved":
        sizes = NUM_BLOCKS, 2, BLOCK_SIZE, num_heads, max(k_size, v_size)
        k_cache, v_cache = torch.full(sizes, nan, device=device).to(dtype).unbind(1)
        return k_cache[..., :k_size], v_cache[..., :v_size]
    order, sizes = LAYOUTS[layout], (NUM_BLOCKS, BLOCK_SIZE, num_heads)
    outer, back = [sizes[axis] for axis in order], [order.index(axis) for axis in range(3)]
    k_cache, v_cache = (torch.full((*outer, size), nan, device=device).to(dtype) for size in (k_size, v_size))
    return k_cache.permute(*back, 3), v_cache.permute(*back, 3)


def _slots(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Distinct slots in random order, every third one negative."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slots[1::3] = -1
    return slots.to(device)


def _check(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Bit for bit, what is not written too."""
    slots = torch.stack([_slots(len(key), key.device)] * 2, 1)[:, 0]
    expected = definition.reshape_and_cache(key, value, k_cache, v_cache, slots)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    for cache, want in zip((k_cache, v_cache), expected, strict=True):
        assert_within(cache, rounded(want, cache.dtype), 0.0, is_exact=True)


SHAPES = [(7, 3, 80, 80), (1, 1, 32, 32), (33, 8, 128, 128), (5, 2, 256, 256), (5, 2, 512, 512), (0, 2, 64, 64)]
SHAPES += [(7, 3, 192, 128), (7, 3, 72, 512)]


@pairwise(shape=SHAPES, layout=list(LAYOUTS), dtype=DTYPES, cache_dtype=[None, *FLOAT8])
def test_writes_the_slots_and_nothing_else(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, cache_dtype: torch.dtype | None, device: torch.device
) -> None:
    """8-bit floats round and saturate."""
    num_tokens, num_heads, *sizes = shape
    key, value = (torch.randn(num_tokens, num_heads, size, device=device).to(dtype) for size in sizes)
    k_cache, v_cache = _caches(layout, num_heads, *sizes, cache_dtype or dtype, device)
    if cache_dtype is not None:
        key, value = key * 200, value * 0.01
        key[:1, 0, :7] = torch.tensor([448, 470, 6e4, -500, inf, -inf, nan])
    _check(key, value, k_cache, v_cache)
    if cache_dtype is not None and num_tokens > 0:
        assert k_cache.float().nan_to_num().abs().max() == torch.finfo(cache_dtype).max


def test_reads_slices_of_a_fused_projection_and_converts(device: torch.device) -> None:
    _, key, value = torch.randn(6, 8, 96, device=device).split([4, 2, 2], 1)
    k_cache, v_cache = _caches("separate", 2, 96, 96, torch.float16, device)
    _check(key, value, k_cache, v_cache)


@pytest.mark.parametrize("dtype", [FLOAT8[0], torch.float32])
@pytest.mark.parametrize(
    ("k_shape", "v_shape", "num_heads"),
    [((), (3,), 3), ((3,), (1,), 3), (None, (3,), 3), ((1,), None, 3), ((1,), (1,), 1)],
)
def test_divides_by_the_scale_of_the_head(
    k_shape: tuple[int, ...] | None, v_shape: tuple[int, ...] | None, num_heads: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    key, value = torch.randn(2, 7, num_heads, 80, device=device).unbind()
    caches, slots = _caches("separate", num_heads, 80, 80, dtype, device), _slots(7, device)
    scales = {
        name: None if shape is None else torch.rand(shape, device=device) + 0.1
        for name, shape in (("k_scale", k_shape), ("v_scale", v_shape))
    }
    expected = definition.reshape_and_cache(key, value, *caches, slots, **scales)
    unscaled = definition.reshape_and_cache(key, value, *caches, slots)
    reshape_and_cache(key, value, *caches, slots, **scales)
    for scale, cache, want, plain in zip(scales.values(), caches, expected, unscaled, strict=True):
        assert_close(cache, want)
        assert torch.equal(want.nan_to_num(), plain.nan_to_num()) == (scale is None)


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    # 2^31 elements lie between block 0 and block 2; the pages between them are never touched, so they cost no memory.
    pool = torch.empty(2**31 + 4096, dtype=torch.float16, device=device)
    k_cache, v_cache = (pool.as_strided((3, 8, 1, 32), (2**30, 32, 32, 1), start) for start in (0, 2048))
    key, value = torch.randn(2, 1, 1, 32, device=device).half().unbind()
    reshape_and_cache(key, value, k_cache, v_cache, torch.tensor([2 * 8 + 5], device=device))
    assert torch.equal(k_cache[2, 5], key[0])
    assert torch.equal(v_cache[2, 5], value[0])


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    key, slots = torch.randn(3, 2, 32, device=device), torch.tensor([0, 5, -1], device=device)
    cache = torch.zeros(4, 8, 2, 32, device=device)
    sound = {"key": key, "value": key, "k_cache": cache, "v_cache": cache.clone(), "slot_mapping": slots}
    assert_refuses(
        reshape_and_cache,
        sound,
        ("slot_mapping", slots[:2], r"slot_mapping: shape \[2\], expected \[3\]"),
        ("slot_mapping", slots.int(), "slot_mapping: dtype torch.int32"),
        ("value", key[:2], "value: shape"),
        ("k_cache", cache[:, :, :1], r"k_cache: shape \[4, 8, 1, 32\]"),
        ("v_cache", torch.zeros(4, 8, 2, 64, device=device)[..., ::2], "v_cache: last dimension has stride 2"),
        ("k_cache", cache.byte(), r"k_cache: dtype torch\.uint8"),
        ("v_scale", torch.ones(3, device=device), r"v_scale: shape \[3\], expected \[\], \[1\] or \[2\]"),
    )
