"""`paged verify`: check every kernel on this machine against float64, in every supported dtype."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING
from unittest import mock

from paged.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from paged.bench.verification.cases import Check

DESCRIPTION = (
    "Check every kernel against a slow, simple version in float64, and cache and attention together against a model "
    "with closed-form answers. On a CPU this checks what models run there: numba kernels and PyTorch. --backend triton "
    "runs the Triton kernels in Triton's interpreter. The exit code is 1 if a result is wrong."
)


@dataclass(frozen=True)
class Row:
    """One check in one dtype. worst: its largest error as a fraction of the budget; None if `error` has the reason."""

    case: str
    dtype: str
    worst: float | None
    seconds: float
    ok: bool
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to check, and where."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument(
        "--backend", choices=["triton", "torch", "numba"], help="default: what models run on the device"
    )
    parser.add_argument("--quick", action="store_true", help="one dtype, and fewer cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check everything and print a row each; return 1 if a result is wrong.

    Raises:
        UnsupportedError: the device does not exist, or its backend cannot run here.
    """
    import torch

    from paged.kernels.common.compat import HAS_TRITON, interpreting
    from paged.kernels.common.device import has_numba, use_triton

    has_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if args.device == "cuda" or (has_gpu and args.device is None):
        device = torch.device("cuda")
    if device.type == "cuda" and not has_gpu:
        raise UnsupportedError("--device cuda: torch finds no GPU; see `paged info`")
    if args.backend == "triton" and device.type == "cpu" and HAS_TRITON and not interpreting():
        # The interpreter must be chosen before triton is imported.
        command = [sys.executable, "-m", "paged", "verify", "--device", "cpu", "--backend", "triton"]
        command += ["--only", args.only]
        if args.quick:
            command.append("--quick")
        if args.json:
            command.append("--json")
        return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    choice = args.backend or os.environ.get("PAGED_BACKEND", "")
    can_run_numba = device.type == "cpu" and has_numba()
    if choice == "numba" and not can_run_numba:
        raise UnsupportedError(
            f"numba kernels cannot run on {device}: they need a CPU, numba, and PyTorch's GNU OpenMP"
        )
    if not choice and can_run_numba and not interpreting():
        choice = "numba"
    backend, where = choice or "torch", f"on {device}"
    with mock.patch.dict(os.environ, {"PAGED_BACKEND": choice}):
        interpreted = False
        if use_triton(device):
            backend, interpreted = "triton", device.type == "cpu"
        rows = list(_check_all(args, device, interpreted=interpreted))
    wrong = sum(not row.ok for row in rows)
    if interpreted:
        where = "in Triton's interpreter"
    if args.json:
        report = {"device": str(device), "backend": backend, "interpreted": interpreting(), "wrong": wrong}
        print(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"{len(rows) - wrong} of {len(rows)} right, by {backend} {where}")
    return int(wrong > 0 or not rows)


def _check_all(args: argparse.Namespace, device: torch.device, *, interpreted: bool) -> Iterator[Row]:
    """The rows, each printed when it is there; the last one is of a check that left the device unusable."""
    import torch

    from paged.bench.benchmark import benchmark_dtype, check_only, released
    from paged.bench.verification.cases import CHECKS

    checks = list(CHECKS)
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    if interpreted:
        # The interpreter holds bfloat16 as raw integers, and only part of its arithmetic converts them.
        dtypes.remove(torch.bfloat16)
    if args.quick:
        checks = [check for check in checks if check.is_quick]
        dtypes = [benchmark_dtype(device)]
    check_only(args.only, [check.name for check in checks])
    checks = [check for check in checks if args.only in check.name]
    width = max(len(check.name) for check in checks)
    if not args.json:
        print(f"{'case':{width}}  {'dtype':8}  {'error / budget':>14}  {'ms':>7}")
    for check, dtype in itertools.product(checks, dtypes):
        row = _row(check, device, dtype)
        is_lost = not released(device)
        if is_lost:
            row = replace(row, ok=False, error=f"{row.error or ''} the device is lost: no other check can run".strip())
        if not args.json:
            _print(row, width)
        yield row
        if is_lost:
            return


def _row(check: Check, device: torch.device, dtype: torch.dtype) -> Row:
    import torch

    torch.manual_seed(0)
    name, start = str(dtype).removeprefix("torch."), time.perf_counter()
    worst, count = 0.0, 0
    try:
        for result in check.results(device, dtype):
            shares = result.shares()
            if shares.numel():
                worst = max(worst, float(shares.max()))
            count += 1
    except Exception as error:  # the other operations still get their rows
        return Row(check.name, name, None, time.perf_counter() - start, False, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    if math.isinf(worst):
        return Row(check.name, name, None, seconds, False, "infinite, NaN, or a whole number that differs")
    return Row(check.name, name, worst, seconds, count > 0 and worst <= 1)


def _print(row: Row, width: int) -> None:
    worst, note = "", "ok"
    if row.worst is not None:
        worst = f"{row.worst:.3f}"
    if not row.ok:
        note = f"WRONG {row.error or ''}"
    text = f"{row.case:{width}}  {row.dtype:8}  {worst:>14}  {1e3 * row.seconds:7.1f}  {note}".rstrip()
    print(text, flush=True)  # in case a later check ends the process
