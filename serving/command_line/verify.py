"""`paged verify`: check every kernel on this machine."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from paged.errors import PagedError

DESCRIPTION = (
    "Check every kernel against a slow, simple version in float64, and cache and attention together against a model "
    "with closed-form answers. On a CPU this checks what models run there: numba kernels and PyTorch. --backend triton "
    "runs the Triton kernels in Triton's interpreter. The exit code is 1 if a result is wrong."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the selection of cases and the device."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument(
        "--backend", choices=["triton", "torch", "numba"], help="default: what models run on the device"
    )
    parser.add_argument("--quick", action="store_true", help="one dtype, and fewer cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--op", metavar="NAME", help="cases of this operation, such as paged_attention")
    parser.add_argument(
        "--candidate",
        metavar="MODULE:FUNCTION",
        help="with --op: check this function, which takes the operation's arguments or some of them, in its place",
    )
    parser.add_argument(
        "--call-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="with --candidate or --trace: limit of each call of a function; %(default)g",
    )
    parser.add_argument(
        "--compiled",
        choices=["sm_80", "sm_89", "sm_90", "sm_120"],
        help="run the Triton kernels as compiled for this GPU, on the CPU; see docs/compiled.md",
    )
    parser.add_argument(
        "--num-sms", type=int, default=8, metavar="N", help="with --compiled: SMs that kernels plan for; %(default)d"
    )
    parser.add_argument(
        "--schedule",
        choices=["random", "one", "all"],
        default="random",
        help="with --compiled: some CTAs together in random order, one after the other, or all together; %(default)s",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="instead of the cases: a recorded call (see paged.record), as recorded and by each backend",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="instead of the cases: workloads and solutions of a FlashInfer-Bench trace set, its folder or one file",
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks of `paged.bench`, which is imported by name because it imports this package.

    Raises:
        PagedError: the reader of the output has closed the pipe, so the result is incomplete.
    """
    try:
        code = int(importlib.import_module("paged.bench.verification.verify").run(args))
        print(end="", flush=True)
    except BrokenPipeError as error:
        raise PagedError("the output was closed before the last line, which says how many are right") from error
    return code
