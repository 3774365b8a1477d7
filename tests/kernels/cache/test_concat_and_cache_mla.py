"""concat_and_cache_mla and its fused variant against float64, in every form of a latent cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.cache.concat_and_cache_mla
from paged import concat_and_cache_mla, mla_norm_rope_and_cache
from paged.kernels.cache import definition
from tests.kernels.attention.loops import numbers
from tests.kernels.cache.rounding import rounded_latents
from tests.kernels.faulty import planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import assert_close, assert_within

operations = paged.kernels.cache.concat_and_cache_mla
FORMS = ("", "e4m3", "packed", "no rotation")


def _write(form: str, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    size, rope = (512, 64) if form == "packed" else (48, 0 if form == "no rotation" else 16)
    latent, k_rope = torch.randn(5, size + rope + 7, device=device).to(dtype)[:, 7:].split((size, rope), 1)
    cache = torch.full((6, 8, 656) if form == "packed" else (6, 8, size + rope), 3, dtype=torch.float32, device=device)
    kind = {"e4m3": torch.float8_e4m3fn, "packed": torch.uint8}.get(form, dtype)
    slots = torch.tensor([3, 40, -1, 0, 9], device=device)
    given = {"latent": latent, "k_rope": k_rope, "kv_cache": cache.to(kind)[::2, :, :], "slot_mapping": slots % 24}
    given["slot_mapping"] = torch.where(slots < 0, -1, given["slot_mapping"])
    return given | ({"scale": torch.tensor([0.7], device=device)} if form == "e4m3" else {})


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_written_to_their_slots(form: str, device: torch.device) -> None:
    given = _write(form, device, torch.float16 if form == "no rotation" else torch.float32)
    expected = rounded_latents(definition.concat_and_cache_mla(**given), given["kv_cache"])
    concat_and_cache_mla(**given)
    _assert_same_numbers(form, given["kv_cache"], expected)


def _assert_same_numbers(form: str, cache: torch.Tensor, want: torch.Tensor) -> None:
    """Where float32 rounds before a code is chosen, its neighbour may be the nearest."""
    got = numbers(cache)
    step = {"": 1e-5, "no rotation": 0.0}.get(form, 2**-3)
    assert_within(got, want, step * want.abs() + 1e-5, is_exact=step == 2**-3)
    assert float((got - want).abs().gt(1e-4 * want.abs() + 1e-5).double().mean()) < 0.01


def check_fused(form: str, interleaved: bool, device: torch.device, rotates: bool = True) -> None:
    given = _write(form, device)
    rope = given["k_rope"].shape[1]
    q = torch.randn(5, 9, rope + 3, device=device)[..., 3:]
    angles = torch.randn(12, rope // 2 if rotates else 0, device=device)
    where = (torch.tensor([0, 11, 3, 3, 7], device=device), torch.cat([angles.cos(), angles.sin()], 1))
    weight = torch.rand(given["latent"].shape[1], device=device) + 0.5
    given |= dict(zip(("positions", "cos_sin_cache"), where, strict=True))
    given |= {"latent_weight": weight, "eps": 1e-5, "interleaved": interleaved}
    want_q, want_parts = definition.mla_norm_rope_and_cache(q, **given)
    want = rounded_latents(want_parts, given["kv_cache"])
    result = mla_norm_rope_and_cache(q, **given)
    assert result is q
    assert_close(q, want_q)
    _assert_same_numbers(form, given["kv_cache"], want)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("form", "interleaved"), [("", True), ("e4m3", False), ("packed", True)])
def test_norm_and_rotation_come_first(form: str, interleaved: bool, device: torch.device) -> None:
    check_fused(form, interleaved, device)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", ["", "no rotation", "packed"])
def test_a_table_without_columns_rotates_nothing(form: str, device: torch.device) -> None:
    check_fused(form, True, device, rotates=False)


@pytest.mark.usefixtures("backend")
def test_a_group_that_is_not_finite_reads_as_nan(device: torch.device) -> None:
    given = _write("packed", device)
    given["latent"][0, 130] = torch.inf
    concat_and_cache_mla(**given)
    row = numbers(given["kv_cache"])[0, 3]
    assert bool(row[128:256].isnan().all())
    assert bool(row[:128].isfinite().all())


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    given = _write("", device)
    assert_refuses(
        concat_and_cache_mla,
        given,
        ("latent", given["latent"].double(), "latent: dtype"),
        ("k_rope", given["k_rope"][:, :8], "k_rope: shape"),
        ("kv_cache", given["kv_cache"].half(), "kv_cache: dtype"),
        ("kv_cache", given["kv_cache"][:1].expand(2, -1, -1), "kv_cache: strides"),
        ("slot_mapping", given["slot_mapping"].int(), "slot_mapping: dtype"),
        ("slot_mapping", given["slot_mapping"] + 24, r"slot_mapping\[0\]: 27"),
        ("scale", torch.ones(1, device=device), "scale: given, expected None"),
    )


MUTATIONS = {
    "no fault": ("", ""),
    "no weight": ("latent / root * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)", "latent / root"),
    "another slot": ("slot = tl.load(slot_mapping_ptr + token)", "slot = tl.load(slot_mapping_ptr + token) ^ 1"),
    "no scale of latents": ("inverse = 1.0 / tl.load(scale_ptr)", "inverse = 1.0"),
    "no scale of rotated parts": ("cos_sin_ptr, scale_ptrs, eps", "cos_sin_ptr, None, eps"),
    "the scale of another group": ("scales_row + offs_g, largest", "scales_row + (offs_g ^ 1), largest"),
    "k does not rotate": ("one_head, None, cos_sin_ptr", "one_head, None, cos_sin_cache_ptr"),
    "q of half of the heads": ("heads < NUM_Q_HEADS, None", "heads < NUM_Q_HEADS // 2, None"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    with planted([operations], [], tmp_path, *MUTATIONS[fault]):
        is_found = any(turns_red(check_fused, form, False, device) for form in FORMS[:3])
    assert is_found == (fault != "no fault")
