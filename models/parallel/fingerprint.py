"""What the ranks of a model compare before they run it together, each part with its name."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch

import paged
from paged.errors import CheckpointError
from paged.models.loading.checkpoint_files import regular_size
from paged.models.loading.weights import StoredTensors

# Of a tensor so many pieces of so many bytes are compared, from its first to its last: 16 KB, a small one as a whole.
_PIECES, _PIECE_BYTES = 4, 4096
_PACKAGES = ("triton", "numba", "numpy", "safetensors")


def program_parts() -> dict[str, object]:
    """Return the versions of what computes."""
    installed = {found.name: found.version for name in _PACKAGES for found in metadata.distributions(name=name)}
    return {"paged": paged.__version__, "torch": torch.__version__, "packages": installed}


def checkpoint_parts(
    config: Mapping[str, Any], stored: StoredTensors, tick: Callable[[], object] = lambda: None
) -> dict[str, object]:
    """Return what a checkpoint's files hold: the values of its configuration; of each tensor the file, its size, the
    header's entry, and a checksum of a sample of its bytes.

    stored: as `read_headers` has them. tick: called after every tensor.

    Raises:
        CheckpointError: a file became unreadable.
    """
    parts: dict[str, object] = {key: json.dumps(config[key], sort_keys=True) for key in sorted(config)}
    for file in sorted({tensor.file for tensor in stored.values()}):
        size = regular_size(file)
        try:
            with file.open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
                entries = json.loads(opened.read(start - 8))
                entries.pop("__metadata__", None)
                for name, entry in sorted(entries.items()):
                    begin, end = (start + offset for offset in entry["data_offsets"])
                    parts[name] = file.name, size, entry, _checksum(opened.fileno(), begin, end)
                    tick()
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file}: changed while it was read ({error})") from error
    return parts


def _checksum(file: int, begin: int, end: int) -> int:
    last, checksum = max(begin, end - _PIECE_BYTES), 0
    for piece in range(_PIECES):
        at = begin + (last - begin) * piece // (_PIECES - 1)
        checksum = zlib.crc32(os.pread(file, min(_PIECE_BYTES, end - at), at), checksum)
    return checksum
