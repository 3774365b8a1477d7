"""What is left of a product once its sums are there, and the sum of its partials where the input is split."""

from __future__ import annotations

from paged.kernels.common.compat import tl, triton

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
