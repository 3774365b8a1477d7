"""The kernel that multiplies rows with quantised weights."""

from __future__ import annotations

from paged.kernels.common.compat import tl, triton
from paged.kernels.common.dot import dot
from paged.kernels.quantization.decode import as_zero, decode_bytes, decode_run, load_zero, run_scale
from paged.kernels.quantization.partials import finished


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

    FORMAT: "e4m3", "int8", "int4" or "e2m1". SCALE: how scales come, "e8m0", "e4m3" or "" for numbers. GROUP_N,
    GROUP_K: rows and columns of w that share one, 0 for all. Scales that span K wait for the end; those of whole steps
    multiply a step's product of codes in float32; those of shorter groups the codes, in the dtype of x.
    """
    blocks_n = (N + BLOCK_N - 1) // BLOCK_N
    blocks_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    first_m = program // (GROUP_M * blocks_n) * GROUP_M
    in_group = program % (GROUP_M * blocks_n)
    group_size = min(blocks_m - first_m, GROUP_M)
    rows = (first_m + in_group % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = in_group // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the last compute the first, and are not stored. Of few rows an absent one is not read, as
    # the weights take all the bandwidth.
    FEW_ROWS: tl.constexpr = BLOCK_M <= 32
    is_row = rows < num_rows
    x_rows = tl.where(is_row, rows, 0).to(tl.int64)
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)

    PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "e2m1"
    BY_STEP: tl.constexpr = GROUP_K > 0 and GROUP_K % BLOCK_K == 0
    BY_RUN: tl.constexpr = GROUP_K > 0 and not BY_STEP
    NUM_RUNS: tl.constexpr = 4 if PACKED else 1
    RUN: tl.constexpr = BLOCK_K // NUM_RUNS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Sums of Hopper's 8-bit products keep about 14 bits (DeepSeek-V3, 2024): a step's are added by themselves.
    IN_PARTS: tl.constexpr = BY_STEP or X_GROUPS or dtype == tl.float8e4nv
    acc_type: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32

    w_nothing: tl.constexpr = 0.0 if w_ptr.dtype.element_ty == tl.float8e4nv else 0
    nothing: tl.constexpr = 0 if dtype == tl.int8 else 0.0
    offs_k = tl.arange(0, RUN)
    x_ptrs = x_ptr + (x_rows * stride_x_row * X_UNIT)[:, None] + offs_k[None, :]
    VALUES: tl.constexpr = 8 if PACKED else 1
    offs_w = tl.arange(0, BLOCK_K // VALUES)
    w_ptrs = w_ptr + w_rows[:, None] * stride_w_row + offs_w[None, :]
    num_groups = (K + GROUP_K - 1) // GROUP_K if GROUP_K > 0 else 1
    num_x_groups = (K + X_GROUPS - 1) // X_GROUPS if X_GROUPS > 0 else 1
    # A tile within a block of rows that share a scale has one: 128 rows of them would take as many registers.
    IS_ONE: tl.constexpr = GROUP_N == 0 or (GROUP_N > 1 and GROUP_N % BLOCK_N == 0)
    scale_rows = (in_group // group_size * BLOCK_N if IS_ONE else w_rows) // max(GROUP_N, 1)
    scale_ptrs = scale_ptr + scale_rows.to(tl.int64) * stride_scale_row
    zero_ptrs = None if zero_point_ptr is None else zero_point_ptr + scale_rows.to(tl.int64) * stride_zero_row

    first_step = tl.program_id(1) * steps_per_split
    end_step = tl.minimum(first_step + steps_per_split, (K + BLOCK_K - 1) // BLOCK_K)
    # Scales and zero points are asked for a step ahead: nothing else hides the way to memory.
    zero = load_zero(None if GROUP_K > 0 else zero_ptrs, FORMAT, dtype)
    if GROUP_K > 0:
        next_scales = _step_scales(scale_ptrs, stride_scale_group, first_step, num_groups, GROUP_K, BLOCK_K, NUM_RUNS)
        if zero_ptrs is not None:
            next_zeros = _step_scales(zero_ptrs, stride_zero_group, first_step, num_groups, GROUP_K, BLOCK_K, NUM_RUNS)
    if X_GROUPS > 0:
        x_scale_ptrs = x_scale_ptr + x_rows * num_x_groups
        next_x_scale = tl.load(x_scale_ptrs + first_step * BLOCK_K // X_GROUPS)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), acc_type)
    for step in range(first_step, end_step):
        start = step * BLOCK_K
        if GROUP_K > 0:
            scales = next_scales
            next_scales = _step_scales(scale_ptrs, stride_scale_group, step + 1, num_groups, GROUP_K, BLOCK_K, NUM_RUNS)
            if zero_ptrs is not None:
                zeros = next_zeros
                next_zeros = _step_scales(
                    zero_ptrs, stride_zero_group, step + 1, num_groups, GROUP_K, BLOCK_K, NUM_RUNS
                )
        if X_GROUPS > 0:
            x_scale = next_x_scale
            next_x_scale = tl.load(x_scale_ptrs + tl.minimum((start + BLOCK_K) // X_GROUPS, num_x_groups - 1))
        if EVEN_K or PACKED:
            values = tl.load(w_ptrs + step * (BLOCK_K // VALUES))
        else:
            values = tl.load(w_ptrs + start, mask=offs_w[None, :] < K - start, other=w_nothing)
        part = tl.zeros_like(acc) if IN_PARTS else acc
        for run in tl.static_range(NUM_RUNS):
            first = start + run * RUN
            in_row = offs_k[None, :] < K - first
            if EVEN_K:
                x = (
                    tl.load(x_ptrs + first, mask=is_row[:, None], other=nothing)
                    if FEW_ROWS
                    else tl.load(x_ptrs + first)
                )
            else:
                x = tl.load(x_ptrs + first, mask=(is_row[:, None] & in_row) if FEW_ROWS else in_row, other=nothing)
            if GROUP_K > 0 and zero_ptrs is not None:
                run_zero = as_zero(zeros[run if BY_RUN else 0], FORMAT, dtype)
            else:
                run_zero = zero
            if PACKED:
                w = decode_run(values, run_zero, run, FORMAT, dtype)
            elif values.dtype == dtype:
                w = values
            else:
                w = decode_bytes(values, run_zero, FORMAT, dtype)
            if BY_RUN:
                w *= run_scale(scales[run], SCALE, RUN, dtype)
            part = _multiply(w, x, part, SWAP_AB)
        if X_GROUPS > 0:
            part *= x_scale[None, :] if SWAP_AB else x_scale[:, None]
        if BY_STEP:
            scale = scales[0].to(tl.float32)
            part *= scale if IS_ONE else scale[:, None] if SWAP_AB else scale[None, :]
        acc = acc + part if IN_PARTS else part
    if SWAP_AB:
        acc = acc.T
    acc = acc.to(tl.float32)
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


@triton.jit
def _step_scales(
    ptrs, stride_group, step, num_groups, GROUP_K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_RUNS: tl.constexpr
):
    """The scales, or zero points, of a step's four runs of columns (or of all of it, four times)."""
    RUN: tl.constexpr = BLOCK_K // NUM_RUNS
    first = step * BLOCK_K
    if GROUP_K >= RUN:
        last = num_groups - 1
        a = tl.load(ptrs + tl.minimum(first // GROUP_K, last) * stride_group)
        b, c, d = a, a, a
        if GROUP_K % BLOCK_K != 0:
            b = tl.load(ptrs + tl.minimum((first + RUN) // GROUP_K, last) * stride_group)
            c = tl.load(ptrs + tl.minimum((first + 2 * RUN) // GROUP_K, last) * stride_group)
            d = tl.load(ptrs + tl.minimum((first + 3 * RUN) // GROUP_K, last) * stride_group)
    else:
        groups = first // GROUP_K + tl.arange(0, RUN // GROUP_K)[None, :]
        per_run: tl.constexpr = RUN // GROUP_K
        last = num_groups - 1
        a = tl.load(ptrs[:, None] + tl.minimum(groups, last) * stride_group)
        b = tl.load(ptrs[:, None] + tl.minimum(groups + per_run, last) * stride_group)
        c = tl.load(ptrs[:, None] + tl.minimum(groups + 2 * per_run, last) * stride_group)
        d = tl.load(ptrs[:, None] + tl.minimum(groups + 3 * per_run, last) * stride_group)
    return a, b, c, d


@triton.jit
def _multiply(w, x, acc, SWAP_AB: tl.constexpr):
    """acc + x @ w^T, or its transpose."""
    a, b = (w, x.T) if SWAP_AB else (x, w.T)
    # `dot` adds up float32, which holds no sums of int8 of more than 1,024 columns.
    return tl.dot(a, b, acc, out_dtype=tl.int32) if w.dtype == tl.int8 else dot(a, b, acc)
