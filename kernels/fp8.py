"""8-bit floats (e4m3fn: 4 exponent bits of bias 7, 3 mantissa bits, no infinities; Micikevicius et al., 2022) in kernels.

Kernels take such tensors as bytes and convert them by integer arithmetic: Triton's own type is refused on sm_80, and
one code then runs on every target and in the interpreter.
"""

from __future__ import annotations

import torch

from paged.kernels.compat import tl, triton


@triton.jit
def decode_e4m3(bits):
    """The float16 values, exact, of uint8 codes.

    Sign, exponent and mantissa move to their places in a float16, whose exponent bias is 15: the result is 2^8 too
    small, subnormals included. The one code that 1 carries beyond its 7 bits, NaN, first gets the exponent of a NaN.
    """
    wide = bits.to(tl.uint16)
    magnitude = (wide & 0x7F) << 7
    half = ((wide & 0x80) << 8) | magnitude | ((magnitude + 0x80) & 0x4000)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encode_e4m3(x):
    """The uint8 codes of float32 values, rounded to nearest, ties to even; beyond 448 it is 448, NaN stays NaN."""
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


def as_kernel_argument(cache: torch.Tensor) -> torch.Tensor:
    """`cache`, or where it holds e4m3 its bytes, in the same shape and strides: what kernels take."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
