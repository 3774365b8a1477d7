"""Every public kernel against its hardware limit.

    python -m bench.kernels.run [--json FILE] [--small] [--only NAME]
    pytest bench/kernels/run.py --benchmark-json=FILE      the rows stand in extra_info

A GPU runs the Triton kernels in bfloat16 from a CUDA graph, a CPU their PyTorch twins in float32 at small sizes. Inputs
are random and rotated so that they do not sit in the cache (rows of tiny operations, where they do, say "warm"); block
tables are shuffled. An operation that differs from the float64 reference gets no row. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paged.bench.check import compare
from paged.bench.environment import DEVICE, INTERPRETING, SCALE, benchmark_dtype, environment, parse_options
from paged.bench.kernels.cases import CASES, Case, Work
from paged.bench.limits import Ceilings, Speed, speed
from paged.bench.timing import cache_bytes, ceilings, sampler
from paged.kernels.common.compat import interpreting

REPEATS = {"cuda": 100, "cpu": 20}
# Sets of tensors a case rotates through at the most, where even so many do not fill the cache.
MAX_SETS = 512


@dataclass(frozen=True)
class Row(Speed):
    """A result. method: see `sampler`; cold: the rotated inputs exceed the cache."""

    name: str
    size: dict[str, Any]
    method: str
    cold: bool


def check(work: Work) -> None:
    """Raise WrongResultError unless the operation gives what the float64 reference gives."""
    expected, actual = _tensors(work.expected()), _tensors(work.call())
    for want, got in zip(expected, actual, strict=True):
        compare(got, want)


def _tensors(result: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else result


def prepare(
    case: Case, scale: str, device: torch.device
) -> tuple[Callable[[], float], Callable[[list[float], Ceilings], Row]]:
    """Check `case`, then return a function that takes a sample in seconds and one that makes the row of all samples.

    Raises:
        RuntimeError: in Triton's interpreter.
        WrongResultError: the operation does not agree with the reference.
    """
    if interpreting():
        raise RuntimeError(INTERPRETING)
    torch.manual_seed(0)
    dtype = benchmark_dtype(device)
    check(case.work("check", device, dtype))
    works = [case.work(scale, device, dtype)]
    # Tensors that change in place count twice among the bytes moved: half of the bytes are there to fill the cache.
    set_bytes, cache = works[0].cost.num_bytes // 2, cache_bytes(device)
    works += [case.work(scale, device, dtype) for _ in range(min(2 * cache // set_bytes, MAX_SETS - 1))]
    method, sample = sampler([work.call for work in works], device, capturable=case.capturable)
    cost, is_cold = works[0].cost, len(works) * set_bytes > cache

    def row(samples: list[float], limits: Ceilings) -> Row:
        measured = asdict(speed(samples, cost, limits))
        return Row(name=case.name, size=case.size(scale), method=method, cold=is_cold, **measured)

    return sample, row


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise without importing pytest, which the command line does not need."""
    metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_kernel(case: Case, benchmark: Any) -> None:
    """One row of the pytest-benchmark suite, whose own statistics include the launch of a whole graph."""
    device = torch.device(DEVICE)
    repeats = REPEATS[DEVICE]
    sample, row = prepare(case, SCALE[DEVICE], device)
    limits = ceilings(device, benchmark_dtype(device), repeats)
    samples: list[float] = []
    benchmark.pedantic(lambda: samples.append(sample()), rounds=repeats)
    benchmark.extra_info.update(environment("kernels", device, limits), **asdict(row(samples, limits)))


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print the table; the exit code is 1 where a case got no row."""
    options = parse_options(__doc__, argv, REPEATS)
    device, repeats = options.device, options.repeats
    limits = ceilings(device, benchmark_dtype(device), repeats)
    report: dict[str, Any] = {**environment("kernels", device, limits), "rows": [], "refused": {}}
    write("\n".join(f"{name}: {value}" for name, value in report.items() if value))
    write(f"{'case':28} {'median':>10} {'p20':>10} {'p80':>10} {'limit':>10} us {'GB/s':>8} {'TFLOP/s':>8}  percent")
    for case in CASES:
        if options.only not in case.name or time.monotonic() > options.end:
            continue
        try:
            sample, row = prepare(case, options.scale, device)
            result = row([sample() for _ in range(repeats)], limits)
        except Exception as error:  # whatever is wrong with one operation, the others get their rows
            report["refused"][case.name] = f"{type(error).__name__}: {error}"
            write(f"{case.name:28} refused: {report['refused'][case.name]}")
        else:
            report["rows"].append(asdict(result))
            write(_line(result))
        options.save(report)
    return int(bool(report["refused"]))


def _line(row: Row) -> str:
    times = " ".join(f"{t:10.2f}" for t in (row.median_us, row.p20_us, row.p80_us, row.bound_us))
    rates = f"{row.gb_per_s:8.1f} {row.tflop_per_s:8.3f}"
    note = f"{row.bound_by}, {row.method}{'' if row.cold else ', warm'}"
    return f"{row.name:28} {times}    {rates}  {row.percent:5.1f} % of {note}"


if __name__ == "__main__":
    sys.exit(main())
