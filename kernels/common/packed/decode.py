"""Codes and their scales in kernels, as numbers of the type that the matrix unit takes."""

from __future__ import annotations

from paged.kernels.common.compat import tl, triton
from paged.kernels.common.fp8 import decode_e4m3


@triton.jit
def decode_run(words, zero, RUN: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Columns 32 RUN to 32 RUN + 31 of units of 16 words (`packing`) as numbers [rows, 32], exact.

    FORMAT: "int4", of which `as_zero` is subtracted, or "e2m1".

    Two neighbours of int4 take a shift, a mask, an or and a subtraction: they stand in the last bits of 128 in
    bfloat16, or 1024 in float16. Of E2M1 sign and size take a shift and a mask each: moved to their places in a 16-bit
    number, a code is a value too small by the difference of the exponents' biases, subnormals included. With their
    scales MXFP4 takes 304 instructions a KB on sm_90 and NVFP4 364, where an H100's memory leaves time for 274.
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
    """Codes less their zero point as numbers of `dtype`, exact: int8, int4 two a byte (the first in the low bits), or
    e4m3 where the chip does not multiply them."""
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
    """What `decode_run` (PACKED) or `decode_bytes` subtracts for zero points [rows]: [rows, 1]."""
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
    """What is subtracted where a row has one zero point, or none is given: 8 of int4, nothing (None) of others."""
    if zero_ptrs is not None:
        zero = as_zero(tl.load(zero_ptrs), FORMAT, PACKED, dtype)
    elif FORMAT == "int4":
        zero = as_zero(tl.full((1,), 8, tl.int8), FORMAT, PACKED, dtype)
    else:
        zero = None
    return zero
