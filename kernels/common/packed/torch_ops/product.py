"""The product of rows with quantised weights in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from ...torch_ops.linear import linear
from ..packing import E2M1, unpack_codes, unpack_pairs

# Weights that are unpacked at once: 4 MB in float32, which stay in a core's cache until they are multiplied.
_TILE = 1 << 20
# The most rows that share a scale.
_GROUP_ROWS = 128
# Of the types that activations are rounded to, and the least scale: that of zeros.
_LARGEST = {"int8": 127.0, "e4m3": 448.0}
_TINY = 2.0**-126


def unpack(
    values: torch.Tensor,
    scale: torch.Tensor,
    form: str,
    group: tuple[int, int],
    num_columns: int,
    *,
    zero_point: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Return rows of (code - zero_point) * scale * tensor_scale in float32, a tile at a time, with their place.

    Args:
        values: e4m3 or int8 [out_features, in_features], 4-bit codes in int32 words of `pack_codes`, or two a byte.
        form: "e4m3", "int8", "int4", "mxfp4" or "nvfp4".
        group: rows and columns that share one of `scale` and `zero_point`. One for all columns has one dimension less,
            one for all weights none.
        zero_point: None for 8 of int4, and 0 of others.
    """
    num_rows = max(_TILE // num_columns // _GROUP_ROWS, 1) * _GROUP_ROWS
    for start in range(0, len(values), num_rows):
        rows = slice(start, min(start + num_rows, len(values)))
        w = _numbers(values[rows], form, num_columns, has_zeros=zero_point is not None)
        if zero_point is not None:
            _by_group(torch.Tensor.sub_, w, zero_point.float(), group, rows)
        if form == "mxfp4":
            factors = torch.exp2(scale.view(torch.uint8).float() - 127)
        else:
            factors = scale.float()
        _by_group(torch.Tensor.mul_, w, factors, group, rows)
        if tensor_scale is not None:
            w *= tensor_scale
        yield rows, w


def quantized_product(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    form: str,
    group: tuple[int, int],
    out: torch.Tensor,
    *,
    zero_point: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Fill `out` [num_rows, out_features] with x @ unpacked^T + bias; x is float32, the others as in `unpack`."""
    tiles = unpack(values, scale, form, group, x.shape[1], zero_point=zero_point, tensor_scale=tensor_scale)
    for rows, w in tiles:
        bias_of_rows = None
        if bias is not None:
            bias_of_rows = bias[rows].float()
        out[:, rows] = linear(x, w, bias_of_rows)


def round_rows(x: torch.Tensor, form: str, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x to "int8" or "e4m3" by a given scale or one for the last dimension; return float32 values and the scale.

    What is not finite makes its scale infinite or NaN.
    """
    largest = _LARGEST[form]
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True).float().div_(largest).clamp_min_(_TINY)
        scaled = x / scale
    else:
        lowest = -128.0 if form == "int8" else -largest
        scaled = (x.float() / scale).clamp_(lowest, largest)
        scale = scale + (x * 0).sum(-1, keepdim=True)
    if form == "int8":
        return scaled.round_(), scale
    return scaled.to(torch.float8_e4m3fn).float(), scale


def rounded_groups(x: torch.Tensor, group: int, form: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round groups of columns to "int8" or "e4m3" by a given scale or their own; return float32 values."""
    groups = functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(-1, (-1, group))
    rounded, scale = round_rows(groups, form, scale)
    not_finite = (groups * 0).sum(-1, keepdim=True)
    return (rounded * scale + not_finite).flatten(-2)[:, : x.shape[1]]


def _numbers(values: torch.Tensor, form: str, num_columns: int, *, has_zeros: bool) -> torch.Tensor:
    """What codes stand for before scales, float32 [rows, num_columns], in memory of its own."""
    if form == "int8":
        return values.float()
    if form == "e4m3":
        codes, meant = values.view(torch.uint8), torch.arange(256, dtype=torch.uint8).view(values.dtype).float()
    else:
        if values.dtype == torch.int32:
            codes = unpack_codes(values, num_columns)
        else:
            codes = unpack_pairs(values)
        if form == "int4":
            middle = 0 if has_zeros else 8
            return codes.float().sub_(middle)
        meant = torch.tensor([*E2M1, *(-value for value in E2M1)])
    # In 0.4 of the time of a conversion from e4m3, and 0.3 of that of an index [codes].
    return meant.to(codes.device).index_select(0, codes.int().flatten()).view(codes.shape)


def _by_group(
    change: Callable[[torch.Tensor, torch.Tensor], object],
    w: torch.Tensor,
    numbers: torch.Tensor,
    group: tuple[int, int],
    rows: slice,
) -> None:
    """Change w, `rows` of the weights, in place by the number of each group, which may be one for all, or one a row."""
    height, width = group
    if numbers.dim() > 0:
        numbers = numbers[rows.start // height : -(-rows.stop // height)]
        numbers = numbers.view(len(numbers), -1).repeat_interleave(height, 0)[: len(w)]
    if numbers.dim() == 0 or numbers.shape[1] == 1:
        change(w, numbers)
        return
    num_whole = w.shape[1] // width  # the last group may have fewer columns
    change(w[:, : num_whole * width].unflatten(1, (num_whole, width)), numbers[:, :num_whole, None])
    change(w[:, num_whole * width :], numbers[:, num_whole:])
