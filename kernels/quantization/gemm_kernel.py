"""The kernel that multiplies rows with quantised weights, which are decoded in registers on their way.

A program computes BLOCK_M rows by BLOCK_N columns over one split of the input: few rows with a deep input have several
splits, so that every SM has work, and their partial sums are added up by the second kernel. The loop along K, in
`kernels/common/packed/product.py`, is shared with the fused MoE; scales that span K are applied once, at its end.
`gemm.py` launches it with the tile of `config.py`.
"""

from __future__ import annotations

from paged.kernels.common.compat import tl, triton
from paged.kernels.common.dot import locate_block
from paged.kernels.common.launch import wait_for_inputs
from paged.kernels.common.packed.product import InputRows, WeightRows, quantized_product

SUM_COLUMNS = 256


@triton.jit
def finished(
    acc, x_scale_ptr, scale_ptr, stride_scale_row, tensor_scale_ptr, bias_ptr, x_rows, w_rows, GROUP_N: tl.constexpr
):
    """The sums [rows, columns] times the scales that span the input, plus the bias."""
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
    x_scale_ptr,  # [num_rows, K / 128 where X_GROUPS, else 1] float32, or None
    w_ptr,  # [N, K], or of 4-bit codes [N, K / 8] int32
    scale_ptr,  # [N / GROUP_N, K / GROUP_K]
    zero_point_ptr,  # [N / GROUP_N, K / GROUP_K] int8, or None
    tensor_scale_ptr,  # [] float32, or None
    bias_ptr,  # [N], or None
    out_ptr,  # [num_rows, N]; of a split input [NUM_SPLITS, num_rows, N] float32, contiguous
    num_rows,
    N,
    K,
    steps_per_split,
    stride_x_row,  # in units of X_UNIT elements: what it is divisible by is known for any number of rows
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
    K wait for the end.
    """
    wait_for_inputs()
    blocks_n = (N + BLOCK_N - 1) // BLOCK_N
    blocks_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    block_m, block_n = locate_block(tl.program_id(0), blocks_m, blocks_n, GROUP_M)
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the last compute the first, and are not stored.
    is_row = rows < num_rows
    x_rows = tl.where(is_row, rows, 0).to(tl.int64)
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)

    # A tile within a block of rows that share a scale has one.
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
    """BLOCK_N columns of one row."""
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
