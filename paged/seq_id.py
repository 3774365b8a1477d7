"""What names a sequence, and what says which sequences may share K/V."""

from __future__ import annotations

from collections.abc import Hashable
from numbers import Number
from typing import Any

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int, shown

SeqId = str | int
# Those of UUIDs, the widest in use; the digits of any integer are a denial of service to whoever prints it.
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
    True and 1.0 for 1; the same for what stands in tuples. Integers of any library become ints.

    Raises:
        InvalidInputError: it is none.
    """
    if value is None or type(value) is str:
        return value
    try:
        plain = _plain(value)
        hash(plain)
        repr(plain)  # what the first block's hash begins with
        return plain
    except MemoryError:
        raise
    except Exception as error:
        expected = "what can be hashed, and no bool or float"
        raise InvalidInputError(f"{name}: {shown(value)}, expected {expected}") from error


def _plain(value: Any) -> Hashable:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if isinstance(value, Number) or hasattr(value, "tolist"):
        return as_int("namespace", value, low=-(1 << _ID_BITS), high=1 << _ID_BITS)
    return value  # type: ignore[no-any-return]
