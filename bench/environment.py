"""What a run was made with, where it would mean nothing, and where its results go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paged.bench.limits import Ceilings
from paged.bench.timing import device_name
from paged.kernels.common.compat import HAS_TRITON, interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = {"cuda": "full", "cpu": "small"}
INTERPRETING = "TRITON_INTERPRET=1: the interpreter's times mean nothing, unset it to benchmark"


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


@dataclass(frozen=True)
class Options:
    """What a benchmark of kernels is asked for.

    scale: "full" or "small". end: when, by time.monotonic, no further case is started.
    """

    json: Path | None
    only: str
    end: float
    scale: str
    device: torch.device
    repeats: int

    def save(self, results: dict[str, Any]) -> None:
        """Write the results where that was asked for."""
        if self.json:
            save(self.json, results)


def parse_options(doc: str | None, argv: Sequence[str] | None, repeats: Mapping[str, int]) -> Options:
    """The command line of a benchmark; `repeats`: samples a case on each kind of device, when not given."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the environment and the rows here too, after every case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no case after so many seconds")
    parser.add_argument("--small", action="store_true", help="a CPU's sizes on a GPU")
    parser.add_argument("--device", choices=list(SCALE), default=DEVICE)
    parser.add_argument("--repeats", type=int, help=f"samples a case, at least 2; {dict(repeats)} when not given")
    args = parser.parse_args(argv)
    if interpreting():
        parser.error(INTERPRETING)
    return Options(
        json=args.json,
        only=args.only,
        end=time.monotonic() + args.budget,
        scale="small" if args.small else SCALE[args.device],
        device=torch.device(args.device),
        repeats=args.repeats or repeats[args.device],
    )
