"""Published layouts, written by their formulas from known codes, become the weights that the formulas say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged import InvalidInputError, UnsupportedError
from paged.kernels.quantization import definition
from paged.kernels.quantization.packing import pack_codes, unpack_codes
from paged.kernels.quantization.repack import from_awq, from_compressed_tensors, from_gptq, from_mxfp4, from_nvfp4
from tests.kernels.quantization.published import E2M1, in_bytes, in_words, nibbles

ROWS, COLUMNS, GROUP = 24, 160, 32
GROUPS = COLUMNS // GROUP
IN_STEPS = torch.arange(COLUMNS) // GROUP


@pytest.mark.parametrize("num_columns", [1, 127, 128, 300])
def test_packing_round_trip(num_columns: int) -> None:
    codes = torch.randint(16, (3, num_columns), dtype=torch.uint8)
    words = pack_codes(codes)
    assert torch.equal(unpack_codes(words, num_columns), codes)
    assert torch.equal(nibbles(words, num_columns), codes.int())


def test_compressed_tensors_of_columns_that_no_word_divides() -> None:
    codes = torch.randint(16, (5, 99))
    weight = from_compressed_tensors(in_words(codes, 4), torch.ones(5, 1), 99)
    assert torch.equal(definition.dequantize(weight), codes.double() - 8)


def test_gptq_without_zero_points() -> None:
    codes, scale = torch.randint(16, (ROWS, COLUMNS)), torch.rand(ROWS, GROUPS) + 0.5
    weight = from_gptq(in_words(codes, 4).T, scale.T, None)
    assert torch.equal(definition.dequantize(weight), (codes - 8).double() * scale.double()[:, IN_STEPS])


@pytest.mark.parametrize("in_blocks", [True, False])
def test_mxfp4(in_blocks: bool) -> None:
    """Scales as gpt-oss has them, and their largest beyond what float16 holds."""
    codes, scales = torch.randint(16, (ROWS, COLUMNS)), torch.randint(100, 145, (ROWS, GROUPS), dtype=torch.uint8)
    packed = in_bytes(codes)
    weight = from_mxfp4(packed.view(ROWS, GROUPS, 16) if in_blocks else packed, scales)
    want = E2M1[codes] * 2.0 ** (scales.double() - 127)[:, IN_STEPS]
    assert torch.equal(definition.dequantize(weight), want)
    assert weight.format == "mxfp4"


CODES, SCALES = torch.zeros(ROWS, COLUMNS // 8, dtype=torch.int32), torch.ones(ROWS, GROUPS)
BYTES, FP8 = torch.zeros(ROWS, COLUMNS // 2).byte(), torch.ones(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn)
ONE = torch.ones(())


@pytest.mark.parametrize(
    ("repack", "given", "options", "message"),
    [
        (from_compressed_tensors, (CODES, SCALES, 200), {}, r"weight_packed: shape \[24, 20\]"),
        (from_compressed_tensors, (CODES, SCALES[1:], 160), {}, r"weight_scale: shape \[23, 5\]"),
        (from_compressed_tensors, (CODES, SCALES, 160), {"num_bits": 3}, "num_bits: 3"),
        (from_compressed_tensors, (CODES, SCALES, 160), {"weight_zero_point": CODES}, r"\[24, 20\], expected \[3, 5\]"),
        (from_gptq, (CODES.T, SCALES.T, None, torch.zeros(160).int()), {}, "g_idx: expected each"),
        (from_gptq, (CODES.T, SCALES.T, CODES), {}, r"qzeros: shape \[24, 20\], expected \[5, 3\]"),
        (from_gptq, (CODES.T, SCALES.T, None), {"format_version": 3}, "format_version: 3"),
        (from_awq, (CODES.long(), SCALES, CODES), {}, "qweight: dtype"),
        (from_mxfp4, (BYTES, SCALES), {}, "scales: dtype"),
        (from_mxfp4, (BYTES, torch.full((24, 5), 255).byte()), {}, "scales: 255"),
        (from_nvfp4, (BYTES, FP8), {}, "weight_global_scale, weight_scale_2: expected one"),
        (from_nvfp4, (BYTES, FP8[1:]), {"weight_scale_2": ONE}, r"weight_scale: shape \[23, 10\], expected \[24, 10\]"),
    ],
)
def test_rejects_what_does_not_fit(
    repack: Callable[..., object], given: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError if "num_bits" in options else InvalidInputError, match=message):
        repack(*given, **options)
