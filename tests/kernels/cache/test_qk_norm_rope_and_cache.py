"""qk_norm_rope_and_cache against the composition of the three operations it fuses, in float64."""

import math
from typing import Any

import pytest
import torch

from paged import qk_norm_rope_and_cache
from paged.kernels.cache import definition
from paged.kernels.layers import definition as layers
from tests.kernels.refusals import assert_refuses
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close, assert_within

NUM_BLOCKS, BLOCK_SIZE = 3, 8
# num_q_heads, num_kv_heads, head_dim, v_head_dim, rotary_dim, interleaved
Sizes = tuple[int, int, int, int, int, bool]
SIZES: list[Sizes] = [
    (4, 2, 64, 64, 64, False), (5, 1, 80, 80, 80, False), (12, 3, 96, 96, 24, False), (9, 4, 128, 128, 128, True),
    (5, 1, 512, 512, 512, False), (3, 3, 192, 128, 64, True), (2, 1, 24, 80, 24, False),
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("backend")


def make_inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments but for caches and weights, of 4 tokens; q, k and v are slices of one projection."""
    num_q_heads, num_kv_heads, head_dim, v_head_dim, rotary_dim, interleaved = sizes
    angles = torch.rand(64, rotary_dim // 2) * 6
    widths = [num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_head_dim]
    q, k, v = torch.randn(4, sum(widths), device=device).to(dtype).split(widths, 1)
    return {
        "q": q.unflatten(1, (-1, head_dim)),
        "k": k.unflatten(1, (-1, head_dim)),
        "v": v.unflatten(1, (-1, v_head_dim)),
        "slot_mapping": torch.tensor([17, -1, 0, 15], device=device),
        "positions": torch.tensor([0, 40, 7, 3], device=device),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1).to(device),
        "eps": 1e-5,
        "interleaved": interleaved,
    }


def rotated(x: torch.Tensor, weight: torch.Tensor | None, inputs: dict[str, Any]) -> torch.Tensor:
    """Queries or keys as they are to become, in float64."""
    normed = x if weight is None else layers.rms_norm(x, weight, inputs["eps"])
    heads = layers.rotate(normed, inputs["positions"], inputs["cos_sin_cache"], interleaved=inputs["interleaved"])
    signs = inputs.get("hadamard_signs")
    if signs is None:
        return heads
    return transformed(heads, signs)


def transformed(heads: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Heads after the randomised Hadamard transform, whose matrix is (-1)^(number of common bits of row and column)."""
    size = heads.shape[-1] & -heads.shape[-1]
    rows = [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    matrix = torch.tensor(rows, dtype=torch.float64, device=heads.device) / math.sqrt(size)
    return ((heads * signs.double()).unflatten(-1, (-1, size)) @ matrix).flatten(-2)


def draw_signs(head_dim: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 2, (head_dim,), device=device) * 2.0 - 1


@pairwise(
    sizes=SIZES,
    dtype=DTYPES,
    with_norm=[False, True],
    cache_dtype=[None, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16],
    scaled=[("", ""), ("tensor", "heads"), ("heads", ""), ("", "one")],
    with_hadamard=[False, True],
)
def test_matches_the_composition(
    sizes: Sizes, dtype: torch.dtype, with_norm: bool, cache_dtype: torch.dtype | None, scaled: tuple[str, str],
    with_hadamard: bool, device: torch.device,
) -> None:  # fmt: skip
    """Over caches whose K and V lie side by side, of the same type or another one, with scales of K, V or both."""
    _, num_kv_heads, head_dim, v_head_dim, *_ = sizes
    inputs = make_inputs(sizes, dtype, device)
    if with_hadamard and head_dim % 16 == 0:
        inputs["hadamard_signs"] = draw_signs(head_dim, device)
    q, k, v = (inputs[name].clone() for name in "qkv")
    weights = [torch.randn(head_dim, device=device).to(dtype) if with_norm else None for _ in range(2)]
    pool = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, num_kv_heads, max(head_dim, v_head_dim)), torch.nan, device=device)
    k_cache, v_cache = pool.to(cache_dtype or dtype).unbind(1)
    k_cache, v_cache = k_cache[..., :head_dim], v_cache[..., :v_head_dim]
    shapes = {"tensor": (), "one": (1,), "heads": (num_kv_heads,)}
    k_scale, v_scale = (torch.rand(shapes[kind], device=device) + 0.1 if kind else None for kind in scaled)
    scales = {"k_scale": k_scale, "v_scale": v_scale}

    rotated_k = rotated(k, weights[1], inputs)
    expected = definition.reshape_and_cache(rotated_k, v, k_cache, v_cache, inputs["slot_mapping"], **scales)
    norms = {"q_weight": weights[0], "k_weight": weights[1]}
    returned = qk_norm_rope_and_cache(**inputs, k_cache=k_cache, v_cache=v_cache, **norms, **scales)
    assert returned is inputs["q"]
    assert_close(returned, rotated(q, weights[0], inputs))
    assert_close(k_cache, expected[0])
    assert_close(v_cache, expected[1])
    if cache_dtype is None and v_scale is None:
        assert_within(v_cache, expected[1], 0.0, is_exact=True)
    assert torch.equal(inputs["k"], k)
    assert torch.equal(inputs["v"], v)


def test_no_tokens_and_what_does_not_fit(device: torch.device) -> None:
    given = make_inputs((4, 2, 32, 32, 32, False), torch.float32, device)
    k_cache, v_cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, 32, device=device)
    weight = torch.ones(32, device=device)
    sound = {**given, "k_cache": k_cache, "v_cache": v_cache, "q_weight": weight, "k_weight": weight}
    per_token = {name: given[name][:0] for name in ("q", "k", "v", "slot_mapping", "positions")}
    qk_norm_rope_and_cache(**{**sound, **per_token})
    assert not k_cache.any()
    assert not v_cache.any()
    assert_refuses(
        qk_norm_rope_and_cache,
        sound,
        ("k_weight", None, "q_weight, k_weight: one of them is None"),
        ("v", given["v"][:, :1], "v: shape"),
        ("slot_mapping", given["slot_mapping"][:1], "slot_mapping: shape"),
        ("cos_sin_cache", torch.ones(64, 34, device=device), "rotary_dim 34"),
        ("hadamard_signs", torch.ones(31, device=device), r"hadamard_signs: shape \[31\], expected \[32\]"),
        ("k_scale", torch.ones(4, device=device), r"k_scale: shape \[4\], expected \[\], \[1\] or \[2\]"),
    )
    narrow = make_inputs((4, 2, 24, 24, 24, False), torch.float32, device)
    caches = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, 24, device=device)
    sound = {**narrow, "k_cache": caches[0], "v_cache": caches[1]}
    signs = draw_signs(24, device)
    assert_refuses(qk_norm_rope_and_cache, sound, ("hadamard_signs", signs, "heads of 24, expected a multiple of 16"))
