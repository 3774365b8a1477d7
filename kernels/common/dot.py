"""The one matrix product that all kernels use."""

from __future__ import annotations

from paged.kernels.common.compat import interpreting, tl, triton

_INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in float32; float32 operands are multiplied as such, never as tf32.

    Triton's interpreter multiplies bfloat16 operands as raw 16-bit integers, so there they are widened first: exact, as
    every bfloat16 product fits float32's exponent and the sum is kept in float32 either way.
    """
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
