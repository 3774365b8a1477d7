"""Open a checkpoint's files safely, as files of others: regular, of bounded size, and plain JSON."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from paged.errors import CheckpointError

# The largest index of a supported model has 3 MB and 40,000 entries; Python makes up to 30 bytes of every byte of JSON.
_MAX_JSON_BYTES = 16 << 20
_MAX_JSON_VALUES = 400_000


def regular_size(file: Path) -> int:
    """Return the bytes of a regular file, or of the one that a link leads to, as in the Hub's cache.

    Raises:
        CheckpointError: it is missing, unreadable or no regular file: reading a pipe or a device may never end.
    """
    try:
        status = os.stat(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"{file}: unreadable ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: unreadable (no regular file)")
    return status.st_size


def is_there(file: Path) -> bool:
    """Return whether a folder has an entry of this name, even a pipe, a folder or a broken link.

    `regular_size` then raises for an entry that cannot be read, so that it does not count as missing.
    """
    return os.path.lexists(file)


def read_text(file: Path, most_bytes: int, most_values: int | None = None) -> str:
    """Return a regular file's UTF-8 text; most_values limits the values of JSON.

    Raises:
        CheckpointError: it is missing, no regular file, not UTF-8, or too large.
    """
    size = regular_size(file)
    if size > most_bytes:
        raise CheckpointError(f"{file}: {size} bytes, expected at most {most_bytes}")
    try:
        with file.open("rb") as opened:
            data = opened.read(size)  # files of /proc have size 0 and no end
        if most_values is not None and sum(map(data.count, (b",", b"[", b"{"))) > most_values:
            raise CheckpointError(f"{file}: unreadable (more than {most_values} values)")
        return data.decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable ({error})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    NaN and infinities are numbers, as Python writes them. The last of two values of one key counts.

    Raises:
        CheckpointError: it is missing, no regular file, not JSON in UTF-8, no object, too large, or nested too deep.
    """
    text = read_text(file, _MAX_JSON_BYTES, _MAX_JSON_VALUES)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file}: unreadable ({error})") from error
    except RecursionError:
        raise CheckpointError(f"{file}: unreadable (nested too deep)") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: holds a {type(values).__name__}, expected an object")
    return values
