"""Describes what a run was made with, and writes its results."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paged.bench.limits import Ceilings
from paged.bench.timing import device_name
from paged.kernels.common.compat import HAS_TRITON

INTERPRETING = "TRITON_INTERPRET=1: the interpreter's times mean nothing, unset it to benchmark"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def benchmark_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def environment(benchmark: str, device: torch.device, limits: Ceilings | None = None) -> dict[str, Any]:
    """What a reader needs to judge rows: which benchmark's, the device, versions, date.

    limits: what the device was measured to reach, for rows that have a limit; their dtype stands with it.
    """
    found = {
        "benchmark": benchmark,
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if HAS_TRITON else None,
        "peers": peer_versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if limits is None:
        return found
    return found | {
        "dtype": str(benchmark_dtype(device)).removeprefix("torch."),
        "copy_gb_per_s": limits.copy / 1e9,
        "read_gb_per_s": limits.read / 1e9,
        "matmul_tflop_per_s": limits.matmul / 1e12,
    }


def peer_versions() -> dict[str, str]:
    """Versions of the peers' packages where they are installed."""
    versions = {"cudnn": str(torch.backends.cudnn.version())} if torch.cuda.is_available() else {}
    for package in ("vllm", "flashinfer-python", "transformers"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, never half of them: a run saves after every case, and may be killed at any time."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(draft, path)
