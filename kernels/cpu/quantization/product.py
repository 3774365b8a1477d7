"""Numba kernels around a product of rounded rows: they round rows before it, and apply scales and bias after it."""

from __future__ import annotations

from functools import lru_cache

import numba
import numpy as np
import torch

from .. import kernel as nb
from ..launch import NumbaLaunch

# Round as PyTorch does. Fast math would multiply by the reciprocal of a scale, which turns other values into ties, and
# fuse products with sums, which changes bits. Pass the option always, because numba would else take the caller's.
exact = numba.njit(fastmath=False, error_model="numpy")
_INT8, _E4M3 = np.float32(127), np.float32(448)
_TINY, _INFINITE = np.float32(2.0**-126), np.uint32(0x7F800000)


@exact
def scales_of(x, start, size, input_scale, largest_code):
    """Return the number that a row is divided by, and its scale, which is not finite if the row is not."""
    largest = np.uint32(0)
    for i in range(start, start + size):
        word = np.uint32(np.float32(nb.load(x, i)).view(np.uint32) & np.uint32(0x7FFFFFFF))
        largest = word if word > largest else largest
    if input_scale:
        scale = nb.floats(input_scale)[0]
        return scale, np.float32(np.nan) if largest >= _INFINITE else scale
    scale = np.float32(np.uint32(largest).view(np.float32) / largest_code)
    scale = _TINY if scale < _TINY else scale
    return scale, scale


@exact
def _clamp(value, low, high):
    value = value if value < high else high
    return value if value > low else low


@exact
def round_row_to_int8(x, start, input_scale, codes, to, size):
    """Write a row's codes plus 128 and return its scale."""
    divisor, scale = scales_of(x, start, size, input_scale, _INT8)
    for i in range(size):
        value = _clamp(nb.load(x, start + i) / divisor, np.float32(-128), _INT8)
        # Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
        codes[to + i] = np.uint8(np.float32(value + np.float32(12582912)).view(np.uint32) + np.uint32(128))
    return scale


@exact
def _round_to_int8(x, input_scale, codes, scales, num_rows, size, stride):
    first, end = nb.share(num_rows)
    for row in range(first, end):
        scales[row] = round_row_to_int8(x, row * stride, input_scale, codes, row * size, size)


@exact
def _round_to_e4m3(x, input_scale, codes, scales, num_rows, size, stride):
    first, end = nb.share(num_rows)
    for row in range(first, end):
        start, to = row * stride, row * size
        divisor, scales[row] = scales_of(x, start, size, input_scale, _E4M3)
        for i in range(size):
            value = _clamp(nb.load(x, start + i) / divisor, -_E4M3, _E4M3)
            # Add and subtract a float 2^20 times as large. Its last bit is worth as much as the code's last bit, so the
            # sum rounds to a code. 121 is the exponent of 2^-6, the smallest normal code.
            exponent = np.uint32(np.uint32(np.float32(value).view(np.uint32) >> np.uint32(23)) & np.uint32(255))
            exponent = exponent if exponent > np.uint32(121) else np.uint32(121)
            shift = np.uint32(((exponent + np.uint32(20)) << np.uint32(23)) | np.uint32(0x400000)).view(np.float32)
            nb.store(codes, to + i, value + shift - shift)


@nb.Kernel
def _round_rows(arguments):
    _, is_bf16, is_int8, x, scale, codes, scales, num_rows, size, stride = nb.unpack(arguments, 10)
    sizes = nb.floats(scales), num_rows, size, stride
    if is_int8 and is_bf16:
        _round_to_int8(nb.bfloats(x), scale, nb.uint8s(codes), *sizes)
    elif is_int8:
        _round_to_int8(nb.floats(x), scale, nb.uint8s(codes), *sizes)
    elif is_bf16:
        _round_to_e4m3(nb.bfloats(x), scale, nb.bfloats(codes), *sizes)
    else:
        _round_to_e4m3(nb.floats(x), scale, nb.floats(codes), *sizes)


@exact
def scale_row(product, start, scale, bias, first, has_bias, out, to, size):
    """Write a part of a row's product times its scale, plus the bias from `first` on."""
    if has_bias:
        for i in range(size):
            nb.store(out, to + i, nb.load(product, start + i) * scale + nb.load(bias, first + i))
    else:
        for i in range(size):
            nb.store(out, to + i, nb.load(product, start + i) * scale)


@exact
def _scale(product, scales, bias, out, has_bias, num_rows, size):
    first, end = nb.share(num_rows)
    for row in range(first, end):
        scale_row(product, row * size, scales[row], bias, 0, has_bias, out, row * size, size)


@nb.Kernel
def _scale_rows(arguments):
    _, is_bf16, of_bf16, has_bf16_bias, product, scales, bias, out, num_rows, size = nb.unpack(arguments, 10)
    scales, sizes = nb.floats(scales), (bias != 0, num_rows, size)
    if not is_bf16:
        _scale(nb.floats(product), scales, nb.floats(bias), nb.floats(out), *sizes)
    elif of_bf16 and has_bf16_bias:
        _scale(nb.bfloats(product), scales, nb.bfloats(bias), nb.bfloats(out), *sizes)
    elif of_bf16:
        _scale(nb.bfloats(product), scales, nb.floats(bias), nb.bfloats(out), *sizes)
    elif has_bf16_bias:
        _scale(nb.floats(product), scales, nb.bfloats(bias), nb.bfloats(out), *sizes)
    else:
        _scale(nb.floats(product), scales, nb.floats(bias), nb.bfloats(out), *sizes)


def round_rows(x: torch.Tensor, form: str, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `definition.round_rows` of x [num_rows, columns] and float32 scales [num_rows].

    int8 values have 128 added and are uint8; e4m3 values have the dtype of x.
    """
    codes = torch.empty(x.shape, dtype=torch.uint8 if form == "int8" else x.dtype)
    scales = torch.empty(len(x))
    launch = _round_launch(x.dtype == torch.bfloat16, form == "int8", *x.shape, x.stride(0))
    launch({"x": x, "scale": scale, "codes": codes, "scales": scales})
    return codes, scales


def scale_rows(
    product: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return product [num_rows, columns] times a scale for each row, plus the bias [columns], rounded to `dtype`.

    product: contiguous, float32 or `dtype`.
    """
    out = torch.empty(product.shape, dtype=dtype)
    kinds = (tensor is not None and tensor.dtype == torch.bfloat16 for tensor in (out, product, bias))
    _scale_launch(*kinds, *out.shape)({"product": product, "scales": scales, "bias": bias, "out": out})
    return out


@lru_cache(maxsize=1024)
def _round_launch(is_bf16: bool, is_int8: bool, *sizes: int) -> NumbaLaunch:
    arguments: tuple[int | str, ...] = is_bf16, is_int8, "x", "scale", "codes", "scales", *sizes
    return NumbaLaunch(_round_rows.address, sizes[0] * sizes[1], arguments)


@lru_cache(maxsize=1024)
def _scale_launch(is_bf16: bool, of_bf16: bool, has_bf16_bias: bool, *sizes: int) -> NumbaLaunch:
    arguments: tuple[int | str, ...] = is_bf16, of_bf16, has_bf16_bias, "product", "scales", "bias", "out", *sizes
    return NumbaLaunch(_scale_rows.address, sizes[0] * sizes[1], arguments)
