"""Every public kernel against its hardware limit.

    python -m bench.kernels.run [--json FILE] [--small] [--only NAME]

A GPU runs the Triton kernels in bfloat16 from a CUDA graph, a CPU what models run there in float32 at small
sizes. Inputs are random and rotated so that they are not cached; rows of tiny operations whose inputs are say "warm".
Block tables are shuffled. An operation that differs from the float64 reference gets no row.
"""

from __future__ import annotations

import sys

import torch

from paged.bench.benchmark import Benchmark, Setting
from paged.bench.contest import OURS, Contest, Peer
from paged.bench.kernels.cases import CASES, Case
from paged.bench.timing import num_sets

# Largest number of tensor sets that a case rotates through, even if they do not fill the cache.
MAX_SETS = 512
PEERS: tuple[Peer, ...] = ()  # those of attention and experts are in benchmarks of their own


def contest(case: Case, setting: Setting) -> Contest:
    """Return the contest of a case, in which no peer takes part.

    Raises:
        WrongResultError: the operation does not agree with the reference.
    """
    torch.manual_seed(0)
    case.work("check", setting.device, setting.dtype).check()
    work = case.work(setting.scale, setting.device, setting.dtype)
    # Tensors that change in place count twice as moved bytes: only half of the bytes fill the cache.
    count, is_cold = num_sets(work.cost.num_bytes // 2, setting.device, MAX_SETS)
    calls = [work.call]
    for _ in range(count - 1):
        calls.append(case.work(setting.scale, setting.device, setting.dtype).call)
    about = {"name": case.name, "size": case.size(setting.scale)}
    entries = Contest(about, setting, work.cost, is_cold)
    entries.add(OURS, calls, lambda _: None, capturable=case.capturable)
    return entries


BENCHMARK = Benchmark(
    "kernels",
    __doc__,
    lambda _: CASES,
    lambda case, setting: contest(case, setting).row(),
    {"cuda": 100, "cpu": 20},
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
