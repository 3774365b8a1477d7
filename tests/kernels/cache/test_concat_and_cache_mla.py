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
FORMS = ("", "e4m3", "packed", "nvfp4", "no rotation")
# Bytes of a row in the published forms.
RECORDS = {"packed": 656, "nvfp4": 352}


def _write(form: str, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    size, rope = (512, 64) if form in RECORDS else (48, 0 if form == "no rotation" else 16)
    latent, k_rope = torch.randn(5, size + rope + 7, device=device).to(dtype)[:, 7:].split((size, rope), 1)
    cache = torch.full((6, 8, RECORDS.get(form, size + rope)), 3, dtype=torch.float32, device=device)
    kind = {"e4m3": torch.float8_e4m3fn, **dict.fromkeys(RECORDS, torch.uint8)}.get(form, dtype)
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
    want_q, want_numbers = definition.mla_norm_rope_and_cache(q, **given)
    want = rounded_latents(want_numbers, given["kv_cache"])
    result = mla_norm_rope_and_cache(q, **given)
    assert result is q
    assert_close(q, want_q)
    _assert_same_numbers(form, given["kv_cache"], want)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("form", "interleaved"), [("", True), ("e4m3", False), ("packed", True), ("nvfp4", True)])
def test_norm_and_rotation_come_first(form: str, interleaved: bool, device: torch.device) -> None:
    check_fused(form, interleaved, device)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", ["", "no rotation", "packed"])
def test_a_table_without_columns_rotates_nothing(form: str, device: torch.device) -> None:
    check_fused(form, True, device, rotates=False)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("form", "group"), [("packed", 128), ("nvfp4", 16)])
def test_a_group_that_is_not_finite_reads_as_nan(form: str, group: int, device: torch.device) -> None:
    given = _write(form, device)
    given["latent"][0, group + 2] = torch.inf
    concat_and_cache_mla(**given)
    row = numbers(given["kv_cache"])[0, 3]
    assert bool(row[group : 2 * group].isnan().all())
    assert bool(row[:group].isfinite().all())
    assert bool(row[2 * group :].isfinite().all())


@pytest.mark.usefixtures("backend")
def test_nvfp4_rows_have_the_published_bytes(device: torch.device) -> None:
    """Low nibbles are even numbers, scales are permuted and at least 2^-9, rotated numbers have no scale."""
    latent = torch.zeros(1, 512, device=device)
    latent[0, :4] = torch.tensor([6.0, -0.5, 3.0, 1.0])  # group 0, scale 1: codes 7, 9, 5, 2
    latent[0, 21 * 16 + 15] = -24.0  # group 21, scale 4: code 15 in the high nibble
    latent[0, 7 * 16] = 0.001  # group 7, scale 2^-9: 0.512 is code 1
    rope = torch.zeros(1, 64, device=device)
    rope[0, :3] = torch.tensor([1.0, -448.0, 1000.0])
    cache = torch.full((1, 1, 352), 0xAA, dtype=torch.uint8, device=device)
    concat_and_cache_mla(latent, rope, cache, torch.tensor([0], device=device))
    row = torch.zeros(352, dtype=torch.uint8)
    row[0], row[1], row[7 * 8], row[21 * 8 + 7] = 0x97, 0x25, 0x01, 0xF0
    row[256], row[257], row[258] = 0x38, 0xFE, 0x7E  # 1, -448, 448
    row[320:] = 0x01  # 2^-9
    row[320], row[320 + 8 * (21 & 3) + (21 >> 2)] = 0x38, 0x48
    assert torch.equal(cache[0, 0].cpu(), row)


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
    "nibbles change places": ("first | second << 4", "second | first << 4"),
    "scales in their order": ("index % 4 * (LATENT // _NVFP4_GROUP // 4) + index // 4", "index"),
    "a rotated part in another form": (
        '"e4m3" if KIND == "nvfp4_latent" else',
        '"e5m2" if KIND == "nvfp4_latent" else',
    ),
    "k does not rotate": ("one_head, None, cos_sin_ptr", "one_head, None, cos_sin_cache_ptr"),
    "q of half of the heads": ("heads < NUM_Q_HEADS, None", "heads < NUM_Q_HEADS // 2, None"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    with planted([operations], [], tmp_path, *MUTATIONS[fault]):
        is_found = any(turns_red(check_fused, form, False, device) for form in FORMS[:4])
    assert is_found == (fault != "no fault")
