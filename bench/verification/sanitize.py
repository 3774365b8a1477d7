"""Run checks in Triton's concurrency sanitizer, which sees reads of shared memory that the copy engine still fills.

    python -m bench.verification.sanitize [--json FILE] [--only NAME] [--budget SECONDS] [--resume]

The checks are cases of `paged verify` whose kernels fetch boxes. The sanitizer adds a check to every access, so a
kernel takes up to 33 seconds to compile: all are compiled first, on all cores. A race ends the kernel, and with it the
process's use of the GPU. Needs a GPU.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from paged.bench.benchmark import RESUMABLE, Benchmark, Setting
from paged.bench.compilation.ahead import compile_ahead, variants_of
from paged.bench.verification import run
from paged.bench.verification.cases import CHECKS, Check
from paged.kernels.core.compat import triton

_NAMES = ("boxes of 64", "boxes of 128", "boxes of padded heads", "boxes of fp8", "boxes and a window",
          "boxes and a tree", "boxes, interleaved K and V", "boxes of keys that are values")  # fmt: skip
CASES = [
    check
    for check in CHECKS
    if check.name.removeprefix("paged_attention: ") in _NAMES or check.name in ("fused_moe.decode", "fused_moe.prefill")
]


@functools.cache
def compile_cases(setting: Setting) -> None:
    """Compile the kernels that all cases launch."""

    def launch_all() -> None:
        for check in CASES:
            with suppress(Exception):  # the results mean nothing here
                list(check.results(setting.device, setting.dtype))

    compile_ahead(variants_of(launch_all), math.inf)


def measure(check: Check, setting: Setting) -> dict[str, Any]:
    """Return how many results are right."""
    compile_cases(setting)
    return run.measure(check, setting)


BENCHMARK = Benchmark(
    "sanitize",
    __doc__,
    lambda _: CASES,
    measure,
    {"cuda": 1},
    options=RESUMABLE,
    device="cuda",
    has_limits=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark in the sanitizer, whose kernels need memory of their own."""
    os.environ["TRITON_INSTRUMENTATION_MODE"] = "consan"  # for child processes; this one has read it
    triton.knobs.compilation.instrumentation_mode = "consan"
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    return BENCHMARK.main(argv)


if __name__ == "__main__":
    sys.exit(main())
