"""Caches of int4: groups of 32 numbers with their own scale, two numbers a byte, and faults that checks must see."""

from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.cache.reshape_and_cache
import paged.kernels.cache.write
import paged.kernels.core.dtypes
from paged import qk_norm_rope_and_cache
from paged.kernels.core.dtypes import kv_kind
from tests.kernels.cache.test_qk_norm_rope_and_cache import make_inputs, rotated
from tests.kernels.faulty import planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import assert_within

operation = paged.kernels.cache.reshape_and_cache
MODULES = (paged.kernels.core.dtypes, paged.kernels.cache.write, operation)
NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS = 5, 8, 3
UNTOUCHED, UNTOUCHED_SCALE = 0x77, 7.0

# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "nibbles are swapped": ("(first & 15) | (second & 15) << 4", "(second & 15) | (first & 15) << 4"),
    "the scale of a neighbour": ("tl.store(scale_ptrs + index,", "tl.store(scale_ptrs + (index ^ 1),"),
    "the sign is forgotten": ("tl.where(largest > -smallest, largest, smallest)", "largest"),
    "scales are cut off": ("row_mask & (index * GROUP < WIDTH)", "row_mask & (index * GROUP + 32 < WIDTH)"),
    "scales behind the row": ("row_mask & (index * GROUP < WIDTH)", "row_mask & (index * GROUP < WIDTH + 32)"),
    "NaN is forgotten": (" + tl.sum(groups * 0.0, axis=2)", ""),
}


def _caches(head_dim: int, device: torch.device) -> dict[str, torch.Tensor]:
    """k_cache, v_cache and their scales, by name, with a row of bytes and a scale between two heads."""
    caches = {}
    for name in ("k", "v"):
        shape = NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS
        rows = torch.full((*shape, head_dim), UNTOUCHED, dtype=torch.uint8, device=device)
        caches[f"{name}_cache"] = rows.view(torch.bits4x2)[..., : head_dim // 2]
        num_scales = -(-head_dim // 32)
        scales = torch.full((*shape, num_scales + 1), UNTOUCHED_SCALE, dtype=torch.bfloat16, device=device)
        caches[f"{name}_scale"] = scales[..., :num_scales]
    return caches


def _assert_holds(caches: dict[str, torch.Tensor], name: str, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Every number is within a step of its group, half a step unless it has the other sign than the largest one.

    Nothing is written beside the slots.
    """
    kind = kv_kind(torch.bits4x2)
    cache, scale = (caches[f"{name}_{part}"].cpu() for part in ("cache", "scale"))
    slots, rows = slots.cpu(), rows.cpu().double()
    place = slots[slots >= 0] // BLOCK_SIZE, slots[slots >= 0] % BLOCK_SIZE
    rest = torch.ones(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    rest[place] = False
    assert (cache.view(torch.uint8)[rest] == UNTOUCHED).all()
    base = caches[f"{name}_scale"].cpu()
    assert (base[rest] == UNTOUCHED_SCALE).all()
    behind = base.as_strided(base.shape[:3], base.stride()[:3], base.storage_offset() + base.shape[3])
    assert (behind == UNTOUCHED_SCALE).all()
    stored = cache.view(torch.uint8)[place].view(torch.bits4x2)
    numbers = kind.decode(stored, scale[place], torch.float64)
    rows = rows[slots >= 0]
    padding = -rows.shape[-1] % 32
    groups = torch.nn.functional.pad(rows, (0, padding)).unflatten(-1, (-1, 32))
    is_finite = groups.isfinite().all(-1, keepdim=True).expand_as(groups).flatten(-2)[..., : rows.shape[-1]]
    assert torch.equal(numbers.isnan(), ~is_finite)
    step = scale[place].double().repeat_interleave(32, -1)[..., : rows.shape[-1]]
    # A scale is up to 2^-7 smaller than an eighth of the largest magnitude.
    is_inside = (rows * step.sign() <= 7.5 * step.abs()) & is_finite
    for chosen, rounding in ((is_inside, 0.5 + 8 / 128), (is_finite, 1 + 2 / 128)):
        size = step[chosen].abs()
        assert_within(numbers[chosen], rows[chosen], 1e-4 * size, rounding=rounding * size)


def _rows(head_dim: int) -> torch.Tensor:
    """[7 tokens, 3 heads, head_dim] of all sizes, with zeros and what is not finite."""
    rows = torch.randn(7, NUM_HEADS, head_dim) * 10.0 ** torch.randint(-3, 4, (7, NUM_HEADS, head_dim))
    rows[0], rows[2, 1, 3], rows[3, 0, 0], rows[3, 1, 2] = 0.0, torch.nan, torch.inf, -torch.inf
    return rows


def _check(head_dim: int, device: torch.device) -> None:
    key, value = _rows(head_dim).to(device), _rows(head_dim).to(device)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:7].to(device)
    slots[1] = -1
    caches = _caches(head_dim, device)
    operation.reshape_and_cache(key, value, slot_mapping=slots, **caches)
    _assert_holds(caches, "k", key, slots)
    _assert_holds(caches, "v", value, slots)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("head_dim", [80, pytest.param(8, marks=pytest.mark.thorough)])
def test_groups_and_scales(head_dim: int, device: torch.device) -> None:
    _check(head_dim, device)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    with planted(MODULES, [], tmp_path, *MUTATIONS[fault]):
        assert turns_red(_check, 80, device) == (fault != "no fault")


@pytest.mark.thorough
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved"), [(80, 24, False), (96, 96, True)])
def test_rotated_keys(head_dim: int, rotary_dim: int, interleaved: bool, device: torch.device) -> None:
    inputs = make_inputs((5, NUM_HEADS, head_dim, head_dim, rotary_dim, interleaved), torch.float32, device)
    weight = torch.rand(head_dim, device=device)
    caches = _caches(head_dim, device)
    qk_norm_rope_and_cache(**inputs, **caches, q_weight=weight, k_weight=weight)
    _assert_holds(caches, "k", rotated(inputs["k"], weight, inputs), inputs["slot_mapping"])
    _assert_holds(caches, "v", inputs["v"], inputs["slot_mapping"])


def test_refuses_other_shapes(device: torch.device) -> None:
    rows, slots = torch.randn(1, NUM_HEADS, 40, device=device), torch.tensor([3], device=device)
    sound: dict[str, Any] = {"key": rows, "value": rows, "slot_mapping": slots, **_caches(40, device)}
    scale = sound["v_scale"]
    assert_refuses(
        operation.reshape_and_cache,
        sound,
        ("v_scale", None, r"v_scale: None, expected \[5, 8, 3, 2\], a scale for 32 numbers of int4"),
        ("v_scale", scale[..., :1], r"v_scale: shape \[5, 8, 3, 1\], expected \[5, 8, 3, 2\]"),
        ("v_scale", scale.float(), "v_scale: dtype torch.float32, expected torch.bfloat16"),
        ("v_scale", scale.mT.contiguous().mT, "v_scale: last dimension has stride 3, expected 1"),
        ("value", rows[..., :39], "v_cache: rows of 39 numbers, expected a multiple of 2 for int4"),
    )
