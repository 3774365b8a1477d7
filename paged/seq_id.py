"""What names a sequence, and what says which sequences may share K/V."""

from __future__ import annotations

from collections.abc import Hashable
from numbers import Number
from typing import Any

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int, shown

SeqId = str | int
# Those of UUIDs, the widest in use; printing the digits of any larger integer is a denial of service.
_ID_BITS = 128


def as_seq_id(name: str, value: object) -> SeqId:
    """`value` as the name of a sequence, a str or an int of 128 bits: 1 and "1" are two. To a dictionary True and 1.0
    are 1, so that no bool or float is a name.

    name: of the argument, for the message.

    Raises:
        InvalidInputError: it is anything else.
    """
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return as_int(name, value, low=-(1 << _ID_BITS), high=1 << _ID_BITS)
    except InvalidInputError:
        expected = f"a str or an int of {_ID_BITS} bits"
        raise InvalidInputError(f"{name}: {shown(value)}, expected {expected}") from None


def as_namespace(name: str, value: object) -> Hashable:
    """`value` as a namespace: anything that can be hashed, but for numbers that are no integers, as a dictionary takes
    True and 1.0 for 1; the same for what stands in tuples and sets. Integers of any library become ints. What is of
    another class becomes an `OpaqueNamespace`; `given_namespace` has it again.

    Raises:
        InvalidInputError: it is none.
    """
    try:
        return _plain(value)
    except MemoryError:
        raise
    except Exception as error:
        expected = "what can be hashed, and no bool or float"
        raise InvalidInputError(f"{name}: {shown(value)}, expected {expected}") from error


class OpaqueNamespace:
    """A value of a class of the caller's: hashed and shown just once, as other tenants' calls must not fail, nor find
    something else, where it changes its mind. What cannot be compared is another one.
    """

    __slots__ = ("_hash", "_shown", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self._hash = hash(value)
        self._shown = repr(value)  # what the first block's hash begins with

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, OpaqueNamespace) or self._hash != other._hash:
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:
            return False

    def __repr__(self) -> str:
        return self._shown


def given_namespace(namespace: Hashable) -> Hashable:
    """What the caller gave for a namespace of the cache."""
    return namespace.value if isinstance(namespace, OpaqueNamespace) else namespace


def _plain(value: Any) -> Hashable:
    if value is None or isinstance(value, OpaqueNamespace):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if type(value) is bytes:
        return bytes(value)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, frozenset):
        return frozenset(map(_plain, value))
    if isinstance(value, Number) or hasattr(value, "tolist"):
        return as_int("namespace", value, low=-(1 << _ID_BITS), high=1 << _ID_BITS)
    return OpaqueNamespace(value)
