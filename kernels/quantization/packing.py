"""Packs 4-bit codes in the one order that kernels take, and quantises plain weights.

A unit of 128 columns is 16 words of int32. Nibble i of word r's lower half is the code of column 32 i + 2 r of the
unit, nibble i of its upper half that of the column after it, for i from 0 to 3: four runs of 32 columns, each with a
shift of its own, in which two neighbours stand 16 bits apart, where the registers of a matrix instruction want them as
16-bit numbers. A shift and a mask yield both at once.

Instructions of all warps in the loop over columns, for a KB of packed int4 weights and 16 rows in bfloat16, 64 columns
a program, on sm_90 and sm_80: 248 and 254, and 186 and 210 with 128 columns. Two neighbours in a byte, the order of
all published layouts but AWQ's: 535 and 539. The halves of a unit in the nibbles of a byte: 526 and 523. Words of eight
neighbours, which is AWQ's order along the other axis, take two nibbles at once too, but are sorted through shared
memory: 323 and 307, or 240 and 319 with operands swapped. An H100 that reads 3.35 TB/s has 274 to spend on a KB, an
A100 with 2 TB/s 306. 16-bit weights take 21 a KB.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from paged.kernels.common.checks import FLOAT_DTYPES, check_dtype, check_shape
from paged.kernels.common.errors import InvalidInputError
from paged.kernels.common.scalars import as_int, shown
from paged.kernels.quantization.weight import FP8_BLOCK, MXFP4_GROUP, NVFP4_GROUP, UNIT, QuantizedWeight

# The magnitudes of E2M1's codes 0 to 7; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = {"e4m3": 448.0, "int8": 127.0, "int4": 7.0, "mxfp4": 6.0, "nvfp4": 6.0}


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns] of 0 to 15 as int32 words [rows, 16 * ceil(columns / 128)], filled up with code 0.

    Raises:
        InvalidInputError: the shape or dtype is another.
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
    """The uint8 codes [rows, num_columns] of `pack_codes`."""
    units = words.view(len(words), -1, UNIT // 8)
    runs = [torch.stack([units >> 4 * i & 15, units >> 4 * i + 16 & 15], -1) for i in range(4)]
    return torch.stack(runs, 2).flatten(1)[:, :num_columns].to(torch.uint8)


def quantize(
    weight: torch.Tensor,
    form: str,
    *,
    group_size: int = -1,
    symmetric: bool = True,
    quantizes_input: bool | None = None,
    input_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Plain weights, rounded to the nearest code of a group whose largest value gets the largest code.

    Args:
        weight: float32, float16 or bfloat16 [out_features, in_features].
        form: "e4m3", "int8", "int4", "mxfp4" or "nvfp4".
        group_size: columns of a row that share a scale, -1 for all of them, 0 for all weights; of e4m3 128 for blocks
            of 128 x 128. MXFP4 has 32 and NVFP4 16, whatever it is.
        symmetric: False for zero points, of int8 and int4, so that a group's codes span its smallest and largest value.
        quantizes_input, input_scale: see `QuantizedWeight`; of e4m3, and of symmetric int8 without groups, the input is
            quantised where nothing is said.

    Raises:
        InvalidInputError: a dtype, shape or group size does not fit.
        UnsupportedError: see `QuantizedWeight`.
    """
    check_dtype("weight", weight, *FLOAT_DTYPES)
    check_shape("weight", weight, ("out_features", "in_features"))
    group_size = as_int("group_size", group_size, -1)
    if form not in _LARGEST:
        raise InvalidInputError(f"form: {shown(form)}, expected one of {sorted(_LARGEST)}")
    if not symmetric and form not in ("int8", "int4"):
        raise InvalidInputError(f"symmetric: False with {form}, expected int8 or int4")
    rows, columns = weight.shape
    height = 1
    if form in ("mxfp4", "nvfp4"):
        width = MXFP4_GROUP if form == "mxfp4" else NVFP4_GROUP
    elif group_size == 0:
        height, width = rows, columns
    else:
        width = columns if group_size == -1 else group_size
        height = FP8_BLOCK if form == "e4m3" and width == FP8_BLOCK else 1
    if form == "e4m3" and group_size not in (-1, 0, FP8_BLOCK):
        raise InvalidInputError(f"group_size: {group_size}, expected -1, 0 or {FP8_BLOCK} with e4m3")
    if form in ("int8", "int4") and columns % width:
        raise InvalidInputError(f"group_size: {group_size}, expected a divisor of {columns} columns")
    padded = functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    groups = padded.view(len(padded) // height, height, -1, width)
    scale, zero_point, tensor_scale = _scales(groups, form, symmetric)
    spread = scale[:, None, :, None] * (1.0 if tensor_scale is None else tensor_scale)
    codes = _codes(groups / torch.where(spread > 0, spread, 1.0), form, zero_point)
    codes = codes.reshape(padded.shape)[:rows, :columns].contiguous()
    if form in ("int8", "int4") or (form == "e4m3" and height != FP8_BLOCK):
        shape = () if group_size == 0 else (rows,) if width == columns else (rows, columns // width)
        scale = scale.reshape(shape)
        zero_point = None if zero_point is None else zero_point.reshape(shape)
    if form == "mxfp4":
        scale = (scale.log2().round() + 127).to(torch.uint8)
    elif form == "nvfp4":
        scale = scale.to(torch.float8_e4m3fn)
    if quantizes_input is None:
        quantizes_input = form == "e4m3" or (form == "int8" and symmetric and scale.dim() < 2)
    return QuantizedWeight(
        pack_codes(codes) if form in ("int4", "mxfp4", "nvfp4") else codes,
        scale,
        columns,
        zero_point,
        tensor_scale,
        quantizes_input,
        input_scale,
    )


def _scales(
    groups: torch.Tensor, form: str, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Scale [row groups, column groups] float32, zero point int8 of the same shape, and one scale for all."""
    largest = groups.abs().amax((1, 3))
    if not symmetric:
        num_codes, first = (256, -128) if form == "int8" else (16, 0)
        low, high = groups.amin((1, 3)).clamp(max=0), groups.amax((1, 3)).clamp(min=0)
        scale = torch.where(high > low, (high - low) / (num_codes - 1), 1.0)
        return scale, (first - low / scale).round().clamp(first, first + num_codes - 1).to(torch.int8), None
    scale = torch.where(largest > 0, largest / _LARGEST[form], 1.0)
    if form == "mxfp4":
        exponents = scale.log2().ceil()
        tensor_scale = torch.exp2(exponents.max())
        return torch.exp2((exponents - exponents.max()).clamp(min=-127)), None, tensor_scale
    if form == "nvfp4":
        tensor_scale = scale.max() / 448
        rounded = (scale / tensor_scale).to(torch.float8_e4m3fn).float().clamp(min=2.0**-9)
        return rounded, None, tensor_scale
    return scale, None, None


def _codes(values: torch.Tensor, form: str, zero_point: torch.Tensor | None) -> torch.Tensor:
    """The codes of weights divided by their scale."""
    if form == "e4m3":
        return values.to(torch.float8_e4m3fn)
    if form in ("mxfp4", "nvfp4"):
        middles = torch.tensor(E2M1, device=values.device)
        code = torch.bucketize(values.abs(), (middles[1:] + middles[:-1]) / 2)
        return (code + 8 * values.signbit()).to(torch.uint8)
    low, high = (-128, 127) if form == "int8" else (0, 15)
    zero = zero_point[:, None, :, None] if zero_point is not None else 0 if form == "int8" else 8
    return (values.round() + zero).clamp(low, high).to(torch.int8 if form == "int8" else torch.uint8)
