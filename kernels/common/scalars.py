"""Numbers and flags as callers give them (Python's, NumPy's, tensors without dimensions), as Python's own.

Takes neither torch nor NumPy: the cache's bookkeeping uses it too.
"""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

from paged.kernels.common.errors import InvalidInputError

# Names of classes and layers appear whole in a message.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
# Beyond these a number is infinite in float32, or has fewer bits than others.
_FLOAT32_MAX, _FLOAT32_TINY = (2 - 2.0**-23) * 2.0**127, 2.0**-126
_BOOLS, _COMPLEX = ("bool", "torch.bool"), ("complex", "torch.complex")


def as_int(name: str, value: Any, low: int | None = 0, high: int | None = None) -> int:
    """`value` as an int from low to high, None for no bound; a tensor on a device is waited for.

    Raises:
        InvalidInputError: it is no whole number (bools and floats are none), or out of range.
    """
    number = as_index(value)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise InvalidInputError(f"{name}: {shown(value)}, expected an integer{_range(low, high)}")
    return number


def as_index(value: Any) -> int | None:
    """`value` as an int, or None where it is no integer; no more is checked."""
    if type(value) is int:
        return value
    if type(value).__name__ == "SymInt":  # of a graph that is being compiled: its bounds are those of its run
        return value  # type: ignore[no-any-return]
    try:
        if isinstance(value, bool) or not _has_no_dimension(value):
            return None
        if hasattr(value, "tolist"):  # operator.index makes an int of a tensor that holds a bool
            value = value.tolist()
            return value if type(value) is int else None
        return operator.index(value)
    except MemoryError:
        raise
    except Exception:  # of a class of the caller's
        return None


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
        except Exception:  # of a class of the caller's
            number = math.nan
    if not low <= number <= high:
        is_finite = high == _FLOAT32_MAX
        span = _range(low if low > -high else None, None if is_finite else high)
        raise InvalidInputError(f"{name}: {shown(value)}, expected a {'finite ' if is_finite else ''}number{span}")
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


def shown(value: object) -> str:
    """`value` for a message: its repr, cut short, or its type where it has none (integers beyond 4,300 digits)."""
    try:
        return _SHORT.repr(value)
    except Exception:  # of a class of the caller's
        return f"an object of type {type(value).__name__}"


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", ""))


def _has_no_dimension(value: Any) -> bool:
    return bool(getattr(value, "ndim", 0) == 0)


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if low is None:
        return f" of at most {high}"
    return f" of at least {low}" if high is None else f" in {low}..{high}"
