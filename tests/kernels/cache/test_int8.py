"""Caches of int8: every row with its own scale, wherever the two lie, and the faults that the checks must see."""

from pathlib import Path

import pytest
import torch

import paged.kernels.cache.reshape_and_cache
import paged.kernels.cache.write
import paged.kernels.core.dtypes
from paged import qk_norm_rope_and_cache
from tests.kernels.cache.test_qk_norm_rope_and_cache import make_inputs, rotated
from tests.kernels.faulty import planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import DTYPES, assert_within

operation = paged.kernels.cache.reshape_and_cache
MODULES = (paged.kernels.core.dtypes, paged.kernels.cache.write, operation)
NUM_BLOCKS, BLOCK_SIZE = 5, 8
UNTOUCHED, UNTOUCHED_SCALE = 77, 7.0
SLOT = "slot_offset(slots, stride_block, stride_slot, KV"

# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "values are cut off": ("((x + _ROUNDER) - _ROUNDER).to(tl.int8)", "x.to(tl.int8)"),
    "the largest is no step": ("return LARGEST / tl.maximum", "return (LARGEST - 1.0) / tl.maximum"),
    "the scale of a neighbour": (SLOT, SLOT.replace("slots", "slots ^ 1")),
    "V's scales for K": ("k_scale_ptr, slots, heads, stride_k_scale_b", "v_scale_ptr, slots, heads, stride_k_scale_b"),
    "NaN is forgotten": ("largest / LARGEST + not_finite", "largest / LARGEST"),
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


def _assert_holds(
    cache: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, slack: float = 1e-6
) -> None:
    """Each row rounded to the nearest of 255 steps, the largest of which it fills, in its slot, and nothing elsewhere.

    slack: what the values may be off by before they are rounded, relative to the row's largest.
    """
    rows, slots, cache, scale = (x.cpu() for x in (rows, slots, cache, scale))
    place = slots[slots >= 0] // BLOCK_SIZE, slots[slots >= 0] % BLOCK_SIZE
    rest = torch.ones(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    rest[place] = False
    assert (cache[rest] == UNTOUCHED).all()
    assert (scale[rest] == UNTOUCHED_SCALE).all()
    rows, cache, scale = rows[slots >= 0].double(), cache[place].double(), scale[place].double()
    largest, is_finite = rows.abs().amax(-1), rows.isfinite().all(-1)
    assert torch.equal(scale.isnan(), ~is_finite)
    assert_within(scale[is_finite], largest[is_finite] / 127, slack * largest[is_finite] / 127)
    step = scale[is_finite].unsqueeze(-1)
    assert_within(cache[is_finite] * step, rows[is_finite], 127 * slack * step, rounding=step / 2)
    assert (cache.abs().amax(-1)[is_finite] == 127 * (largest[is_finite] > 0)).all()


def _check(layout: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    key, value = _rows(head_dim, dtype), _rows(head_dim, dtype)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:7]
    slots[1] = -1
    k_cache, v_cache, k_scale, v_scale = _caches(layout, head_dim, device)
    given = (x.to(device) for x in (key, value, k_cache, v_cache, slots))
    operation.reshape_and_cache(*given, k_scale=k_scale, v_scale=v_scale)
    _assert_holds(k_cache, k_scale, key, slots)
    _assert_holds(v_cache, v_scale, value, slots)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "head_dim"), [("one storage", 80), ("apart", 128), ("apart", 7)])
def test_rows_and_scales(layout: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(layout, head_dim, dtype, device)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    with planted(MODULES, [], tmp_path, *MUTATIONS[fault]):
        assert turns_red(_check, "apart", 80, torch.float32, device) == (fault != "no fault")


@pytest.mark.usefixtures("backend")
def test_ties_go_to_even(device: torch.device) -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], device=device).expand(1, 3, 8)
    k_cache, v_cache, k_scale, v_scale = _caches("apart", 8, device)
    given = row, row, k_cache, v_cache, torch.tensor([9], device=device)
    operation.reshape_and_cache(*given, k_scale=k_scale, v_scale=v_scale)
    assert k_cache[1, 1, 0].tolist() == v_cache[1, 1, 2].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "rotary_dim", "interleaved"),
    [(80, 80, 80, False), (96, 40, 24, True), (512, 512, 128, False)],
)
def test_rotated_keys(
    head_dim: int, v_head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """The scale is that of the whole row, whichever part of it holds the largest value."""
    inputs = make_inputs((5, 3, head_dim, v_head_dim, rotary_dim, interleaved), dtype, device)
    weight = torch.rand(head_dim, device=device).to(dtype)
    for head, column in enumerate((0, rotary_dim // 2 + 1, head_dim - 1)):
        inputs["k"][:, head, column] = 30.0
    inputs["v"][2, 1, 3] = torch.nan
    k_cache, _, k_scale, _ = _caches("one storage", head_dim, device)
    _, v_cache, _, v_scale = _caches("one storage", v_head_dim, device)
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
    qk_norm_rope_and_cache(**inputs, **caches, q_weight=weight, k_weight=weight)
    _assert_holds(k_cache, k_scale, rotated(inputs["k"], weight, inputs), inputs["slot_mapping"], slack=1e-5)
    _assert_holds(v_cache, v_scale, inputs["v"], inputs["slot_mapping"])


def test_rejects_other_scales(device: torch.device) -> None:
    rows, slots = torch.randn(1, 3, 16, device=device), torch.tensor([3], device=device)
    k_cache, v_cache, k_scale, v_scale = _caches("apart", 16, device)
    sound = {"key": rows, "value": rows, "k_cache": k_cache.clone(), "v_cache": v_cache, "slot_mapping": slots}
    assert_refuses(
        operation.reshape_and_cache,
        {**sound, "k_scale": k_scale, "v_scale": v_scale},
        ("v_scale", None, r"v_scale: None, expected \[5, 8, 3\], a scale for each row of int8"),
        ("v_scale", torch.ones(3, device=device), r"v_scale: shape \[3\], expected \[5, 8, 3\]"),
        ("v_scale", v_scale[:4], r"v_scale: shape \[4, 8, 3\]"),
        ("v_scale", v_scale.half(), "v_scale: dtype torch.float16, expected torch.float32"),
        ("v_scale", v_scale[:1].expand(5, 8, 3), "v_scale: strides .*, expected no two elements at one address"),
    )
