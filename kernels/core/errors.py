"""Errors that operations raise, and checks of plain numbers and flags.

Numbers may come from Python, NumPy or tensors without dimensions; the checks convert them to Python's own. This file
imports neither torch nor NumPy, because the cache's bookkeeping uses it too. `paged.errors` adds more errors.
"""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PagedError(Exception):
    """Base class of every error that this library raises on purpose."""


class InvalidInputError(PagedError, ValueError):
    """An argument has the wrong shape, dtype, device or value. Nothing was changed."""


class UnsupportedError(PagedError, NotImplementedError):
    """The request is valid, but this build, model or device cannot serve it."""


@contextmanager
def arguments_named(**names: str) -> Iterator[None]:
    """Rename arguments in errors raised inside to the caller's names, as in `seq_lens="cache_seqlens"`.

    Functions use it when they pass their arguments on under other names. After the colon of a message, only words with
    an underscore are renamed, so plain words such as "key" stay.
    """
    try:
        yield
    except (InvalidInputError, UnsupportedError) as error:
        head, colon, message = str(error).partition(":")

        def renamed(word: re.Match[str]) -> str:
            return names.get(word[0], word[0])

        if colon:
            head = re.sub(r"\w+", renamed, head)
        message = re.sub(r"\w+_\w+", renamed, message)
        raise type(error)(head + colon + message) from error


# Long names of classes and layers are not cut in a message.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
# Largest and smallest normal float32 number. Smaller numbers have fewer bits.
_FLOAT32_MAX, _FLOAT32_TINY = (2 - 2.0**-23) * 2.0**127, 2.0**-126


def as_int(name: str, value: Any, low: int | None = 0, high: int | None = None) -> int:
    """Return `value` as an int from low to high, None for no bound. Wait for the device if it is a tensor there.

    Raises:
        InvalidInputError: the value is not an integer (bools and floats are not), or is out of range.
    """
    number = as_index(value)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise InvalidInputError(f"{name}: {shown(value)}, expected an integer{_range(low, high)}")
    return number


def as_index(value: Any) -> int | None:
    """Return `value` as an int, or None if it is not an integer."""
    # SymInt: a number in a graph that is being compiled; its range is known only at run time.
    if type(value) is int or type(value).__name__ == "SymInt":
        return value  # type: ignore[no-any-return]
    try:
        value = _plain(value)
        if isinstance(value, bool):
            return None
        return operator.index(value)
    except MemoryError:
        raise
    except Exception:  # raised by a class of the caller's
        return None


def as_float(name: str, value: Any, low: float = -_FLOAT32_MAX, high: float = _FLOAT32_MAX) -> float:
    """Return `value` as a float from low to high, within float32's range. A magnitude below 1.2e-38 becomes 0.

    Raises:
        InvalidInputError: the value is not a number (bools, complex numbers, NaN and strings are not), or is out of
            range.
    """
    if type(value) is float:
        number = value
    else:
        try:
            plain = _plain(value)
            number = math.nan
            if not isinstance(plain, bool | str | bytes | bytearray):
                number = float(plain)
        except Exception:  # raised by a class of the caller's
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
        InvalidInputError: the value is not a bool.
    """
    try:
        flag = _plain(value)
    except Exception:  # an object may raise anything when it is inspected
        flag = None
    if isinstance(flag, bool):
        return flag
    raise InvalidInputError(f"{name}: {shown(value)}, expected True or False")


def shown(value: object) -> str:
    """Return `value` for a message: its repr, shortened, or its type if repr fails (integers beyond 4,300 digits)."""
    try:
        return _SHORT.repr(value)
    except Exception:  # raised by a class of the caller's
        return f"an object of type {type(value).__name__}"


def _plain(value: Any) -> Any:
    """Return a NumPy number or a tensor without dimensions as a Python number; other values unchanged."""
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
