"""What a run was made with, where it would mean nothing, and where its results go."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.limits import Ceilings
from bench.timing import device_name
from paged.kernels.compat import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = {"cuda": "full", "cpu": "small"}
INTERPRETING = "TRITON_INTERPRET=1: the interpreter's times mean nothing, unset it to benchmark"


def benchmark_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def environment(device: torch.device, limits: Ceilings) -> dict[str, Any]:
    """What a reader needs to judge rows: the device, its measured ceilings a second, versions, date."""
    return {
        "device": device_name(device),
        "dtype": str(benchmark_dtype(device)).removeprefix("torch."),
        "torch": torch.__version__,
        "triton": version("triton") if HAS_TRITON else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "copy_gb_per_s": limits.copy / 1e9,
        "read_gb_per_s": limits.read / 1e9,
        "matmul_tflop_per_s": limits.matmul / 1e12,
    }


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, never half of them: a run saves after every case, and may be killed at any time."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(draft, path)
