"""Validation of sequence ids and of namespaces, in which sequences share K/V."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from paged.errors import InvalidInputError
from paged.kernels.core.errors import as_int, shown

SeqId = str | int
# Bits of an integer id: enough for a UUID, the widest id in use. Printing a much larger integer could take very long.
_ID_BITS = 128


def as_seq_id(name: str, value: object) -> SeqId:
    """Return `value` as a sequence id: a str, or an int of 128 bits. 1 and "1" are different ids.

    Bools and floats are refused, because a dictionary treats True and 1.0 as 1. `name` is the argument's name in the
    error message.

    Raises:
        InvalidInputError: `value` is anything else.
    """
    if isinstance(value, str):
        return str(value)
    try:
        return as_int(name, value, low=-(1 << _ID_BITS), high=1 << _ID_BITS)
    except InvalidInputError:
        expected = f"a str or an int of {_ID_BITS} bits"
        raise InvalidInputError(f"{name}: {shown(value)}, expected {expected}") from None


def as_namespace(name: str, value: object) -> Hashable:
    """Return `value` as a namespace: None, a str, bytes, an int of 128 bits, or a tuple or frozenset of these.

    Integers of any library become ints. Bools and floats are refused, as in `as_seq_id`.

    Raises:
        InvalidInputError: `value` is anything else.
    """
    try:
        return _plain(value)
    except MemoryError:
        raise
    except Exception as error:
        expected = "None, a str, bytes, an int, or a tuple or frozenset of these"
        raise InvalidInputError(f"{name}: {shown(value)}, expected {expected}") from error


def _plain(value: Any) -> Hashable:
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, frozenset):
        return frozenset(map(_plain, value))
    return as_int("namespace", value, low=-(1 << _ID_BITS), high=1 << _ID_BITS)
