"""Caches of int8: every row with its own scale, wherever the two lie, and the faults that the checks must see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paged.kernels.cache.reshape_and_cache
import paged.kernels.cache.write
import paged.kernels.common.cache_kinds
from paged import InvalidInputError, qk_norm_rope_and_cache
from paged.kernels.layers import reference as layers_reference
from tests.kernels.cache.int8_rows import assert_holds_rows
from tests.kernels.faulty import planted
from tests.tolerance import dtypes

cache_kernels = paged.kernels.cache
MODULES = (paged.kernels.common.cache_kinds, cache_kernels.write, cache_kernels.reshape_and_cache)
NUM_BLOCKS, BLOCK_SIZE = 5, 8
UNTOUCHED, UNTOUCHED_SCALE = 77, 7.0

# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "values are cut off": ("((x + _ROUNDER) - _ROUNDER).to(tl.int8)", "x.to(tl.int8)"),
    "the largest is no step": ("127.0 / tl.maximum", "126.0 / tl.maximum"),
    "the scale of a neighbour": (
        "slot_offset(slots, stride_block, stride_slot, KV",
        "slot_offset(slots ^ 1, stride_block, stride_slot, KV",
    ),
    "V's scales for K": (
        "k_scale_ptr, slots, heads, stride_k_scale_block",
        "v_scale_ptr, slots, heads, stride_k_scale_block",
    ),
    "NaN is forgotten": ("largest / 127.0 + not_finite", "largest / 127.0"),
}


def _caches(layout: str, head_dim: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """k_cache, v_cache and their scales [..., 3 heads]."""
    shape = NUM_BLOCKS, BLOCK_SIZE, 3, head_dim
    if layout == "one storage":  # the scales of a block behind its rows
        tail = BLOCK_SIZE * 3 * 4
        pool = torch.full((2, NUM_BLOCKS, BLOCK_SIZE * 3 * head_dim + tail), UNTOUCHED, dtype=torch.int8, device=device)
        rows = (part[:, :-tail].view(shape) for part in pool)
        scales = (part[:, -tail:].view(torch.float32).view(shape[:3]).fill_(UNTOUCHED_SCALE) for part in pool)
        return *rows, *scales
    cache = torch.full((2, NUM_BLOCKS, 3, BLOCK_SIZE, head_dim), UNTOUCHED, dtype=torch.int8, device=device)
    scale = torch.full((3, BLOCK_SIZE, 2, NUM_BLOCKS), UNTOUCHED_SCALE, device=device)
    return *cache.transpose(2, 3).unbind(), *scale.permute(2, 3, 1, 0).unbind()


def _rows(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[7 tokens, 3 heads, head_dim] of all sizes, with zeros and what is not finite."""
    rows = torch.randn(7, 3, head_dim) * 10.0 ** torch.randint(-3, 4, (7, 3, 1))
    rows[0], rows[2, 1, 3], rows[3, 0, 0], rows[3, 1, 2] = 0.0, torch.nan, torch.inf, -torch.inf
    return rows.to(dtype)


def _check(layout: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    key, value = _rows(head_dim, dtype), _rows(head_dim, dtype)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:7]
    slots[1] = -1
    caches = _caches(layout, head_dim, device)
    k_cache, v_cache, k_scale, v_scale = caches
    cache_kernels.reshape_and_cache.reshape_and_cache(
        key.to(device), value.to(device), k_cache, v_cache, slots.to(device), k_scale=k_scale, v_scale=v_scale
    )
    written = slots[slots >= 0]
    for rows, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        place = written // BLOCK_SIZE, written % BLOCK_SIZE
        assert_holds_rows(cache.cpu()[place], scale.cpu()[place], rows[slots >= 0].double())
        rest = torch.ones(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
        rest[place] = False
        assert (cache.cpu()[rest] == UNTOUCHED).all()
        assert (scale.cpu()[rest] == UNTOUCHED_SCALE).all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(("layout", "head_dim"), [("one storage", 80), ("apart", 128), ("apart", 7)])
def test_rows_and_scales(layout: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(layout, head_dim, dtype, device)


@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    failed = False
    with planted(MODULES, [], tmp_path, *MUTATIONS[fault]):
        try:
            _check("apart", 80, torch.float32, device)
        except AssertionError:
            failed = True
    assert failed == (fault != "no fault")


@pytest.mark.usefixtures("backend")
def test_ties_go_to_even(device: torch.device) -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], device=device).expand(1, 3, 8)
    k_cache, v_cache, k_scale, v_scale = _caches("apart", 8, device)
    slots = torch.tensor([9], device=device)
    cache_kernels.reshape_and_cache.reshape_and_cache(
        row, row, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale
    )
    assert k_cache[1, 1, 0].tolist() == v_cache[1, 1, 2].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "rotary_dim", "interleaved"),
    [(80, 80, 80, False), (96, 40, 24, True), (512, 512, 128, False)],
)
def test_rotated_keys(
    head_dim: int, v_head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """The scale is that of the whole row, whichever part of it holds the largest value."""
    slots, positions = torch.tensor([17, -1, 0, 15], device=device), torch.tensor([0, 40, 7, 3], device=device)
    angles = torch.rand(64, rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
    weight = torch.rand(head_dim, device=device).to(dtype)
    q, k, v = (
        torch.randn(4, heads, size, device=device) for heads, size in ((5, head_dim), (3, head_dim), (3, v_head_dim))
    )
    for head, column in enumerate((0, rotary_dim // 2 + 1, head_dim - 1)):
        k[:, head, column] = 30.0
    v[2, 1, 3] = torch.nan
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k_cache, _, k_scale, _ = _caches("one storage", head_dim, device)
    _, v_cache, _, v_scale = _caches("one storage", v_head_dim, device)
    rotated = layers_reference.rotate(layers_reference.rms_norm(k, weight, 1e-5), positions, cos_sin, interleaved)
    norms = {"q_weight": weight, "k_weight": weight, "eps": 1e-5, "interleaved": interleaved}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    qk_norm_rope_and_cache(q, k, v, k_cache, v_cache, slots, positions, cos_sin, **norms, **scales)
    kept = slots[slots >= 0].cpu()
    place = kept // BLOCK_SIZE, kept % BLOCK_SIZE
    assert_holds_rows(k_cache.cpu()[place], k_scale.cpu()[place], rotated[slots.cpu() >= 0], slack=1e-5)
    assert_holds_rows(v_cache.cpu()[place], v_scale.cpu()[place], v.cpu().double()[slots.cpu() >= 0])
    assert (k_cache != UNTOUCHED).any(-1).any(-1).sum() == 3


def test_rejects_other_scales(device: torch.device) -> None:
    rows, slots = torch.randn(1, 3, 16, device=device), torch.tensor([3], device=device)
    k_cache, v_cache, k_scale, v_scale = _caches("apart", 16, device)
    for wrong, message in (
        (None, r"v_scale: None, expected \[5, 8, 3\], a scale for each row of int8"),
        (torch.ones(3, device=device), r"v_scale: shape \[3\], expected \[5, 8, 3\]"),
        (v_scale[:4], r"v_scale: shape \[4, 8, 3\]"),
        (v_scale.half(), "v_scale: dtype torch.float16, expected torch.float32"),
        (v_scale[:1].expand(5, 8, 3), "v_scale: strides .*, expected no two elements at one address"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            cache_kernels.reshape_and_cache.reshape_and_cache(
                rows, rows, k_cache, v_cache, slots, k_scale=k_scale, v_scale=wrong
            )
    assert (k_cache == UNTOUCHED).all()
