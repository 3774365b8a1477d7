"""The product of rows with packed weights, which are decoded on their way to the matrix unit."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.compat import dot, tl, triton
from ..core.dtypes import decode_e4m3


@triton.jit
def decode_run(words, zero, RUN: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Columns 32 RUN to 32 RUN + 31 of units of 16 words (`packing`) as numbers [rows, 32], exact.

    FORMAT: "int4", from which `as_zero` is subtracted, or "e2m1".

    int4: two neighbours take a shift, a mask, an or and a subtraction. The code becomes the last bits of the number 128
    in bfloat16, or 1024 in float16. E2M1: sign and magnitude take a shift and a mask each, which move the bits to their
    places in a 16-bit number. The value is then too small by the difference of the exponents' biases, also for
    subnormals. See limits.md for instruction counts.
    """
    half: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    if FORMAT == "int4":
        both = (words >> 4 * RUN) & 0x000F000F
        both = both | (0x43004300 if half == tl.bfloat16 else 0x64006400)
    else:
        exponent: tl.constexpr = 6 if half == tl.bfloat16 else 9
        left: tl.constexpr = exponent - 4 * RUN
        size = words << left if left >= 0 else words >> -left
        size = size & (0x01C001C0 if half == tl.bfloat16 else 0x0E000E00)
        both = size | ((words << 12 - 4 * RUN) & -0x7FFF8000)
    low = both.to(tl.int16).to(half, bitcast=True)
    high = (both >> 16).to(tl.int16).to(half, bitcast=True)
    if FORMAT == "int4":
        low, high = low - zero, high - zero
    else:
        bias = tl.full((), 2.0**126 if half == tl.bfloat16 else 2.0**14, half)
        low, high = low * bias, high * bias
    return tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1]).to(dtype)


@triton.jit
def decode_bytes(values, zero, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Codes minus their zero point as numbers of `dtype`, exact.

    Codes are int8, int4 in pairs of a byte (the first in the low bits), or e4m3 if the chip does not multiply e4m3.
    """
    if FORMAT == "e4m3":
        numbers = decode_e4m3(values).to(dtype)
    elif FORMAT == "int4":
        values = values.to(tl.int8, bitcast=True)
        codes = tl.join(values & 15, (values >> 4) & 15).reshape(values.shape[0], 2 * values.shape[1])
        numbers = (codes - zero).to(dtype)
    elif zero is None:
        numbers = values.to(dtype)
    else:
        numbers = values.to(dtype) - zero
    return numbers


@triton.jit
def run_scale(scale, SCALE: tl.constexpr, RUN: tl.constexpr, dtype: tl.constexpr):
    """Scales of a run of columns, [rows] or [rows, groups], in `dtype`: [rows, 1 or RUN].

    SCALE: "e8m0" for exponents, "e4m3" for codes without signs, "" for numbers.
    """
    if SCALE == "e8m0" and dtype == tl.bfloat16:
        scale = (scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    elif SCALE == "e8m0":
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif SCALE == "e4m3" and dtype == tl.bfloat16:
        scale = (scale.to(tl.int16) << 4).to(tl.bfloat16, bitcast=True) * tl.full((), 2.0**120, tl.bfloat16)
    elif SCALE == "e4m3":
        scale = (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True) * tl.full((), 2.0**8, tl.float16)
    scale = scale.to(dtype)
    if len(scale.shape) == 1:
        scale = scale[:, None]
    else:
        rows: tl.constexpr = scale.shape[0]
        groups: tl.constexpr = scale.shape[1]
        scale = tl.broadcast_to(scale[:, :, None], (rows, groups, RUN // groups)).reshape(rows, RUN)
    return scale


@triton.jit
def as_zero(zero_point, FORMAT: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr):
    """The numbers that `decode_run` (PACKED) or `decode_bytes` subtracts for zero points [rows]: [rows, 1]."""
    half: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    if FORMAT != "int4":
        zero = zero_point.to(dtype)
    elif PACKED:
        zero = zero_point.to(half) + tl.full((), 128 if dtype == tl.bfloat16 else 1024, half)
    else:
        zero = zero_point
    return zero[:, None] if len(zero.shape) == 1 else zero


@triton.jit
def load_zero(zero_ptrs, FORMAT: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr):
    """What is subtracted from rows with at most one zero point each. Without one: 8 for int4, else None."""
    if zero_ptrs is not None:
        zero = as_zero(tl.load(zero_ptrs), FORMAT, PACKED, dtype)
    elif FORMAT == "int4":
        zero = as_zero(tl.full((1,), 8, tl.int8), FORMAT, PACKED, dtype)
    else:
        zero = None
    return zero


# Tuples of pointers and numbers that a kernel passes to its functions. Create them by field name, because Triton's
# cache does not see the names of fields.
class InputRows(NamedTuple):
    """A block of rows of x."""

    ptrs: Any  # [BLOCK_M], start of each row
    is_row: Any  # [BLOCK_M], whether each row exists
    scale_ptrs: Any  # [BLOCK_M], start of each row's scales of groups of columns, or None


class WeightRows(NamedTuple):
    """A block of rows of w, with scales and zero points."""

    ptrs: Any  # [BLOCK_N], start of each row
    scale_ptrs: Any  # [BLOCK_N], start of each row's scales; [] if all rows share one; or None
    zero_ptrs: Any  # as scale_ptrs, for int8 zero points, or None
    stride_scale_group: Any
    stride_zero_group: Any


@triton.jit
def quantized_product(
    inputs,  # InputRows, with scales of groups of X_GROUPS columns
    weights,  # WeightRows; scales and zero points are read here if GROUP_K > 0
    K,
    first_step,
    end_step,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP_K: tl.constexpr,
    X_GROUPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
):
    """x @ w^T over the steps of BLOCK_K columns from first_step on, [BLOCK_M, BLOCK_N] in float32.

    FORMAT: "e4m3", "int8", "int4" or "e2m1"; the last two are int32 words of `packing.pack_codes`. SCALE: type of
    scales, "e8m0", "e4m3" or "" for numbers. SWAP_AB: weights are the left operand.

    GROUP_K: columns of w that share a scale, 0 for all. Scales of whole steps multiply a step's product in float32.
    Scales of shorter groups multiply the codes, in the dtype of x. Scales that span K are left to the caller.
    """
    dtype: tl.constexpr = inputs.ptrs.dtype.element_ty
    w_dtype: tl.constexpr = weights.ptrs.dtype.element_ty
    PACKED: tl.constexpr = w_dtype == tl.int32
    VALUES: tl.constexpr = 8 if PACKED else 1
    BY_STEP: tl.constexpr = GROUP_K > 0 and GROUP_K % BLOCK_K == 0
    BY_RUN: tl.constexpr = GROUP_K > 0 and not BY_STEP
    NUM_RUNS: tl.constexpr = 4 if PACKED else 1
    RUN: tl.constexpr = BLOCK_K // NUM_RUNS
    # With few rows, reading the weights takes the bandwidth, so absent rows are masked. With many, rows are read
    # without a mask.
    FEW_ROWS: tl.constexpr = inputs.ptrs.shape[0] <= 32
    # Hopper's sums of 8-bit products keep about 14 bits (DeepSeek-V3, 2024), so each step is summed by itself.
    IN_PARTS: tl.constexpr = BY_STEP or X_GROUPS or dtype == tl.float8e4nv
    acc_type: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32
    M: tl.constexpr = inputs.ptrs.shape[0]
    N: tl.constexpr = weights.ptrs.shape[0]

    w_nothing: tl.constexpr = 0.0 if w_dtype == tl.float8e4nv else 0
    nothing: tl.constexpr = 0 if dtype == tl.int8 else 0.0
    offs_k = tl.arange(0, RUN)
    offs_w = tl.arange(0, BLOCK_K // VALUES)
    x_ptrs = inputs.ptrs[:, None] + offs_k[None, :]
    w_ptrs = weights.ptrs[:, None] + offs_w[None, :]
    num_groups = (K + GROUP_K - 1) // GROUP_K if GROUP_K > 0 else 1
    num_x_groups = (K + X_GROUPS - 1) // X_GROUPS if X_GROUPS > 0 else 1
    # Load scales and zero points a step ahead, because nothing else hides their latency.
    zero = load_zero(None if GROUP_K > 0 else weights.zero_ptrs, FORMAT, PACKED, dtype)
    if GROUP_K > 0:
        next_scales = _step_scales(
            weights.scale_ptrs, weights.stride_scale_group, first_step, num_groups, GROUP_K, BLOCK_K, NUM_RUNS
        )
        if weights.zero_ptrs is not None:
            next_zeros = _step_scales(
                weights.zero_ptrs, weights.stride_zero_group, first_step, num_groups, GROUP_K, BLOCK_K, NUM_RUNS
            )
    if X_GROUPS > 0:
        next_x_scale = tl.load(inputs.scale_ptrs + first_step * BLOCK_K // X_GROUPS)
    acc = tl.zeros((N, M) if SWAP_AB else (M, N), acc_type)
    for step in range(first_step, end_step):
        start = step * BLOCK_K
        if GROUP_K > 0:
            scales = next_scales
            next_scales = _step_scales(
                weights.scale_ptrs, weights.stride_scale_group, step + 1, num_groups, GROUP_K, BLOCK_K, NUM_RUNS
            )
            if weights.zero_ptrs is not None:
                zeros = next_zeros
                next_zeros = _step_scales(
                    weights.zero_ptrs, weights.stride_zero_group, step + 1, num_groups, GROUP_K, BLOCK_K, NUM_RUNS
                )
        if X_GROUPS > 0:
            x_scale = next_x_scale
            next_x_scale = tl.load(inputs.scale_ptrs + tl.minimum((start + BLOCK_K) // X_GROUPS, num_x_groups - 1))
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
                    tl.load(x_ptrs + first, mask=inputs.is_row[:, None], other=nothing)
                    if FEW_ROWS
                    else tl.load(x_ptrs + first)
                )
            else:
                x = tl.load(
                    x_ptrs + first, mask=(inputs.is_row[:, None] & in_row) if FEW_ROWS else in_row, other=nothing
                )
            if GROUP_K > 0 and weights.zero_ptrs is not None:
                run_zero = as_zero(zeros[run if BY_RUN else 0], FORMAT, PACKED, dtype)
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
            # Use one scale if all rows of the tile share it, because 128 scales would take 128 registers.
            part *= scale if len(scale.shape) == 0 else scale[:, None] if SWAP_AB else scale[None, :]
        acc = acc + part if IN_PARTS else part
    if SWAP_AB:
        acc = acc.T
    return acc.to(tl.float32)


@triton.jit
def _step_scales(
    ptrs, stride_group, step, num_groups, GROUP_K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_RUNS: tl.constexpr
):
    """The scales or zero points of a step's four runs of columns; if the step has one, it appears four times."""
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
    # `dot` accumulates in float32, which cannot hold sums of int8 products over more than 1,024 columns.
    return tl.dot(a, b, acc, out_dtype=tl.int32) if w.dtype == tl.int8 else dot(a, b, acc)
