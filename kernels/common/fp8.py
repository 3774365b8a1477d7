"""8-bit floats in kernels (Micikevicius et al., 2022): e4m3fn, 4 exponent bits of bias 7, 3 mantissa bits, no infinity;
e5m2, 5 exponent bits of bias 15, 2 mantissa bits, the upper byte of a float16.

Kernels take such tensors as bytes. Chips from sm_89 on convert them in one instruction for two values; integer
arithmetic does the same everywhere else, and in the interpreter, whose own 8-bit types cannot be trusted.
"""

from __future__ import annotations

import torch

from .compat import tl, triton
from .device import device_of

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def decode_e4m3(bits, NATIVE: tl.constexpr = False):
    """The float16 values of uint8 codes, exact. NATIVE: the chip converts, see `has_native_e4m3`.

    In SASS for sm_90 an element takes half an instruction natively, else 5. There sign, exponent and mantissa move to
    where a float16 has them, whose exponent bias is 15: the result is 2^8 too small, subnormals included. Only NaN's
    seven bits carry into the exponent's first bit when 1 is added to them, and that bit makes a NaN of it again.
    """
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # The sign's copy in the exponent's first bit is cleared.
    half = (bits.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
    half = half | ((half + 0x80) & 0x4000)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode_e5m2(bits):
    """The float16 values of uint8 codes, exact, infinities and NaN included."""
    return (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr = False):
    """The uint8 codes of float32 values, rounded to nearest, ties to even; beyond 448 it is 448, NaN stays NaN.

    In SASS for sm_90 an element takes half an instruction natively, else 13.
    """
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return _encode(x, 3, 7, 0x7E)


@triton.jit
def encode_e5m2(x, NATIVE: tl.constexpr = False):
    """As `encode_e4m3`; beyond 57344, infinity included, it is 57344, as CUDA's saturating conversion has it."""
    if NATIVE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _encode(x, 2, 15, 0x7B)


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Half a unit of the last bit kept, less one where that bit is even; 127 is float32's bias.
    halfway: tl.constexpr = (1 << (SHIFT - 1)) - 1
    normal = ((magnitude + halfway + ((magnitude >> SHIFT) & 1)) >> SHIFT).to(tl.int32) - ((127 - BIAS) << MANTISSA)
    # Below 2^(1 - BIAS) the unit is 2^(1 - BIAS - MANTISSA), which is also float32's from a power of two on: the sum's
    # last bits are the code.
    power: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    shifted = magnitude.to(tl.float32, bitcast=True) + 2.0 ** (24 - BIAS - MANTISSA)
    subnormal = shifted.to(tl.int32, bitcast=True) - power
    code = tl.where(magnitude < (128 - BIAS) << 23, subnormal, tl.minimum(normal, LARGEST))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


def as_kernel_argument(cache: torch.Tensor) -> torch.Tensor:
    """Return `cache` as kernels take it: 8-bit floats as bytes, with the same shape and strides."""
    return cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache


def has_native_e4m3(device: torch.device) -> bool:
    """Return whether the chip converts 8-bit floats by itself: NVIDIA's from sm_89 on."""
    arch = device_of(device).arch
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 89
