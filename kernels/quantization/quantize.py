"""Quantise plain weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..core.checks import FLOAT_DTYPES, check_dtype, check_shape
from ..core.errors import InvalidInputError, as_int, shown
from .packing import E2M1, E2M1_GROUPS, FP8_BLOCK, pack_codes
from .weight import QuantizedWeight

_LARGEST = {"e4m3": 448.0, "int8": 127.0, "int4": 7.0, "mxfp4": 6.0, "nvfp4": 6.0}


def quantize(
    weight: torch.Tensor,
    form: str,
    *,
    group_size: int = -1,
    symmetric: bool = True,
) -> QuantizedWeight:
    """Quantise plain weights, each to the nearest code; the largest weight of a group gets the largest code.

    For e4m3, and for symmetric int8 without groups, the result also quantises its input.

    Args:
        weight: float32, float16 or bfloat16 [out_features, in_features].
        form: "e4m3", "int8", "int4", "mxfp4" or "nvfp4".
        group_size: columns of a row that share a scale; -1 for all of them, 0 for one scale for all weights. e4m3 takes
            -1, 0, or 128 for blocks of 128 x 128. Ignored for MXFP4 (32) and NVFP4 (16).
        symmetric: False stores zero points, so that codes span a group's smallest and largest value; int8 and int4
            only.

    Raises:
        InvalidInputError: a dtype, shape or group size does not fit.
        UnsupportedError: see `QuantizedWeight`.
    """
    check_dtype("weight", weight, *FLOAT_DTYPES)
    check_shape("weight", weight, ("out_features", "in_features"))
    group_size = as_int("group_size", group_size, -1)
    if form not in _LARGEST:
        raise InvalidInputError(f"form: {shown(form)}, expected one of {sorted(_LARGEST)}")
    is_whole = form in ("int8", "int4")
    if not symmetric and not is_whole:
        raise InvalidInputError(f"symmetric: False with {form}, expected int8 or int4")
    rows, columns = weight.shape
    height, width = 1, columns
    if form in E2M1_GROUPS:
        width = E2M1_GROUPS[form]
    elif group_size > 0:
        width = group_size
    if group_size == 0 and form not in E2M1_GROUPS:
        height = rows
    elif form == "e4m3" and group_size == FP8_BLOCK:
        height = FP8_BLOCK
    if form == "e4m3" and group_size not in (-1, 0, FP8_BLOCK):
        raise InvalidInputError(f"group_size: {group_size}, expected -1, 0 or {FP8_BLOCK} with e4m3")
    if is_whole and columns % width:
        raise InvalidInputError(f"group_size: {group_size}, expected a divisor of {columns} columns")
    padded = functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    groups = padded.view(len(padded) // height, height, -1, width)
    scale, zero_point, tensor_scale = _scales(groups, form, symmetric)
    spread = scale[:, None, :, None]
    if tensor_scale is not None:
        spread = spread * tensor_scale
    codes = _codes(groups / torch.where(spread > 0, spread, 1.0), form, zero_point)
    codes = codes.reshape(padded.shape)[:rows, :columns].contiguous()
    if is_whole or (form == "e4m3" and group_size != FP8_BLOCK):
        shape: tuple[int, ...] = (rows, columns // width)
        if group_size == 0:
            shape = ()
        elif width == columns:
            shape = (rows,)
        scale = scale.reshape(shape)
        if zero_point is not None:
            zero_point = zero_point.reshape(shape)
    if form == "mxfp4":
        scale = (scale.log2().round() + 127).to(torch.uint8)
    elif form == "nvfp4":
        scale = scale.to(torch.float8_e4m3fn)
    if form not in ("e4m3", "int8"):
        codes = pack_codes(codes)
    return QuantizedWeight(
        codes,
        scale,
        columns,
        zero_point,
        tensor_scale,
        quantizes_input=form == "e4m3" or (form == "int8" and symmetric and scale.dim() < 2),
    )


def _scales(
    groups: torch.Tensor, form: str, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return scale [row groups, column groups] float32, zero point int8 in this shape, and the tensor scale."""
    largest = groups.abs().amax((1, 3))
    if not symmetric:
        num_codes, first = 16, 0
        if form == "int8":
            num_codes, first = 256, -128
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
    """Return the codes of weights after their division by their scale."""
    if form == "e4m3":
        return values.to(torch.float8_e4m3fn)
    if form in E2M1_GROUPS:
        middles = torch.tensor(E2M1, device=values.device)
        code = torch.bucketize(values.abs(), (middles[1:] + middles[:-1]) / 2)
        return (code + 8 * values.signbit()).to(torch.uint8)
    low, high, dtype = 0, 15, torch.uint8
    zero: torch.Tensor | int = 8
    if form == "int8":
        low, high, dtype, zero = -128, 127, torch.int8, 0
    if zero_point is not None:
        zero = zero_point[:, None, :, None]
    return (values.round() + zero).clamp(low, high).to(dtype)
