"""Identify models: named values that all ranks of a model compare before they run it, and a digest for K/V on disk.

The digest covers everything that K/V depend on, so that K/V can outlive the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paged
from paged.kernels.core.device import device_of, use_triton
from paged.kernels.cpu.products import this_cpu
from paged.models.loading.checkpoint_files import regular_size
from paged.models.loading.files_read import FilesRead
from paged.models.loading.load_options import LoadOptions
from paged.models.loading.weights import StoredTensors, open_tensors

# Number and bytes of the pieces of a tensor that its checksum covers. They are evenly spaced and include both ends. The
# checksum of a small tensor covers all bytes.
_PIECES, _PIECE_BYTES = 4, 4096
_PACKAGES = ("triton", "numba", "numpy", "safetensors")
# Environment variables that change how this package, oneDNN and cuBLAS compute products.
_ARITHMETIC = ("PAGED_BACKEND", "ONEDNN_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE")
# Options that the digest of K/V leaves out, and the reason. The digest covers every other option.
LEFT_OUT: Mapping[str, str] = {
    "device": "its type is in the layout of blocks, its architecture in `arithmetic_parts`",
    "dtype": "the dtype of the network is in the digest",
    "kv_cache_dtype": "the dtype of the cache is in the layout",
    "kv_cache_keep_layers": "the layers are in the layout",
    "block_size": "the size is in the layout",
    "max_seq_len": "it reaches K/V by the frequencies of rotations, which are in the digest",
    "num_blocks": "as max_seq_len, of which the pool may hold less",
    "num_swap_blocks": "host memory",
    "host_cache_bytes": "host memory",
    "cache_folder": "where the files are",
    "cache_folder_bytes": "how many files there are",
    "enable_prefix_cache": "whether K/V are found at all",
    "max_pinned_fraction": "how long K/V are found",
    "max_loras": "an adapter's K/V have a namespace of their own",
    "max_lora_rank": "as max_loras",
    "cuda_graphs": "the same kernels with more rows",
    "draft": "the files of a head are in `FilesRead`, its layer is in the layout",
    "num_state_slots": "how many states there are",
    "snapshot_interval": "which states are kept",
    "max_drafts": "the shape of states is in the layout",
    "model_impl": "the class of the network is in the digest",
}


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
    """Return a checkpoint's configuration by key, and a description of each tensor.

    A description has the tensor's file, the file's size, the header's entry, and a checksum of a sample of the bytes.

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


def option_parts(options: LoadOptions) -> dict[str, str]:
    """Return the options of a load that its K/V depend on: all options except `LEFT_OUT`."""
    parts: dict[str, str] = {}
    for field in fields(options):
        if field.name not in LEFT_OUT:
            parts[field.name] = repr(getattr(options, field.name))
    return parts


def arithmetic_parts(device: torch.device) -> dict[str, object]:
    """Return settings that decide how products are computed, such as whether a CPU rounds activations to int8."""
    parts: dict[str, object] = {"triton": use_triton(device), "matmul": torch.get_float32_matmul_precision()}
    for name in _ARITHMETIC:
        parts[name] = os.environ.get(name, "")
    if device.type == "cpu":
        parts["cpu"] = this_cpu()
    else:
        parts["arch"] = device_of(device).arch
    return parts


@cache
def source_digest() -> str:
    """Return a hash of this package's own code, because a checkout changes more often than its version."""
    root, digest = Path(paged.__file__).parent, hashlib.sha256()
    for folder, names, files in os.walk(root, followlinks=True):
        names.sort()
        for name in sorted(files):
            file = Path(folder, name)
            if file.suffix == ".py":
                digest.update(str(file.relative_to(root)).encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def code_parts(network: nn.Module) -> dict[str, object]:
    """Return values that identify the code of a network's classes, if it is not this package's or PyTorch's.

    They are the version of transformers, and a hash of each loaded file in the folders of the classes: the code of a
    registered family or of a checkpoint.
    """
    parts: dict[str, object] = {}
    folders: set[Path] = set()
    for name in {type(part).__module__ for part in network.modules()}:
        package = name.partition(".")[0]
        source = getattr(sys.modules.get(name), "__file__", None)
        if package == "transformers":
            parts[package] = metadata.version(package)
        elif package not in ("paged", "torch") and source is not None:
            folders.add(Path(source).parent)
    hashes: list[tuple[str, str]] = []
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None)
        if source is not None and Path(source).parent in folders:
            hashes.append((Path(source).name, hashlib.sha256(Path(source).read_bytes()).hexdigest()))
    parts["code"] = sorted(hashes)
    return parts


def model_digest(reads: FilesRead, parts: Mapping[str, object], tick: Callable[[], object] = lambda: None) -> bytes:
    """Return a digest of everything that K/V depend on: the files that the load has read, `parts`, and the programs.

    All threads of PyTorch read and hash the weights; see models/limits.md for their rate. tick: called after every
    4 MiB.

    Raises:
        CheckpointError: as `FilesRead.digest`.
    """
    texts = [(name, str(part)) for name, part in sorted(parts.items())]
    digest = hashlib.sha256(json.dumps([program_parts(), source_digest(), texts]).encode())
    digest.update(reads.digest(tick))
    return digest.digest()
