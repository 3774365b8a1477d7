"""Published layouts, written by their formulas from known codes, become the weights that the formulas say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paged import InvalidInputError, UnsupportedError
from paged.kernels.common.packed.packing import pack_codes, unpack_codes
from paged.kernels.quantization import reference
from paged.kernels.quantization.repack import (
    from_awq,
    from_compressed_tensors,
    from_gptq,
    from_mxfp4,
    from_nvfp4,
)
from tests.kernels.quantization.published import E2M1, in_bytes, in_words

ROWS, COLUMNS, GROUP = 24, 160, 32
GROUPS = COLUMNS // GROUP


def numbers(num_bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns], scales and zero points [rows, groups]."""
    codes = torch.randint(2**num_bits, (ROWS, COLUMNS))
    return codes, torch.rand(ROWS, GROUPS) + 0.5, torch.randint(2**num_bits, (ROWS, GROUPS))


def expected(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | int, groups: torch.Tensor) -> torch.Tensor:
    zeros = torch.full_like(scale, zeros) if isinstance(zeros, int) else zeros
    return ((codes - zeros[:, groups]).double() * scale[:, groups].double()).double()


IN_STEPS = torch.arange(COLUMNS) // GROUP


@pytest.mark.parametrize("num_columns", [1, 127, 128, 300])
def test_packing_round_trip(num_columns: int) -> None:
    codes = torch.randint(16, (3, num_columns), dtype=torch.uint8)
    words = pack_codes(codes)
    assert torch.equal(unpack_codes(words, num_columns), codes)
    assert torch.equal(reference.codes(words, num_columns), codes.long())


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("has_order", [True, False])
def test_compressed_tensors(num_bits: int, has_zeros: bool, has_order: bool) -> None:
    codes, scale, zeros = numbers(num_bits)
    groups = IN_STEPS[torch.randperm(COLUMNS)] if has_order else IN_STEPS
    weight = from_compressed_tensors(
        in_words(codes, num_bits),
        scale,
        COLUMNS,
        num_bits=num_bits,
        weight_zero_point=in_words(zeros.T, num_bits).T if has_zeros else None,
        weight_g_idx=groups.int() if has_order else None,
    )
    want = expected(codes, scale, zeros if has_zeros else 2 ** (num_bits - 1), groups)
    order = torch.arange(COLUMNS) if weight.input_order is None else weight.input_order.long()
    assert (weight.input_order is not None) == has_order
    torch.testing.assert_close(reference.dequantize(weight), want[:, order])


def test_compressed_tensors_of_columns_that_no_word_divides() -> None:
    codes = torch.randint(16, (5, 99))
    weight = from_compressed_tensors(in_words(codes, 4), torch.ones(5, 1), 99)
    assert torch.equal(reference.dequantize(weight), codes.double() - 8)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq(num_bits: int, version: int, act_order: bool) -> None:
    """Version 1 stores words of zero points less one in every place: a zero point of 0 borrows from its neighbour."""
    codes, scale, zeros = numbers(num_bits)
    zeros[0] = 0
    groups = IN_STEPS[torch.randperm(COLUMNS)] if act_order else IN_STEPS
    ones = {4: 0x11111111, 8: 0x01010101}[num_bits]
    qweight = in_words(codes, num_bits).T.contiguous()
    qzeros = in_words(zeros.T, num_bits) - (ones if version == 1 else 0)
    weight = from_gptq(qweight, scale.T.contiguous(), qzeros, groups.int(), num_bits=num_bits, format_version=version)
    order = torch.arange(COLUMNS) if weight.input_order is None else weight.input_order.long()
    torch.testing.assert_close(reference.dequantize(weight), expected(codes, scale, zeros, groups)[:, order])
    x = torch.randn(3, COLUMNS)
    torch.testing.assert_close(
        reference.quantized_linear(x, weight), x.double() @ expected(codes, scale, zeros, groups).T
    )


def test_gptq_without_zero_points() -> None:
    codes, scale, _ = numbers(4)
    weight = from_gptq(in_words(codes, 4).T, scale.T, None)
    torch.testing.assert_close(reference.dequantize(weight), expected(codes, scale, 8, IN_STEPS))


def test_awq() -> None:
    codes, scale, zeros = numbers(4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    weight = from_awq(in_words(codes.T, 4, order), scale.T.contiguous(), in_words(zeros.T, 4, order))
    torch.testing.assert_close(reference.dequantize(weight), expected(codes, scale, zeros, IN_STEPS))


@pytest.mark.parametrize("in_blocks", [True, False])
def test_mxfp4(in_blocks: bool) -> None:
    """Scales as gpt-oss has them, and their largest beyond what float16 holds."""
    codes, scales = torch.randint(16, (ROWS, COLUMNS)), torch.randint(100, 145, (ROWS, GROUPS), dtype=torch.uint8)
    packed = in_bytes(codes)
    weight = from_mxfp4(packed.view(ROWS, GROUPS, 16) if in_blocks else packed, scales)
    want = E2M1[codes] * 2.0 ** (scales.double() - 127)[:, IN_STEPS]
    assert torch.equal(reference.dequantize(weight), want)
    assert weight.format == "mxfp4"


@pytest.mark.parametrize("name", ["weight_global_scale", "weight_scale_2"])
def test_nvfp4(name: str) -> None:
    codes = torch.randint(16, (ROWS, COLUMNS))
    scales = (torch.rand(ROWS, COLUMNS // 16) * 448).to(torch.float8_e4m3fn)
    weight = from_nvfp4(in_bytes(codes), scales, **{name: torch.tensor([8.0])})
    total = 8.0 if name == "weight_scale_2" else 1 / 8
    want = E2M1[codes] * scales.double()[:, torch.arange(COLUMNS) // 16] * total
    assert torch.equal(reference.dequantize(weight), want)
    assert weight.format == "nvfp4"


CODES, SCALES = torch.zeros(ROWS, COLUMNS // 8, dtype=torch.int32), torch.ones(ROWS, GROUPS)
BYTES = torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8)
FP8 = torch.ones(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: from_compressed_tensors(CODES, SCALES, 200), InvalidInputError, r"weight_packed: shape \[24, 20\]"),
        (lambda: from_compressed_tensors(CODES, SCALES[1:], 160), InvalidInputError, r"weight_scale: shape \[23, 5\]"),
        (lambda: from_compressed_tensors(CODES, SCALES, 160, num_bits=3), UnsupportedError, "num_bits: 3"),
        (
            lambda: from_compressed_tensors(CODES, SCALES, 160, weight_zero_point=CODES),
            InvalidInputError,
            r"weight_zero_point: shape \[24, 20\], expected \[3, 5\]",
        ),
        (
            lambda: from_compressed_tensors(CODES, SCALES, 160, weight_g_idx=torch.zeros(160, dtype=torch.int32)),
            InvalidInputError,
            "g_idx: expected each of 5 groups for 160 / 5 columns",
        ),
        (lambda: from_compressed_tensors(CODES, SCALES[:, :3], 160), InvalidInputError, "scale: 3 groups"),
        (
            lambda: from_gptq(CODES.T, SCALES.T, CODES),
            InvalidInputError,
            r"qzeros: shape \[24, 20\], expected \[5, 3\]",
        ),
        (lambda: from_gptq(CODES.T, SCALES.T, None, format_version=3), InvalidInputError, "format_version: 3"),
        (lambda: from_awq(CODES.long(), SCALES, CODES), InvalidInputError, "qweight: dtype"),
        (lambda: from_awq(CODES.T, SCALES.T, CODES), InvalidInputError, r"scales: shape \[5, 24\], expected"),
        (lambda: from_mxfp4(BYTES, SCALES), InvalidInputError, "scales: dtype"),
        (lambda: from_mxfp4(BYTES, SCALES[:, 1:].byte()), InvalidInputError, r"scales: shape \[24, 4\]"),
        (lambda: from_mxfp4(BYTES, torch.full((24, 5), 255).byte()), InvalidInputError, "scales: 255"),
        (lambda: from_nvfp4(BYTES, FP8), InvalidInputError, "weight_global_scale, weight_scale_2: expected one"),
        (
            lambda: from_nvfp4(BYTES, FP8, weight_scale_2=torch.ones(2)),
            InvalidInputError,
            r"weight_scale_2: shape \[2\], expected one value",
        ),
        (
            lambda: from_nvfp4(BYTES, FP8[1:], weight_scale_2=torch.ones(())),
            InvalidInputError,
            r"weight_scale: shape \[23, 10\], expected \[24, 10\]",
        ),
    ],
)
def test_rejects_what_does_not_fit(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
