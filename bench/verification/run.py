"""The checks of `paged verify --quick`. After a hang or a lost GPU, another process continues.

python -m bench.verification.run [--json FILE] [--only NAME] [--budget SECONDS] [--resume]
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from paged.bench.benchmark import Benchmark, Setting
from paged.bench.verification.cases import CHECKS, Check


def measure(check: Check, setting: Setting) -> dict[str, Any]:
    """Return how many results are right.

    Raises:
        WrongResultError: a result is wrong.
    """
    torch.manual_seed(0)
    num_results = 0
    for result in check.results(setting.device, setting.dtype):
        result.check()
        num_results += 1
    return {"name": check.name, "value": num_results, "unit": "results"}


BENCHMARK = Benchmark(
    "verify",
    __doc__,
    lambda _: [check for check in CHECKS if check.is_quick],
    measure,
    {"cuda": 1, "cpu": 1},
    has_limits=False,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
