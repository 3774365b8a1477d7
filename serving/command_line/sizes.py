"""Sizes in bytes on the command line, such as 8GiB."""

from __future__ import annotations

import re

from paged.errors import InvalidInputError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def as_bytes(name: str, text: str) -> int:
    """Convert a size such as 8GiB to bytes.

    Raises:
        InvalidInputError: the text is not a number with a unit.
    """
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    try:
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    except (ValueError, KeyError, OverflowError):
        pass
    raise InvalidInputError(f"{name} {text}: expected a size such as 141GB or 80GiB")
