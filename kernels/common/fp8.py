"""8-bit floats in kernels: e4m3fn, 4 exponent bits of bias 7, 3 mantissa bits, no infinity (Micikevicius et al., 2022).

Kernels take such tensors as bytes. Chips from sm_89 on convert them in one instruction for two values; integer
arithmetic does the same everywhere else, and in the interpreter, whose own 8-bit types cannot be trusted.
"""

from __future__ import annotations

import torch

from paged.kernels.common.compat import tl, triton
from paged.kernels.common.device import device_of


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
def encode_e4m3(x, NATIVE: tl.constexpr = False):
    """The uint8 codes of float32 values, rounded to nearest, ties to even; beyond 448 it is 448, NaN stays NaN.

    In SASS for sm_90 an element takes half an instruction natively, else 13.
    """
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Half a unit of the last bit kept, less one where that bit is even; 120 is the difference of the exponent biases.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    # Below 2^-6 the unit is 2^-9, which is also float32's from 2^14 on: the sum's last bits are the code.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


@triton.jit
def scaled_cast(x, inverse_scale, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """x times inverse_scale, where there is one, in the cache's DTYPE; uint8 stands for e4m3.

    The reciprocal is taken once a head, so that an element costs one product.
    """
    if inverse_scale is not None:
        x = x.to(tl.float32) * inverse_scale
    if DTYPE.is_uint8():
        return encode_e4m3(x.to(tl.float32), NATIVE_FP8)
    return x.to(DTYPE)


def as_kernel_argument(cache: torch.Tensor) -> torch.Tensor:
    """`cache`, or where it holds e4m3 its bytes, in the same shape and strides: what kernels take."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def has_native_e4m3(device: torch.device) -> bool:
    """Whether the chip converts e4m3 by itself: NVIDIA's from sm_89 on."""
    arch = device_of(device).arch
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 89
