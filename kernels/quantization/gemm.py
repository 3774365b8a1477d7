"""The product of rows with packed weights."""

from __future__ import annotations

import torch

from paged.kernels.common.compat import triton
from paged.kernels.common.device import device_of
from paged.kernels.common.fp8 import as_kernel_argument
from paged.kernels.common.launch import launch
from paged.kernels.common.packed.packing import E8M0, FP8_BLOCK
from paged.kernels.quantization.config import GROUP_M, LinearShape, LinearTile, linear_tile
from paged.kernels.quantization.gemm_kernel import SUM_COLUMNS, _quantized_linear_kernel, _sum_partials_kernel
from paged.kernels.quantization.weight import QuantizedWeight


def row_counts(max_rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> list[int]:
    """Return the least number of contiguous rows of `dtype`, 1 to `most`, for each tile, rising.

    The choice changes from a multiple of 16 to the next row.
    """
    counts: dict[object, int] = {}
    for count in range(1, max_rows + 1, 16):
        # Activations have 8 bits where they are quantised and the chip multiplies such.
        tiles = (_tile(count, size, weight.in_features * size % 16 == 0, weight) for size in {1, dtype.itemsize})
        counts.setdefault(tuple(tiles), count)
    return list(counts.values())


def _tile(num_rows: int, element_size: int, is_aligned: bool, weight: QuantizedWeight) -> LinearTile:
    depth = weight.in_features
    is_aligned = is_aligned and (weight.is_packed or depth % 16 == 0)
    group_k = weight.group[1]
    shape = LinearShape(num_rows, weight.out_features, depth, element_size, weight.is_packed, group_k, is_aligned)
    return linear_tile(shape, device_of(weight.values.device))


def quantized_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill `out` [num_rows, out_features] with x @ weight^T + bias; see the kernel.

    A second launch adds up partial sums if the input is split.

    x: [num_rows, in_features] in the order of the weight's columns; x_scale: float32 [num_rows, groups of 128 or 1] of
    quantised activations, or None.
    """
    num_rows, depth = x.shape
    columns = weight.out_features
    group_n, group_k = weight.group
    x_unit = 16 // x.element_size() if x.stride(0) * x.element_size() % 16 == 0 else 1
    tile = _tile(num_rows, x.element_size(), x_unit > 1, weight)
    steps = triton.cdiv(depth, tile.block_k)
    steps_per_split = triton.cdiv(steps, tile.num_splits)
    num_splits = triton.cdiv(steps, steps_per_split)
    values, scale = weight.values, weight.scale
    if values.dtype == torch.float8_e4m3fn and x.dtype != values.dtype:
        values = as_kernel_argument(values)
    scale_kind = "e8m0" if scale.dtype in E8M0 else "e4m3" if scale.dtype == torch.float8_e4m3fn else ""
    strides = (*scale.stride(), 0, 0)[:2]
    zero_strides = (0, 0) if weight.zero_point is None else (*weight.zero_point.stride(), 0, 0)[:2]
    at_the_end = {
        "scale_ptr": scale.view(torch.uint8) if scale_kind else scale,
        "tensor_scale_ptr": weight.tensor_scale,
        "bias_ptr": bias,
        "x_scale_ptr": x_scale,
        "num_rows": num_rows,
        "N": columns,
        "stride_scale_row": strides[0],
        "GROUP_N": group_n,
        "NUM_SPLITS": num_splits,
    }
    partials = out if num_splits == 1 else out.new_empty((num_splits, num_rows, columns), dtype=torch.float32)
    blocks = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
    launch(
        _quantized_linear_kernel,
        (blocks, num_splits),
        x_ptr=x,
        w_ptr=values,
        zero_point_ptr=weight.zero_point,
        out_ptr=partials,
        K=depth,
        steps_per_split=steps_per_split,
        stride_x_row=x.stride(0) // x_unit,
        stride_w_row=values.stride(0),
        stride_scale_group=strides[1],
        stride_zero_row=zero_strides[0],
        stride_zero_group=zero_strides[1],
        stride_out_row=out.stride(0),
        FORMAT="e2m1" if weight.format in ("mxfp4", "nvfp4") else weight.format,
        SCALE=scale_kind,
        GROUP_K=group_k,
        X_GROUPS=FP8_BLOCK if x_scale is not None and x_scale.shape[1] > 1 else 0,
        EVEN_K=depth % tile.block_k == 0,
        X_UNIT=x_unit,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=GROUP_M,
        SWAP_AB=tile.swap_ab,
        **at_the_end,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits == 1:
        return
    if group_k:
        at_the_end["scale_ptr"] = None
    if x_scale is not None and x_scale.shape[1] > 1:
        at_the_end["x_scale_ptr"] = None
    launch(
        _sum_partials_kernel,
        (triton.cdiv(columns, SUM_COLUMNS), num_rows),
        partials_ptr=partials,
        out_ptr=out,
        stride_out_row=out.stride(0),
        BLOCK_N=SUM_COLUMNS,
        **at_the_end,
        num_warps=4,
    )
