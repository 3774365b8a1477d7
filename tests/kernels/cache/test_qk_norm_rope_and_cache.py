"""qk_norm_rope_and_cache against the composition of the three operations it fuses, in float64."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, qk_norm_rope_and_cache
from paged.kernels.cache import reference as cache_reference
from paged.kernels.layers import reference as layers_reference
from tests.tolerance import assert_close, dtypes

NUM_BLOCKS, BLOCK_SIZE = 3, 8


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "rotary_dim", "interleaved"),
    [
        (4, 2, 64, 64, 64, False),
        (5, 1, 80, 80, 80, False),
        (24, 3, 96, 96, 24, False),
        (17, 8, 128, 128, 128, True),
        (2, 2, 256, 256, 64, True),
        (5, 1, 512, 512, 512, False),
        (3, 3, 192, 128, 64, True),
        (2, 1, 24, 80, 24, False),
    ],
)
def test_matches_the_composition(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    dtype: torch.dtype,
    with_norm: bool,
    device: torch.device,
) -> None:
    positions = torch.tensor([0, 40, 7, 3], device=device)
    slots = torch.tensor([17, -1, 0, 15], device=device)
    angles = torch.rand(64, rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
    weights = [torch.randn(head_dim, device=device).to(dtype) if with_norm else None for _ in range(2)]
    widths = [num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_head_dim]
    qkv = torch.randn(4, sum(widths), device=device).to(dtype)
    q, k, v = (
        x.unflatten(1, (-1, size))
        for x, size in zip(qkv.split(widths, 1), (head_dim, head_dim, v_head_dim), strict=True)
    )
    pool = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, num_kv_heads, max(head_dim, v_head_dim)), torch.nan, device=device)
    k_cache, v_cache = pool.to(dtype).unbind(1)
    k_cache, v_cache = k_cache[..., :head_dim], v_cache[..., :v_head_dim]

    rotated = []
    for x, weight in zip((q, k), weights, strict=True):
        normed = x if weight is None else layers_reference.rms_norm(x, weight, 1e-5)
        rotated.append(layers_reference.rotate(normed, positions, cos_sin, interleaved))
    expected = cache_reference.reshape_and_cache(rotated[1], v.cpu(), k_cache.cpu().double(), v_cache.cpu(), slots)
    before = qkv.clone()

    returned = qk_norm_rope_and_cache(
        q,
        k,
        v,
        k_cache,
        v_cache,
        slots,
        positions,
        cos_sin,
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-5,
        interleaved=interleaved,
    )
    assert returned is q
    assert_close(q, rotated[0])
    assert_close(k_cache, expected[0])
    torch.testing.assert_close(v_cache.cpu(), expected[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(qkv[:, widths[0] :], before[:, widths[0] :])


def _arguments(device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(2, 4, 32, device=device),
        "k": torch.randn(2, 2, 32, device=device),
        "v": torch.randn(2, 2, 32, device=device),
        "k_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 32, device=device),
        "v_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 32, device=device),
        "slot_mapping": torch.tensor([3, 4], device=device),
        "positions": torch.tensor([0, 1], device=device),
        "cos_sin_cache": torch.ones(4, 32, device=device),
    }


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "rotary_dim", "interleaved", "k_shape", "v_shape"),
    [
        (3, 80, 80, False, (), (3,)),
        (3, 96, 24, False, (3,), None),
        (1, 128, 128, True, None, (1,)),
        (8, 64, 32, True, (8,), (8,)),
    ],
)
def test_scaled_and_8_bit_caches(
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    k_shape: tuple[int, ...] | None,
    v_shape: tuple[int, ...] | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> None:
    slots, positions = torch.tensor([17, -1, 0, 15], device=device), torch.tensor([0, 40, 7, 3], device=device)
    angles = torch.rand(64, rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
    weight = torch.rand(head_dim, device=device).to(dtype)
    q, k, v = (torch.randn(4, heads, head_dim, device=device).to(dtype) for heads in (5, num_kv_heads, num_kv_heads))
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, float("nan"), device=device).to(cache_dtype).unbind()
    scales = {
        name: None if shape is None else torch.rand(shape, device=device) + 0.1
        for name, shape in (("k_scale", k_shape), ("v_scale", v_shape))
    }
    rotated_q, rotated_k = (
        layers_reference.rotate(layers_reference.rms_norm(x, weight, 1e-5), positions, cos_sin, interleaved)
        for x in (q, k)
    )
    wide = [cache.cpu().double() for cache in (k_cache, v_cache)]
    expected = cache_reference.reshape_and_cache(rotated_k, v.cpu(), *wide, slots, **scales)
    norms = {"q_weight": weight, "k_weight": weight, "eps": 1e-5, "interleaved": interleaved}
    qk_norm_rope_and_cache(q, k, v, k_cache, v_cache, slots, positions, cos_sin, **norms, **scales)
    assert_close(q, rotated_q)
    assert_close(k_cache, expected[0])
    assert_close(v_cache, expected[1])


@pytest.mark.usefixtures("backend")
def test_converts_to_the_dtype_of_the_cache_and_takes_no_tokens(device: torch.device) -> None:
    arguments = _arguments(device)
    arguments |= {name: arguments[name].half() for name in ("k_cache", "v_cache")}
    expected = layers_reference.rotate(arguments["k"], arguments["positions"], arguments["cos_sin_cache"], False)
    qk_norm_rope_and_cache(**arguments)
    assert_close(arguments["k_cache"][0, 3:5], expected)
    assert torch.equal(arguments["v_cache"][0, 3:5], arguments["v"].half())
    after = arguments["k_cache"].clone()
    per_token = ("q", "k", "v", "slot_mapping", "positions")
    qk_norm_rope_and_cache(**arguments | {name: arguments[name][:0] for name in per_token})
    assert torch.equal(arguments["k_cache"], after)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q_weight": torch.ones(32)}, "q_weight, k_weight: one of them is None"),
        ({"q_weight": torch.ones(32), "k_weight": torch.ones(16)}, r"k_weight: shape \[16\], expected \[32\]"),
        ({"q": torch.randn(2, 4, 16)}, r"q: shape \[2, 4, 16\]"),
        ({"v": torch.randn(2, 1, 32)}, "v: shape"),
        ({"slot_mapping": torch.tensor([3])}, "slot_mapping: shape"),
        ({"cos_sin_cache": torch.ones(4, 34)}, "rotary_dim 34"),
        ({"k_scale": torch.ones(4)}, r"k_scale: shape \[4\], expected \[\], \[1\] or \[2\]"),
    ],
)
def test_rejects_what_does_not_fit(wrong: dict[str, torch.Tensor], message: str, device: torch.device) -> None:
    arguments = _arguments(device)
    qk_norm_rope_and_cache(**arguments)
    with pytest.raises(InvalidInputError, match=message):
        qk_norm_rope_and_cache(**arguments | {name: tensor.to(device) for name, tensor in wrong.items()})
