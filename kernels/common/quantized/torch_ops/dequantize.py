"""Quantised weights as numbers."""

from __future__ import annotations

import torch

from paged.kernels.common.quantized.packing import E2M1, unpack_codes, unpack_pairs


def dequantize(
    values: torch.Tensor,
    scale: torch.Tensor,
    form: str,
    group: tuple[int, int],
    num_columns: int,
    *,
    rows: slice = slice(None),
    zero_point: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Some rows of weights, float32 [rows, num_columns]: (code - zero_point) * scale * tensor_scale.

    Args:
        values: e4m3 or int8 [all rows, num_columns], 4-bit codes in int32 words of `pack_codes`, or two a byte.
        form: "e4m3", "int8", "int4", "mxfp4" or "nvfp4".
        group: rows and columns that share one of `scale` and `zero_point`; scales of all columns have one dimension
            less, one for all weights none.
        rows: beginning at a multiple of the rows of a group.
        zero_point: None for 8 of int4, and 0 of others.
    """
    values = values[rows]
    if values.dtype in (torch.int32, torch.uint8):
        codes = unpack_codes(values, num_columns) if values.dtype == torch.int32 else unpack_pairs(values)
        if form == "int4":
            values = codes.float() - (8 if zero_point is None else 0)
        else:
            values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)[codes.int()]
    values = values.float()
    if zero_point is not None:
        values = values - _spread(zero_point.float(), group, rows, values.shape)
    scale = torch.exp2(scale.view(torch.uint8).float() - 127) if form == "mxfp4" else scale.float()
    values = values * _spread(scale, group, rows, values.shape)
    return values if tensor_scale is None else values.mul_(tensor_scale)


def _spread(scale: torch.Tensor, group: tuple[int, int], rows: slice, shape: torch.Size) -> torch.Tensor:
    """What belongs to groups as what belongs to some rows and all columns, or broadcasts to it."""
    if scale.dim() == 0:
        return scale
    height, (num_rows, num_columns) = group[0], shape
    first = (rows.start or 0) // height
    scale = scale[first : first + -(-num_rows // height)]
    if scale.dim() == 1:
        return scale.unsqueeze(1)
    return scale.repeat_interleave(height, 0)[:num_rows].repeat_interleave(group[1], 1)[:, :num_columns]
