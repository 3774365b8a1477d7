"""Numbers and flags of callers (Python, NumPy, tensors without dimensions), converted to Python's own.

Imports neither torch nor NumPy, because the cache's bookkeeping uses it too.
"""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

from .errors import InvalidInputError

# Names of classes and layers appear whole in a message.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
# Beyond these a number is infinite in float32, or has fewer bits than others.
_FLOAT32_MAX, _FLOAT32_TINY = (2 - 2.0**-23) * 2.0**127, 2.0**-126


def as_int(name: str, value: Any, low: int | None = 0, high: int | None = None) -> int:
    """Return `value` as an int from low to high, None for no bound; a tensor on a device is waited for.

    Raises:
        InvalidInputError: it is no integer (bools and floats are none), or out of range.
    """
    number = as_index(value)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise InvalidInputError(f"{name}: {shown(value)}, expected an integer{_range(low, high)}")
    return number


def as_index(value: Any) -> int | None:
    """Return `value` as an int, or None if it is no integer, without other checks."""
    # SymInt: of a graph that is being compiled, with the bounds of its run.
    if type(value) is int or type(value).__name__ == "SymInt":
        return value  # type: ignore[no-any-return]
    try:
        value = _plain(value)
        if isinstance(value, bool):
            return None
        return operator.index(value)
    except MemoryError:
        raise
    except Exception:  # of a class of the caller's
        return None


def as_float(name: str, value: Any, low: float = -_FLOAT32_MAX, high: float = _FLOAT32_MAX) -> float:
    """Return `value` as a float from low to high, within float32's range: at most 3.4e38, and 0 below 1.2e-38.

    Raises:
        InvalidInputError: it is no number (bools, complex numbers, NaN and strings are none), or out of range.
    """
    if type(value) is float:
        number = value
    else:
        try:
            plain = _plain(value)
            number = math.nan
            if not isinstance(plain, bool | str | bytes | bytearray):
                number = float(plain)
        except Exception:  # of a class of the caller's
            number = math.nan
    if not low <= number <= high:
        lowest = low if low > -high else None
        if high == _FLOAT32_MAX:
            expected = f"a finite number{_range(lowest, None)}"
        else:
            expected = f"a number{_range(lowest, high)}"
        raise InvalidInputError(f"{name}: {shown(value)}, expected {expected}")
    return number if abs(number) >= _FLOAT32_TINY else 0.0


def as_bool(name: str, value: Any) -> bool:
    """Return `value` as a bool, from Python, NumPy or a tensor without dimensions.

    Raises:
        InvalidInputError: it is none of them.
    """
    try:
        flag = _plain(value)
    except Exception:  # an object may refuse to be looked at in any way
        flag = None
    if isinstance(flag, bool):
        return flag
    raise InvalidInputError(f"{name}: {shown(value)}, expected True or False")


def shown(value: object) -> str:
    """Return `value` for a message: its repr, cut short, or its type if it has none (integers beyond 4,300 digits)."""
    try:
        return _SHORT.repr(value)
    except Exception:  # of a class of the caller's
        return f"an object of type {type(value).__name__}"


def _plain(value: Any) -> Any:
    """Return the Python number of a NumPy one or of a tensor without dimensions; other values as they are."""
    dimensions = getattr(value, "ndim", None)
    if dimensions:
        raise TypeError(f"{dimensions} dimensions")
    return value if dimensions is None else value.tolist()


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if low is None:
        return f" of at most {high}"
    if high is None:
        return f" of at least {low}"
    return f" in {low}..{high}"
