"""Entries of pools: the rule's, in every implementation."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.cache.pooled_entries as kernels
import paged.kernels.cache.write_pooled_entries as module
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.errors import InvalidInputError
from paged.kernels.cache import latent_cache, pooled_definition
from tests.backends import needs_numba
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses

CARD = CARDS["write_pooled_entries"]
RECORDS: dict[str, Any] = {
    "dim": 512,
    "is_normed": True,
    "rotary_dim": 64,
    "interleaved": True,
    "rotates_last": True,
    "is_packed": True,
}


def drawn(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """Two chunks of prompts; the last token of the second is padding."""
    arguments = CARD.draw(Draw(device, dtype), **{"tokens": 40, "dim": 24, "pool": 4, **options})
    for name in ("row_slots", "entry_slots"):
        arguments[name][-1] = -1
    return arguments


@pytest.mark.parametrize("form", ["means", "gates", "overlapping"])
def test_the_definition_is_the_rule(form: str) -> None:
    """Number by number: pooled, normalised, rotated at the first position of the pool."""
    options: dict[str, Any] = {"is_normed": True, "rotary_dim": 2, "rotates_last": True, "interleaved": True}
    options |= {"has_gates": form != "means", "overlaps": form == "overlapping"}
    arguments = drawn(torch.device("cpu"), dim=4, pool=3, **options)
    rows, weight = arguments["row_cache"].double().flatten(0, 1), arguments["norm_weight"].double()
    expected = arguments["entry_cache"].double().flatten(0, 1)
    slots = arguments["row_slots"].tolist()
    num_closed = 0
    for token, position in enumerate(arguments["positions"].tolist()):
        if slots[token] < 0 or position % 3 != 2:
            continue
        num_closed += 1
        entry = torch.zeros(4, dtype=torch.float64)
        for channel in range(4):
            terms: list[tuple[torch.Tensor, torch.Tensor]] = []  # weight and value of each row
            for place in range(3):
                row = rows[slots[token] - 2 + place]
                if form == "means":
                    terms.append((torch.ones(()), row[channel]))
                    continue
                bias = arguments["position_bias"][place].double()
                if form == "gates":
                    terms.append(((row[4 + channel] + bias[channel]).exp(), row[channel]))
                    continue
                terms.append(((row[12 + channel] + bias[4 + channel]).exp(), row[4 + channel]))
                before = position - 5 + place
                if before >= 0:
                    seq = int(token >= arguments["cu_seqlens_q"][1])
                    row = rows[arguments["row_table"][seq, before // 12] * 12 + before % 12]
                    terms.append(((row[8 + channel] + bias[channel]).exp(), row[channel]))
            entry[channel] = sum(factor * value for factor, value in terms) / sum(factor for factor, _ in terms)
        entry *= weight / (entry.square().mean() + 1e-6).sqrt()
        cos, sin = arguments["cos_sin_cache"][position - 2].double().tolist()
        a, b = entry[2:].tolist()
        entry[2:] = torch.tensor([a * cos - b * sin, b * cos + a * sin], dtype=torch.float64)
        expected[arguments["entry_slots"][token] // 3] = entry
    assert num_closed > 6
    entries = pooled_definition.write_pooled_entries(**arguments)
    torch.testing.assert_close(entries.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"pool": 16, "dim": 128, "is_packed": True},
        {"pool": 3, "has_gates": False, "is_normed": True, "rotary_dim": 8},
        {"pool": 24, **RECORDS},
        {"pool": 4, "overlaps": True, **RECORDS},
        {"pool": 2, **RECORDS, "record_bytes": latent_cache.MXFP8_BYTES},
        pytest.param({"pool": 3, **RECORDS, "record_bytes": latent_cache.NVFP4_BYTES}, marks=pytest.mark.thorough),
        {"pool": 24, "in_rings": True},
    ],
    ids=["keys", "means", "records", "overlapping", "V4.1", "NVFP4", "rings"],
)
def test_every_implementation_agrees(
    dtype: torch.dtype, options: dict[str, Any], backend: str, device: torch.device
) -> None:
    arguments = drawn(device, dtype, **options)
    if "norm_weight" in arguments:  # rows of bfloat16 models may be float32
        arguments["norm_weight"] = arguments["norm_weight"].bfloat16()
    for result in CARD.check(arguments).values():
        assert result.first_wrong() is None


@pytest.mark.parametrize(("num_bytes", "num_codes", "size"), [(584, 448, 64), (528, 512, 32)])
def test_records_are_their_numbers(num_bytes: int, num_codes: int, size: int) -> None:
    """Group by group, as the published formats have it."""
    rows = torch.randn(5, 512) * torch.logspace(-20, 15, 5)[:, None]
    rows[1, 64:128] = 0
    rows[2, 192] = torch.inf
    rows[3, :64] = 448 * 2.0**-3  # its scale is a power of two already
    records = latent_cache.encode_records(rows, num_bytes)
    first_exponent = 512 + 512 - num_codes
    decoded = latent_cache.decode_records(records)
    for row, record, numbers in zip(rows, records, decoded, strict=True):
        assert torch.equal(record[num_codes:first_exponent].view(torch.bfloat16), row[num_codes:].bfloat16())
        assert torch.equal(numbers[num_codes:], row[num_codes:].bfloat16().float())
        for group in range(num_codes // size):
            members = slice(size * group, size * group + size)
            exponent, largest = int(record[first_exponent + group]), row[members].abs().max()
            if not largest.isfinite():
                assert exponent == 255
                assert numbers[members].isnan().all()
                continue
            scale = 2.0 ** (exponent - 127)
            assert 224 * scale < max(largest, 2.0**-100) <= 448 * scale
            codes = (row[members] / scale).to(torch.float8_e4m3fn)
            assert torch.equal(record[members].view(torch.float8_e4m3fn), codes)
            assert torch.equal(numbers[members], codes.float() * scale)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = drawn(device)
    assert_refuses(
        module.write_pooled_entries,
        arguments,
        ("row_cache", arguments["row_cache"][..., :40], "position_bias: shape"),
        ("row_cache", arguments["row_cache"][:, :15], "row_cache: block_size 15, expected a multiple of pool_size 4"),
        ("entry_cache", arguments["entry_cache"][..., :20], "entry_cache: shape"),
        (
            "entry_cache",
            arguments["entry_cache"].new_zeros(2, 4, 24, dtype=torch.uint8),
            "entry_cache: 24 bytes an entry",
        ),
        ("pool_size", 257, "pool_size"),
        ("position_bias", arguments["position_bias"].long(), "position_bias: dtype"),
        ("norm_weight", arguments["position_bias"][0, :8], "norm_weight: shape"),
        ("row_slots", arguments["row_slots"] + 960, "row_slots"),
        ("entry_slots", arguments["entry_slots"] + 960, "entry_slots"),
        ("in_rings", 2, "in_rings"),
        ("row_table", torch.zeros(2, 3, dtype=torch.int32, device=device), "row_table: given, expected"),
    )


@needs_numba
def test_numba_refuses_a_table_without_the_pool_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    arguments = drawn(torch.device("cpu"), overlaps=True)
    before = arguments["entry_cache"].clone()
    for table in (arguments["row_table"] - 1000, arguments["row_table"][:, :0]):
        with pytest.raises(InvalidInputError, match="row_table"):
            module.write_pooled_entries(**arguments | {"row_table": table})
    assert torch.equal(arguments["entry_cache"], before)


# fault -> (text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "a pool closes one token early": (
        "(entry_slot % POOL_SIZE != POOL_SIZE - 1)",
        "(entry_slot % POOL_SIZE != POOL_SIZE - 2)",
    ),
    "the pool one token late": ("row_slot - POOL_SIZE + 1", "row_slot - POOL_SIZE + 2"),
    "a ring is a row short": ("offs_p) % ROW_BLOCK_SIZE", "offs_p) % (ROW_BLOCK_SIZE - 1)"),
    "the pool before, of a neighbour block": ("position // ROW_BLOCK_SIZE - 1", "position // ROW_BLOCK_SIZE"),
    "the pool before, of another sequence": ("tl.load(cu_seqlens_q_ptr + middle) > token", "middle < 0"),
    "a pool before the first": ("tl.where(position > 0, 0, OWN)", "tl.where(position < 0, 0, 0)"),
    "halves in the wrong order": ("tl.where(is_before, 0, HEAD_DIM)", "tl.where(is_before, HEAD_DIM, 0)"),
    "the entry of a neighbour": ("slot = entry_slot // POOL_SIZE", "slot = entry_slot // POOL_SIZE ^ 1"),
    "no bias": ("gates += tl.load(bias_ptrs", "gates += 0 * tl.load(bias_ptrs"),
    "gates are values": ("tl.load(row_ptrs + GATES", "tl.load(row_ptrs"),
    "padding has weight": ('tl.where(in_pool[:, None], gates, float("-inf"))', "gates"),
    "sums for means": ("entry = entry / total", "entry = entry"),
    "sums keep their unit": ("entry = entry * factor", "entry = entry"),
    "no norm": ("entry = entry / root", "entry = entry"),
    "rotated at the last position": (
        "tl.load(positions_ptr + token) - POOL_SIZE + 1",
        "tl.load(positions_ptr + token)",
    ),
    "the first elements rotate": ("place = offs_d - FIRST_ROTATED", "place = offs_d"),
    "rotated back": ("tl.where(is_first, -other, other)", "tl.where(is_first, other, -other)"),
    "the scale of a neighbour": ("tl.store(scale_ptr + offs_g, scales", "tl.store(scale_ptr + (offs_g ^ 1), scales"),
    "the codes of a neighbour byte": (
        "tl.store(entry_ptr + offs_b, packed",
        "tl.store(entry_ptr + (offs_b ^ 1), packed",
    ),
    "scales are rounded down": ("(bits + 0x7FFFFF) >> 23", "bits >> 23"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    text, replacement = MUTATIONS[fault]
    with planted((kernels, module), (), tmp_path, text, replacement):
        faulty = dataclasses.replace(CARD, function=module.write_pooled_entries)
        is_found = turns_red(exceeds_no_bound_twice, faulty, drawn(device, pool=11, **RECORDS))
        is_found |= turns_red(exceeds_no_bound_twice, faulty, drawn(device, pool=3, overlaps=True))
        nvfp4 = drawn(device, pool=11, **RECORDS, record_bytes=latent_cache.NVFP4_BYTES)
        is_found |= turns_red(exceeds_no_bound_twice, faulty, nvfp4)
        is_found |= turns_red(exceeds_no_bound_twice, faulty, drawn(device, pool=11, in_rings=True))
    assert is_found == (fault != "no fault")
