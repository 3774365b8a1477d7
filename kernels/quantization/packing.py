"""The order of 4-bit codes that kernels take.

A unit of 128 columns is 16 words of int32. Nibble i of the lower half of word r is the code of column 32 i + 2 r of the
unit. Nibble i of the upper half is the code of the next column. i runs from 0 to 3: four runs of 32 columns, each with
its own shift. Two neighbours lie 16 bits apart, where the registers of a matrix instruction take 16-bit numbers, so one
shift and one mask decode both.

Other orders take up to twice the instructions, more than the memory bandwidth leaves time for. See limits.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ..core.checks import FLOAT_DTYPES, check_dtype, check_shape, check_tensor
from ..core.errors import InvalidInputError, UnsupportedError

# Columns of a unit: 16 words of eight 4-bit codes.
UNIT = 128
# The magnitudes of E2M1's codes 0 to 7; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Columns that share a scale, in formats that fix the number (Open Compute Project, 2023; NVIDIA, 2025).
MXFP4_GROUP, NVFP4_GROUP = 32, 16
E2M1_GROUPS = {"mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}
# Rows and columns of e4m3 weights that share a scale, and a token's values that share one (DeepSeek-V3, 2024).
FP8_BLOCK = 128
# Dtypes of scales that are powers of two: 2^(byte - 127).
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "int4"}


def num_words(num_columns: int) -> int:
    """Return the number of words in a row of `pack_codes`."""
    return UNIT // 8 * -(-num_columns // UNIT)


def format_of(values: torch.Tensor, scale: torch.Tensor) -> str:
    """Return the format of codes: "e4m3", "int8", "int4", "mxfp4" or "nvfp4". For words the scales' dtype decides."""
    if values.dtype != torch.int32:
        return _FORMATS[values.dtype]
    if scale.dtype in E8M0:
        return "mxfp4"
    if scale.dtype == torch.float8_e4m3fn:
        return "nvfp4"
    return "int4"


def group_of(form: str, scale_shape: Sequence[int], columns: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of weights that share a scale; 0 for all of them."""
    if len(scale_shape) < 2:
        return len(scale_shape), 0
    if form == "e4m3":
        return FP8_BLOCK, FP8_BLOCK
    return 1, E2M1_GROUPS.get(form) or columns // scale_shape[-1]


def check_scales(
    names: tuple[str, str, str],
    values: torch.Tensor,
    columns: int,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
) -> None:
    """Check that scale, zero points and tensor scale fit codes [..., rows, columns].

    names: names of the three arguments, for errors.

    Raises:
        InvalidInputError: a shape, dtype or device does not fit.
        UnsupportedError: a group is not a multiple of 32 columns.
    """
    (*lead, rows, _), form, device = values.shape, format_of(values, scale), values.device
    expected: tuple[int | str, ...] = (rows,)[: max(scale.dim() - len(lead), 0)]
    if form in E2M1_GROUPS:
        expected = rows, -(-columns // E2M1_GROUPS[form])
    elif scale.dim() - len(lead) > 1:
        blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        expected = blocks if form == "e4m3" else (rows, "groups")
    # The format of packed words depends on the dtype of their scales.
    narrow = (*E8M0, torch.float8_e4m3fn) if values.dtype == torch.int32 else ()
    dtypes = (torch.float32,) if form == "e4m3" else (*FLOAT_DTYPES, *narrow)
    check_tensor(names[0], scale, (*lead, *expected), dtypes, device)
    if "groups" in expected:
        num_groups = scale.shape[-1]
        if num_groups == 0 or columns % num_groups:
            raise InvalidInputError(f"{names[0]}: {num_groups} groups, expected a divisor of {columns} columns")
        if (size := columns // num_groups) % 32:
            raise UnsupportedError(f"{names[0]}: groups of {size} columns, expected a multiple of 32")
    if zeros is not None:
        if form not in ("int8", "int4"):
            raise InvalidInputError(f"{names[1]}: given with {form} weights, expected None")
        check_tensor(names[1], zeros, scale.shape, (torch.int8,), device)
    if tensor_scale is not None:
        check_tensor(names[2], tensor_scale, lead, (torch.float32,), device)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8 codes 0 to 15, [rows, columns], into int32 words [rows, 16 * ceil(columns / 128)].

    The last words are filled with code 0.

    Raises:
        InvalidInputError: the shape or dtype does not fit.
    """
    check_shape("codes", codes, ("rows", "columns"))
    check_dtype("codes", codes, torch.uint8)
    padded = functional.pad(codes, (0, -codes.shape[1] % UNIT)).int()
    runs = padded.view(len(codes), -1, 4, UNIT // 8, 2)  # unit, i, r, half
    words = torch.zeros_like(runs[:, :, 0, :, 0])
    for i in range(4):
        words |= runs[:, :, i, :, 0] << 4 * i | runs[:, :, i, :, 1] << 4 * i + 16
    return words.flatten(1)


def unpack_codes(words: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the uint8 codes [rows, num_columns] of words of `pack_codes`."""
    octets = words.view(torch.uint8).view(len(words), -1, UNIT // 8, 2, 2)  # unit, r, half, i // 2
    octets = octets.permute(0, 1, 4, 2, 3).reshape(*octets.shape[:2], 2, 1, UNIT // 4)
    return torch.cat([octets & 15, octets >> 4], 3).flatten(1)[:, :num_columns]


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [..., columns / 2] into uint8 codes [..., columns]. The first of two is in the low bits."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
