"""What tells models apart: named values that all ranks of a model compare before they run it, and a digest of all
weights, for K/V that outlive the process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import paged
from paged.models.loading.checkpoint_files import regular_size
from paged.models.loading.weights import StoredTensors, open_tensors

# Sample of a tensor: 4 evenly spaced pieces of 4 KB, both ends included; a small tensor is compared whole.
_PIECES, _PIECE_BYTES = 4, 4096
_PACKAGES = ("triton", "numba", "numpy", "safetensors")


def program_parts() -> dict[str, object]:
    """Return the versions of the packages that compute."""
    installed = {}
    for name in _PACKAGES:
        for package in metadata.distributions(name=name):
            installed[package.name] = package.version
    return {"paged": paged.__version__, "torch": torch.__version__, "packages": installed}


def checkpoint_parts(
    config: Mapping[str, Any], stored: StoredTensors, tick: Callable[[], object] = lambda: None
) -> dict[str, object]:
    """Return a checkpoint's configuration by key, and for each tensor its file, the file's size, the header's entry,
    and a checksum of a sample of its bytes.

    stored: from `read_headers`. tick: called after every tensor.

    Raises:
        CheckpointError: a file became unreadable.
    """
    parts: dict[str, object] = {key: json.dumps(config[key], sort_keys=True) for key in sorted(config)}
    files = {(tensor.file, tensor.stamp) for tensor in stored.values()}
    for file, stamp in sorted(files):
        size = regular_size(file)
        with open_tensors(file, stamp) as tensors:
            for name, entry in sorted(tensors.tensors.items()):
                parts[name] = file.name, size, entry, tensors.checksum(name, _PIECES, _PIECE_BYTES)
                tick()
    return parts


def model_digest(
    folders: Sequence[Path], options: Mapping[str, object], tick: Callable[[], object] = lambda: None
) -> bytes:
    """Return a digest of all that K/V depend on: every byte of the folders' files, the options, and the programs.

    A core reads and hashes about 1.5 GB/s. tick: called after every 16 MiB.
    """
    texts = {name: str(option) for name, option in options.items()}
    digest = hashlib.sha256(json.dumps([program_parts(), texts]).encode())
    for folder in folders:
        for path in sorted(filter(Path.is_file, folder.iterdir())):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            of_file = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(1 << 24):
                    of_file.update(chunk)
                    tick()
            digest.update(of_file.digest())
    return digest.digest()
