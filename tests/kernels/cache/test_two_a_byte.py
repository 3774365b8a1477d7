"""Caches with two numbers a byte, whose groups have scales of their own, and faults that checks must see."""

from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.cache.reshape_and_cache
import paged.kernels.cache.write
import paged.kernels.core.dtypes
from paged import qk_norm_rope_and_cache
from paged.kernels.core.dtypes import kv_kind
from tests.kernels.cache.test_qk_norm_rope_and_cache import draw_signs, make_inputs, rotated
from tests.kernels.faulty import planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import assert_within

operation = paged.kernels.cache.reshape_and_cache
MODULES = (paged.kernels.core.dtypes, paged.kernels.cache.write, operation)
NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS = 5, 8, 3
UNTOUCHED, UNTOUCHED_SCALE = 0x77, 7.0
INT4, NVFP4 = torch.bits4x2, torch.float4_e2m1fn_x2
TABLE_SCALE = 4.0

# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "nibbles are swapped": ("(first & 15) | (second & 15) << 4", "(second & 15) | (first & 15) << 4"),
    "the scale of a neighbour": ("tl.store(scale_ptrs + index,", "tl.store(scale_ptrs + (index ^ 1),"),
    "the sign is forgotten": ("tl.where(largest > -smallest, largest, smallest)", "largest"),
    "scales are cut off": ("row_mask & (index * GROUP < WIDTH)", "row_mask & (index * GROUP + 32 < WIDTH)"),
    "scales behind the row": ("row_mask & (index * GROUP < WIDTH)", "row_mask & (index * GROUP < WIDTH + 32)"),
    "NaN is forgotten": (" + tl.sum(groups * 0.0, axis=2)\n    scales", "\n    scales"),
}
NVFP4_MUTATIONS = {
    "no fault of nvfp4": ("", ""),
    "nibbles are swapped": ("(first | second << 4)", "(second | first << 4)"),
    "the scale of a neighbour": ("scale_ptrs + index, scale_codes", "scale_ptrs + (index ^ 1), scale_codes"),
    "the sign is forgotten": ("(codes & 7) | ((codes >> 4) & 8)", "codes & 7"),
    "scales are not rounded": ("scales = decode_e4m3(scale_codes, NATIVE_FP8).to(tl.float32)", "scales = largest"),
    "NaN is forgotten": (" + tl.sum(groups * 0.0, axis=2)\n    scale_codes", "\n    scale_codes"),
    "no scale of the table": ("inverse = 1.0 / tl.load(table_scale_ptr)", "inverse = None"),
}


def _caches(head_dim: int, device: torch.device, dtype: torch.dtype = INT4) -> dict[str, torch.Tensor]:
    """k_cache, v_cache and their scales, by name, with a row of bytes and a scale between two heads."""
    caches, kind = {}, kv_kind(dtype)
    for name in ("k", "v"):
        shape = NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS
        rows = torch.full((*shape, head_dim), UNTOUCHED, dtype=torch.uint8, device=device)
        caches[f"{name}_cache"] = rows.view(dtype)[..., : head_dim // 2]
        num_scales = kind.num_scales(head_dim)
        scales = torch.full((*shape, num_scales + 1), UNTOUCHED_SCALE, device=device).to(kind.scale_dtype)
        caches[f"{name}_scale"] = scales[..., :num_scales]
        if kind.has_table_scale:
            caches[f"{name}_table_scale"] = torch.tensor([TABLE_SCALE], device=device)
    return caches


def _assert_holds(caches: dict[str, torch.Tensor], name: str, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Every number is within the rounding of its group, and nothing is written beside the slots."""
    cache = caches[f"{name}_cache"].cpu()
    kind = kv_kind(cache.dtype)
    slots, rows = slots.cpu(), rows.cpu().double()
    place = slots[slots >= 0] // BLOCK_SIZE, slots[slots >= 0] % BLOCK_SIZE
    rest = torch.ones(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    rest[place] = False
    assert (cache.view(torch.uint8)[rest] == UNTOUCHED).all()
    base = caches[f"{name}_scale"].cpu().float()
    assert (base[rest] == UNTOUCHED_SCALE).all()
    behind = caches[f"{name}_scale"].cpu()
    behind = behind.as_strided(base.shape[:3], behind.stride()[:3], behind.storage_offset() + base.shape[3])
    assert (behind.float() == UNTOUCHED_SCALE).all()
    scales = base[place].to(kind.scale_dtype)
    numbers = kind.decode(cache.view(torch.uint8)[place].view(cache.dtype), scales, torch.float64)
    rows = rows[slots >= 0] / caches.get(f"{name}_table_scale", torch.ones(1)).item()
    padding = -rows.shape[-1] % kind.group_size
    groups = torch.nn.functional.pad(rows, (0, padding)).unflatten(-1, (-1, kind.group_size))
    is_finite = groups.isfinite().all(-1, keepdim=True).expand_as(groups).flatten(-2)[..., : rows.shape[-1]]
    assert torch.equal(numbers.isnan(), ~is_finite)
    step = scales.double().repeat_interleave(kind.group_size, -1)[..., : rows.shape[-1]]
    for chosen, rounding in _roundings(cache.dtype, rows, step):
        chosen = chosen & is_finite
        assert_within(numbers[chosen], rows[chosen], 1e-4 * step[chosen].abs(), rounding=rounding[chosen])


def _roundings(
    dtype: torch.dtype, rows: torch.Tensor, step: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return masks of rows, and how far the numbers of these rows may be off. step: scales of the numbers."""
    size = step.abs()
    if dtype == NVFP4:
        # Half a step of e2m1 is a quarter of the scale, or of a number beyond two scales. A scale may be rounded down
        # by 2^-4 or 2^-10, and numbers beyond 6 scales are cut.
        return ((torch.ones_like(rows, dtype=torch.bool), torch.maximum(size, rows.abs()) / 4 + 6 * 2.0**-10),)
    # A scale is up to 2^-7 smaller than an eighth of the largest magnitude. A number of the other sign may be cut.
    is_inside = rows * step.sign() <= 7.5 * size
    return (is_inside, (0.5 + 8 / 128) * size), (torch.ones_like(is_inside), (1 + 2 / 128) * size)


def _rows(head_dim: int) -> torch.Tensor:
    """[7 tokens, 3 heads, head_dim] of all sizes, with zeros and what is not finite."""
    rows = torch.randn(7, NUM_HEADS, head_dim) * 10.0 ** torch.randint(-3, 4, (7, NUM_HEADS, head_dim))
    rows[0], rows[2, 1, 3], rows[3, 0, 0], rows[3, 1, 2] = 0.0, torch.nan, torch.inf, -torch.inf
    return rows


def _check(head_dim: int, device: torch.device, dtype: torch.dtype = INT4) -> None:
    key, value = _rows(head_dim).to(device), _rows(head_dim).to(device)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:7].to(device)
    slots[1] = -1
    caches = _caches(head_dim, device, dtype)
    operation.reshape_and_cache(key, value, slot_mapping=slots, **caches)
    _assert_holds(caches, "k", key, slots)
    _assert_holds(caches, "v", value, slots)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (80, INT4),
        (80, NVFP4),
        pytest.param(8, INT4, marks=pytest.mark.thorough),
        pytest.param(8, NVFP4, marks=pytest.mark.thorough),
    ],
)
def test_groups_and_scales(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(head_dim, device, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "fault"), [*((INT4, fault) for fault in MUTATIONS), *((NVFP4, fault) for fault in NVFP4_MUTATIONS)]
)
def test_checks_see_the_fault(dtype: torch.dtype, fault: str, tmp_path: Path, device: torch.device) -> None:
    texts = MUTATIONS[fault] if dtype == INT4 else NVFP4_MUTATIONS[fault]
    with planted(MODULES, [], tmp_path, *texts):
        assert turns_red(_check, 80, device, dtype) == bool(texts[0])


@pytest.mark.thorough
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved"), [(80, 24, False), (96, 96, True)])
def test_rotated_keys(head_dim: int, rotary_dim: int, interleaved: bool, device: torch.device) -> None:
    inputs = make_inputs((5, NUM_HEADS, head_dim, head_dim, rotary_dim, interleaved), torch.float32, device)
    if interleaved:
        inputs["hadamard_signs"] = draw_signs(head_dim, device)
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
