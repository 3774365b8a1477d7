"""The product of rows with quantised weights, which are decoded in registers.

A program computes BLOCK_M rows by BLOCK_N columns over one split of the input. Few rows with a deep input have several
splits, so that every SM has work; the second kernel adds up the partial sums. The loop along K, in `product.py`, is
shared with the fused MoE. Scales that span K are applied once, after it. Tiles come from `config.py`.
"""

from __future__ import annotations

import torch

from ..core.compat import locate_block, tl, triton
from ..core.device import device_of
from ..core.dtypes import as_kernel_argument
from ..core.launch import launch, wait_for_inputs
from .config import GROUP_M, LinearShape, LinearTile, linear_tile
from .packing import E8M0, FP8_BLOCK
from .product import InputRows, WeightRows, quantized_product
from .weight import QuantizedWeight

SUM_COLUMNS = 256


@triton.jit
def finished(
    acc, x_scale_ptr, scale_ptr, stride_scale_row, tensor_scale_ptr, bias_ptr, x_rows, w_rows, GROUP_N: tl.constexpr
):
    """Return the sums [rows, columns] times the scales that span the input, plus the bias."""
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + x_rows)[:, None]
    if scale_ptr is not None:
        if GROUP_N > 0:
            acc *= tl.load(scale_ptr + w_rows * stride_scale_row).to(tl.float32)[None, :]
        else:
            acc *= tl.load(scale_ptr).to(tl.float32)
    if tensor_scale_ptr is not None:
        acc *= tl.load(tensor_scale_ptr)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows", "stride_x_row", "stride_out_row"])
def _quantized_linear_kernel(
    x_ptr,  # [num_rows, K]
    x_scale_ptr,  # [num_rows, K / 128 if X_GROUPS, else 1] float32, or None
    w_ptr,  # [N, K], or 4-bit codes: [N, K / 8] int32
    scale_ptr,  # [N / GROUP_N, K / GROUP_K]
    zero_point_ptr,  # [N / GROUP_N, K / GROUP_K] int8, or None
    tensor_scale_ptr,  # [] float32, or None
    bias_ptr,  # [N], or None
    out_ptr,  # [num_rows, N]; with a split input [NUM_SPLITS, num_rows, N] float32, contiguous
    num_rows,
    N,
    K,
    steps_per_split,
    stride_x_row,  # in units of X_UNIT elements, so that its divisibility is known for any number of rows
    stride_w_row,
    stride_scale_row,
    stride_scale_group,
    stride_zero_row,
    stride_zero_group,
    stride_out_row,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    X_GROUPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    X_UNIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
):
    """x @ w^T over one split of the input: BLOCK_M rows by BLOCK_N columns.

    FORMAT, SCALE, GROUP_K: see `quantized_product`. GROUP_N: rows of w that share a scale, 0 for all. Scales that span
    K are applied at the end.
    """
    wait_for_inputs()
    blocks_n = (N + BLOCK_N - 1) // BLOCK_N
    blocks_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    block_m, block_n = locate_block(tl.program_id(0), blocks_m, blocks_n, GROUP_M)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the last compute the first one, and are not stored.
    is_row = rows < num_rows
    x_rows = tl.where(is_row, rows, 0).to(tl.int64)
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)

    # If one scale covers all rows of a tile, load it once.
    IS_ONE: tl.constexpr = GROUP_N == 0 or (GROUP_N > 1 and GROUP_N % BLOCK_N == 0)
    scale_rows = (block_n * BLOCK_N if IS_ONE else w_rows) // max(GROUP_N, 1)
    num_x_groups = (K + X_GROUPS - 1) // X_GROUPS if X_GROUPS > 0 else 1
    first_step = tl.program_id(1) * steps_per_split
    inputs = InputRows(
        ptrs=x_ptr + x_rows * stride_x_row * X_UNIT,
        is_row=is_row,
        scale_ptrs=None if X_GROUPS == 0 else x_scale_ptr + x_rows * num_x_groups,
    )
    weights = WeightRows(
        ptrs=w_ptr + w_rows * stride_w_row,
        scale_ptrs=scale_ptr + scale_rows.to(tl.int64) * stride_scale_row,
        zero_ptrs=None if zero_point_ptr is None else zero_point_ptr + scale_rows.to(tl.int64) * stride_zero_row,
        stride_scale_group=stride_scale_group,
        stride_zero_group=stride_zero_group,
    )
    end_step = tl.minimum(first_step + steps_per_split, (K + BLOCK_K - 1) // BLOCK_K)
    acc = quantized_product(
        inputs, weights, K, first_step, end_step, FORMAT, SCALE, GROUP_K, X_GROUPS, EVEN_K, BLOCK_K, SWAP_AB
    )
    is_out = is_row[:, None] & (columns < N)[None, :]
    if NUM_SPLITS == 1:
        acc = finished(
            acc, None if X_GROUPS > 0 else x_scale_ptr, None if GROUP_K > 0 else scale_ptr, stride_scale_row,
            tensor_scale_ptr, bias_ptr, x_rows, w_rows, GROUP_N,
        )  # fmt: skip
        out_ptrs = out_ptr + x_rows[:, None] * stride_out_row + columns[None, :]
    else:
        out_ptrs = out_ptr + (tl.program_id(1).to(tl.int64) * num_rows + x_rows)[:, None] * N + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["num_rows", "stride_out_row"])
def _sum_partials_kernel(
    partials_ptr,  # [NUM_SPLITS, num_rows, N] float32
    x_scale_ptr,  # [num_rows] float32, or None
    scale_ptr,  # [N / GROUP_N], or None
    tensor_scale_ptr,  # [] float32, or None
    bias_ptr,  # [N], or None
    out_ptr,  # [num_rows, N]
    num_rows,
    N,
    stride_scale_row,
    stride_out_row,
    GROUP_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the partial sums of BLOCK_N columns of one row."""
    wait_for_inputs()
    row = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = (columns < N)[None, :]
    acc = tl.zeros((1, BLOCK_N), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        partial = (row + num_rows.to(tl.int64) * split)[:, None] * N + columns[None, :]
        acc += tl.load(partials_ptr + partial, mask=is_column, other=0.0)
    w_rows = tl.where(columns < N, columns, 0)
    acc = finished(
        acc, x_scale_ptr, scale_ptr, stride_scale_row, tensor_scale_ptr, bias_ptr, row, w_rows, GROUP_N
    )  # fmt: skip
    out_ptrs = out_ptr + row[:, None] * stride_out_row + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_column)


def row_counts(max_rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> list[int]:
    """Return the smallest number of contiguous rows of `dtype`, 1 to `max_rows`, for each tile, rising.

    The tile changes only after a multiple of 16 rows.
    """
    counts: dict[object, int] = {}
    for count in range(1, max_rows + 1, 16):
        # Try both sizes: activations have 8 bits if they are quantised and the chip multiplies 8-bit numbers.
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

    x: [num_rows, in_features] in the order of the weight's columns.
    x_scale: float32 [num_rows, groups of 128 or 1] of quantised activations, or None.
    """
    num_rows, depth = x.shape
    columns = weight.out_features
    group_n, group_k = weight.group
    x_unit = 1
    if x.stride(0) * x.element_size() % 16 == 0:
        x_unit = 16 // x.element_size()
    tile = _tile(num_rows, x.element_size(), x_unit > 1, weight)
    steps = triton.cdiv(depth, tile.block_k)
    steps_per_split = triton.cdiv(steps, tile.num_splits)
    num_splits = triton.cdiv(steps, steps_per_split)
    values, scale = weight.values, weight.scale
    if values.dtype == torch.float8_e4m3fn and x.dtype != values.dtype:
        values = as_kernel_argument(values)
    scale_kind = ""
    if scale.dtype in E8M0:
        scale_kind = "e8m0"
    elif scale.dtype == torch.float8_e4m3fn:
        scale_kind = "e4m3"
    strides = (*scale.stride(), 0, 0)[:2]
    zero_strides: tuple[int, ...] = (0, 0)
    if weight.zero_point is not None:
        zero_strides = (*weight.zero_point.stride(), 0, 0)[:2]
    if scale_kind:
        scale = scale.view(torch.uint8)
    x_groups = 0
    if x_scale is not None and x_scale.shape[1] > 1:
        x_groups = FP8_BLOCK
    at_the_end = {
        "scale_ptr": scale,
        "tensor_scale_ptr": weight.tensor_scale,
        "bias_ptr": bias,
        "x_scale_ptr": x_scale,
        "num_rows": num_rows,
        "N": columns,
        "stride_scale_row": strides[0],
        "GROUP_N": group_n,
        "NUM_SPLITS": num_splits,
    }
    partials = out
    if num_splits > 1:
        partials = out.new_empty((num_splits, num_rows, columns), dtype=torch.float32)
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
        X_GROUPS=x_groups,
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
