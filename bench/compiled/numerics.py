"""Arithmetic of PTX that NumPy has no function for: roundings, conversions and operations on bits.

Arrays hold one number a thread. Names of functions follow the instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_ROUND: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOAT8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FLOAT8_NAN = 127


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float32. The product is exact; the sum is rounded to float64 and then to float32."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(a: Array) -> Array:
    bits = torch.from_numpy(np.ascontiguousarray(a)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    bits[np.isnan(a)] = 0x7FFF
    return bits


def unpack_bf16(pair: Array) -> tuple[Array, Array]:
    return (pair << np.uint32(16)).view(np.float32), (pair & np.uint32(0xFFFF0000)).view(np.float32)


def pack_bf16(low: Array, high: Array) -> Array:
    return to_bf16(low).astype(np.uint32) | to_bf16(high).astype(np.uint32) << np.uint32(16)


def unpack_f16(pair: Array) -> tuple[Array, Array]:
    halves = np.ascontiguousarray(pair).view(np.float16).astype(np.float32)
    return halves[0::2], halves[1::2]


def pack_f16(low: Array, high: Array) -> Array:
    return join(4, low.astype(np.float16).view(np.uint16), high.astype(np.float16).view(np.uint16))


def unpack_f32(pair: Array) -> tuple[Array, Array]:
    halves = np.ascontiguousarray(pair).view(np.float32)
    return halves[0::2], halves[1::2]


def pack_f32(low: Array, high: Array) -> Array:
    return join(8, np.asarray(low, np.float32).view(np.uint32), np.asarray(high, np.float32).view(np.uint32))


def to_f16_toward_zero(a: Array) -> Array:
    nearest = a.astype(np.float16)
    is_beyond = np.abs(nearest.astype(np.float32)) > np.abs(a)
    return np.where(is_beyond, (nearest.view(np.uint16) - np.uint16(1)).view(np.float16), nearest)


def to_tf32(a: Array) -> Array:
    bits = a.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(a), np.uint32(0x7FFFFFFF), rounded)


def _float8_values(dtype: torch.dtype) -> Array:
    """Return the value of each of 256 codes."""
    values: Array = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    return values


FLOAT8 = {kind: _float8_values(dtype) for kind, dtype in _FLOAT8_DTYPES.items()}


def to_float8(a: Array, kind: str) -> Array:
    """Return the nearest codes, ties to even; numbers beyond the largest finite one become that one."""
    dtype = _FLOAT8_DTYPES[kind]
    largest = torch.finfo(dtype).max
    codes = torch.from_numpy(np.clip(a, -largest, largest)).to(dtype).view(torch.uint8).numpy()
    codes[np.isnan(a)] = _FLOAT8_NAN
    return codes


def pack_float8(low: Array, high: Array, kind: str) -> Array:
    return join(2, to_float8(low, kind), to_float8(high, kind))


def unpack_float8(pair: Array, kind: str) -> tuple[Array, Array]:
    return FLOAT8[kind][pair & np.uint16(255)], FLOAT8[kind][pair >> np.uint16(8)]


def to_integer(a: Array, rounding: str, code: str) -> Array:
    """Return whole numbers of a type such as "i4", with the nearest limit for numbers beyond, and 0 for NaN."""
    dtype = np.dtype(code)
    limits = np.iinfo(dtype)
    rounded = _ROUND[rounding](a.astype(np.float64))
    is_above = rounded >= float(limits.max)
    inside = np.where(np.isnan(rounded) | is_above, 0.0, np.maximum(rounded, float(limits.min)))
    return np.where(is_above, dtype.type(limits.max), inside.astype(dtype))


def div(a: Array, b: Array) -> Array:
    """Return a / b rounded toward zero. A division by 0 gives all ones, as GPUs do."""
    is_zero = b == 0
    divisor = np.where(is_zero, b.dtype.type(1), b)
    quotient = a // divisor
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * divisor != a)).astype(a.dtype)
    ones = np.array(-1, np.int64).astype(a.dtype)
    return np.where(is_zero, ones, quotient)


def rem(a: Array, b: Array) -> Array:
    divisor = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, a, a - div(a, divisor) * divisor)


def mul_hi(a: Array, b: Array) -> Array:
    """Return the upper half of a product."""
    size = a.dtype.itemsize
    if size < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * size}")
        return np.asarray(a.astype(wide) * b.astype(wide) >> wide.type(8 * size)).astype(a.dtype)
    products = a.astype(object) * b.astype(object)
    return np.array([int(product) >> 64 for product in products], a.dtype)


def funnel_shift(low: Array, high: Array, amount: Array, direction: str) -> Array:
    """Return 32 bits of the pair of words, shifted to the left or right by the amount modulo 32."""
    limited = (amount & np.uint32(31)).astype(np.uint64)
    pair = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    if direction == "l":
        return (pair << limited >> np.uint64(32)).astype(np.uint32)
    return (pair >> limited).astype(np.uint32)


def bfe(a: Array, start: Array, length: Array) -> Array:
    """Return a field of bits, extended by its sign if `a` is signed."""
    size = 8 * a.dtype.itemsize
    first = np.minimum(start, 255).astype(np.int64)
    count = np.minimum(length, 255).astype(np.int64)
    bits = a.view(f"u{a.dtype.itemsize}").astype(np.uint64)
    field = np.where(first >= size, np.uint64(0), bits >> np.minimum(first, 63).astype(np.uint64))
    ones = ~np.uint64(0)
    mask = np.where(count >= 64, ones, (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1))
    field = field & mask
    if a.dtype.kind == "i":
        sign_place = np.clip(first + count - 1, 0, size - 1)
        sign = (bits >> sign_place.astype(np.uint64)) & np.uint64(1)
        num_inside = np.clip(size - first, 0, np.minimum(count, 63)).astype(np.uint64)
        outside = ~((np.uint64(1) << num_inside) - np.uint64(1))
        field = np.where((sign == 1) & (count > 0), field | outside, field)
    return field.astype(f"u{a.dtype.itemsize}").view(a.dtype)


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Return a word of four bytes that a selector chooses out of eight."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    word = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for position in range(4):
        choice = (selector >> np.uint32(4 * position)) & np.uint32(15)
        shift = np.uint64(8) * (choice & np.uint32(7)).astype(np.uint64)
        byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        word |= np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * position)
    return word


def join(size: int, *parts: Array) -> Array:
    """Return numbers of `size` bytes made of parts, the lowest first."""
    return np.stack(parts, axis=1).reshape(-1).view(f"u{size}")
