"""Conversion of token ids of any integer type to Python ints. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping, Set, Sized
from itertools import islice
from typing import Any

from paged.errors import InvalidInputError
from paged.kernels.core.errors import as_index, shown

# Limit of token ids in a list, above any model's context. More ids would take over 0.6 GB as Python ints.
MAX_TOKEN_IDS = 1 << 24
# Iterables that may yield integers but are not sequences of token ids.
_NOT_TOKEN_IDS = (str, bytes, bytearray, memoryview, Mapping, Set)


def as_token_ids(name: str, value: object, *, max_length: int = MAX_TOKEN_IDS, may_be_set: bool = False) -> list[int]:
    """Return token ids as a list of ints. A list of ints is returned without a copy, so do not change the result.

    Args:
        value: any ordered iterable of integers: list, tuple, range, generator, array or tensor with one axis, or a
            mixture of integer types. An iterator is consumed.
        may_be_set: whether a set is accepted as well, because the order does not matter.

        Raises:
            InvalidInputError: it is something else, is nested, contains anything but integers (bools are refused), or
                has more than `max_length` items. An iterable is not read further.
    """
    if may_be_set and isinstance(value, set | frozenset):
        value = list(value)
    try:
        ids = value if type(value) is list else _listed(value, max_length)
    except MemoryError:
        raise
    except Exception as error:
        expected = "a list, range, generator or array with one axis, of integers"
        raise InvalidInputError(f"{name}: {shown(value)}, expected {expected}") from error
    if ids is None or len(ids) > max_length:
        raise InvalidInputError(f"{name}: {shown(value)}, expected at most {max_length} token ids")
    if len(ids) == 1 and type(ids[0]) is int:  # the usual decode step, in half the time
        return ids
    if list(map(type, ids)).count(int) == len(ids):  # takes half the time of a set of the types
        return ids
    integers = []
    for position, token in enumerate(ids):
        index = as_index(token)
        if index is None:
            raise InvalidInputError(f"{name}: {shown(token)} at {position}, expected an integer")
        integers.append(index)
    return integers


def _listed(value: Any, max_length: int) -> list[Any] | None:
    """Return at most `max_length` + 1 items of `value`; None if its size is known and too large."""
    if isinstance(value, _NOT_TOKEN_IDS):
        raise TypeError
    if getattr(value, "ndim", 1) != 1:
        raise TypeError
    if isinstance(value, Sized) and len(value) > max_length:
        return None
    if hasattr(value, "tolist"):
        return list(value.tolist())
    return list(islice(value, max_length + 1))
