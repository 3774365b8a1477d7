"""Token ids as Python integers, from any integer type. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping, Set, Sized
from itertools import islice
from typing import Any

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_index, shown

# Longer than any model's context; as Python integers already 0.6 GB.
MAX_TOKEN_IDS = 1 << 24
# Iterables that yield integers or nothing, but are not sequences of token ids.
_NOT_TOKEN_IDS = (str, bytes, bytearray, memoryview, Mapping, Set)


def as_token_ids(name: str, value: object, *, max_length: int = MAX_TOKEN_IDS, may_be_set: bool = False) -> list[int]:
    """Return token ids as a list of ints; a list of ints is returned itself, so change only a copy.

    Args:
        value: any iterable of integers in order: list, tuple, range, generator, array or tensor with one axis, or a
            mixture of integer types. An iterator is used up.
        may_be_set: whether the order means nothing, so that a set is taken, too.

    Raises:
        InvalidInputError: it is something else, nested, contains anything but integers (also bools), or has more than
            `max_length` items. An iterable is not read beyond that.
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
    if len(ids) == 1 and type(ids[0]) is int:  # a decode step; takes half the time of the set
        return ids
    if list(map(type, ids)).count(int) == len(ids):  # takes half the time of a set of them
        return ids
    integers = []
    for position, token in enumerate(ids):
        index = as_index(token)
        if index is None:
            raise InvalidInputError(f"{name}: {shown(token)} at {position}, expected an integer")
        integers.append(index)
    return integers


def _listed(value: Any, max_length: int) -> list[Any] | None:
    """Return the items of `value`; None, or one item too many if it is too long."""
    if isinstance(value, _NOT_TOKEN_IDS):
        raise TypeError
    if getattr(value, "ndim", 1) != 1:
        raise TypeError
    if isinstance(value, Sized) and len(value) > max_length:
        return None
    if hasattr(value, "tolist"):
        return list(value.tolist())
    return list(islice(value, max_length + 1))
