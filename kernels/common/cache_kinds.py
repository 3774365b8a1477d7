"""Contents of a KV cache: plain values, 8-bit floats, or int8 with a scale for each row.

A kind is "" for the float dtypes, "e4m3", "e5m2" or "int8"; a row is one head of one token.
"""

from __future__ import annotations

import torch

from .compat import tl, triton
from .fp8 import encode_e4m3, encode_e5m2

KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
# Of rows without a larger magnitude less is kept, and of zeros nothing: 127 divided by theirs would be infinite.
SMALLEST = 2.0**-100
_SMALLEST = tl.constexpr(SMALLEST)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 beside it has steps of 1, rounded to even


def cache_kind(dtype: torch.dtype) -> str:
    """Return the kind of a cache of this dtype."""
    return KINDS.get(dtype, "")


@triton.jit
def round_to_int8(x):
    """float32 as int8, rounded to nearest, ties to even; beyond -128 and 127 it is those."""
    x = tl.minimum(tl.maximum(x, -128.0), 127.0)
    return ((x + _ROUNDER) - _ROUNDER).to(tl.int8)


@triton.jit
def load_inverse_scale(scale_ptrs, mask):
    """1 / scale; None where there is no scale. The correctly rounded division spills on sm_100."""
    inverse = None
    if scale_ptrs is not None:
        inverse = 1.0 / tl.load(scale_ptrs, mask=mask, other=1.0)
    return inverse


@triton.jit
def store_row_scales(scale_ptrs, largest, not_finite, mask):
    """Store the scales of int8 rows, largest / 127, and return what the rows are multiplied by.

    largest: of the row's magnitudes; not_finite: the sum of its values times 0, which makes the scale NaN where one of
    them is infinite or NaN, as int8 has no other way to say so.
    """
    tl.store(scale_ptrs, largest / 127.0 + not_finite, mask=mask)
    return 127.0 / tl.maximum(largest, _SMALLEST)


@triton.jit
def cast_to_cache(x, inverse_scale, DTYPE: tl.constexpr, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr = False):
    """x times inverse_scale, where there is one, as a cache of this dtype and kind holds it.

    The reciprocal is taken once a head, so that an element costs one product.
    """
    if inverse_scale is not None:
        x = x.to(tl.float32) * inverse_scale
    if KIND == "e4m3":
        x = encode_e4m3(x.to(tl.float32), NATIVE_FP8)
    elif KIND == "e5m2":
        x = encode_e5m2(x.to(tl.float32), NATIVE_FP8)
    elif KIND == "int8":
        x = round_to_int8(x)
    else:
        x = x.to(DTYPE)
    return x
