"""Paths of folders, checked at the door."""

from __future__ import annotations

import os
from pathlib import Path

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import shown


def as_folder(name: str, value: object) -> Path:
    """Return `value` as a path.

    Raises:
        InvalidInputError: it is not a path, or no system could open it.
    """
    try:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
    except Exception:  # from a class of the caller
        path = None
    if not isinstance(path, str) or "\0" in path:
        raise InvalidInputError(f"{name}: {shown(value)}, expected the path of a folder")
    return Path(path)
