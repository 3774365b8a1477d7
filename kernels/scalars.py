"""Numbers and flags as callers give them (Python's, NumPy's, tensors without dimensions), as what a kernel takes."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from paged.kernels.errors import InvalidInputError

# Beyond these a number is infinite in float32, or has fewer bits than others.
_FLOAT32_MAX, _FLOAT32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_BOOLS, _COMPLEX = ("bool", "torch.bool"), ("complex", "torch.complex")


def as_int(name: str, value: Any, low: int | None = 0, high: int | None = None) -> int:
    """`value` as an int from low to high, None for no bound; a tensor on a device is waited for.

    Raises:
        InvalidInputError: it is no whole number (bools and floats are none), or out of range.
    """
    if type(value) is not int:
        if isinstance(value, torch.SymInt):  # of a graph that is being compiled: its bounds are those of its run
            return value  # type: ignore[return-value]
        try:
            is_number = not isinstance(value, bool) and _dtype(value) not in _BOOLS and _has_no_dimension(value)
            value, given = operator.index(value) if is_number else None, value
        except Exception:
            value, given = None, value
        if value is None:
            raise InvalidInputError(f"{name}: {shown(given)}, expected an integer")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidInputError(f"{name}: {shown(value)}, expected {_range(low, high)}")
    return int(value)


def as_float(name: str, value: Any, low: float = -_FLOAT32_MAX, high: float = _FLOAT32_MAX) -> float:
    """`value` as a float from low to high, where float32 holds it: within 3.4e38, and 0 where it is below 1.2e-38.

    Raises:
        InvalidInputError: it is no number (bools, complex numbers, NaN and strings are none), or out of range.
    """
    if type(value) is float:
        number = value
    else:
        try:
            dtype = _dtype(value)
            is_number = not isinstance(value, bool | str | bytes | bytearray) and _has_no_dimension(value)
            is_number = is_number and dtype not in _BOOLS and not dtype.startswith(_COMPLEX)
            number = float(value) if is_number else math.nan
        except Exception:
            number = math.nan
    if not low <= number <= high:
        raise InvalidInputError(f"{name}: {shown(value)}, expected {_range(low, high)}")
    return number if abs(number) >= _FLOAT32_TINY else 0.0


def as_bool(name: str, value: Any) -> bool:
    """`value` as a bool: Python's, NumPy's, or that of a tensor without dimensions.

    Raises:
        InvalidInputError: it is none of them.
    """
    if value is True or value is False:
        return bool(value)
    try:
        if _dtype(value) in _BOOLS and _has_no_dimension(value):
            return bool(value)
    except Exception:  # an object may refuse to be looked at in any way
        pass
    raise InvalidInputError(f"{name}: {shown(value)}, expected True or False")


def shown(value: Any) -> str:
    """A short text for a value of any kind, also one that has none."""
    try:
        text = repr(value)
    except Exception:  # its own, or an int of more digits than Python prints
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", ""))


def _has_no_dimension(value: Any) -> bool:
    return bool(getattr(value, "ndim", 0) == 0)


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"{high} at most"
    if high is None:
        return f"{low} or more"
    if high == _FLOAT32_MAX:
        return "a finite number of float32" if low == -high else f"a finite number of float32, {low} or more"
    return f"{low} to {high}"
