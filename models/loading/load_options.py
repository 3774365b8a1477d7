"""What a caller says of a model to load, checked by name before any file is read."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int, shown
from paged.token_ids import as_token_ids

# Ids of blocks, and positions, are 32-bit integers on a device.
_LARGEST = 2**31 - 1
# Each takes memory of its own; the default has 22.
_MAX_GRAPHS = 1024

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def as_folder(name: str, value: object) -> Path:
    """A path.

    Raises:
        InvalidInputError: it is none, or no system could open it.
    """
    try:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
    except Exception:  # of a class of the caller's
        path = None
    if not isinstance(path, str) or "\0" in path:
        raise InvalidInputError(f"{name}: {shown(value)}, expected the path of a folder")
    return Path(path)


def as_size(name: str, value: object, *, minimum: int = 1) -> int:
    """An integer of at least `minimum` that 32 bits can hold.

    Raises:
        InvalidInputError: it is none.
    """
    size = as_int(name, value, low=-_LARGEST, high=_LARGEST)
    if size < minimum:
        raise InvalidInputError(f"{name}: {size}, expected at least {minimum}")
    return size


def as_optional_size(name: str, value: object) -> int | None:
    """As `as_size`, or None."""
    return None if value is None else as_size(name, value)


def as_flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        InvalidInputError: it is something else, be it 0 or 1.
    """
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}: {shown(value)}, expected True or False")
    return value


def as_device(value: object) -> torch.device:
    """A device of this machine: "cpu", "cuda" or "cuda:1", as text or torch.device; None is CUDA where there is one.

    Raises:
        InvalidInputError: it is no such device, or not there.
    """
    if value is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(value) if isinstance(value, (str, torch.device)) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"device: {shown(value)}, expected 'cpu', 'cuda', 'cuda:1' and so on, or None")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInputError(f"device: {shown(value)}, there are {torch.cuda.device_count()} CUDA devices")
    return device


def as_dtype(name: str, value: object, *others: torch.dtype) -> torch.dtype | None:
    """float32, float16, bfloat16 or one of `others`, as torch.dtype or as its name; None for None and "auto".

    Raises:
        InvalidInputError: it is something else.
    """
    if value is None or (isinstance(value, str) and value == "auto"):
        return None
    known = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES.values(), *others)}
    named = known.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(named, torch.dtype) or named not in known.values():
        raise InvalidInputError(f"{name}: {shown(value)}, expected {', '.join(known)}, 'auto' or None")
    return named


def as_graphs(value: object) -> bool | tuple[int, ...] | None:
    """Batch sizes for CUDA graphs, True for the default, False for none, or None.

    Raises:
        InvalidInputError: it is something else.
    """
    if value is None or isinstance(value, bool):
        return value
    sizes = as_token_ids("cuda_graphs", value, max_length=_MAX_GRAPHS)
    return tuple(as_size("cuda_graphs", size) for size in sizes)
