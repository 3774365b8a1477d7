"""Validation of folder paths."""

from __future__ import annotations

import os
from pathlib import Path

from paged.errors import InvalidInputError
from paged.kernels.core.errors import shown


def as_folder(name: str, value: object) -> Path:
    """Return `value` as a path.

    Raises:
        InvalidInputError: it is not a path, or contains characters that no path can have.
    """
    try:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
    except Exception:  # a path-like class of the caller may raise anything
        path = None
    if not isinstance(path, str) or "\0" in path:
        raise InvalidInputError(f"{name}: {shown(value)}, expected the path of a folder")
    return Path(path)
