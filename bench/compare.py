"""Compare two benchmark results, or two checkouts that run in turns: the ratio of each case, and its uncertainty.

    paged bench compare BASE CANDIDATE [--threshold 1.1] [--rounds 3] [PYTEST OPTIONS]

BASE and CANDIDATE are files written with --benchmark-json or --json, or folders: the microbenchmarks of both then run
in turns, ROUNDS times. The interval holds 95 % of the ratios that noise within and between runs would give. The exit
code is 1 if a case is slower by more than the threshold with this confidence.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paged.bench.benchmark import option_parser
from paged.bench.limits import times_us
from paged.errors import InvalidInputError

_CONFIDENCE = 1.96  # standard errors on each side that hold 95 % of a normal distribution
# For a normal distribution: standard deviations from the 20th to the 80th percentile, and the standard error of the
# median, relative to the standard error of the mean.
_P20_TO_P80, _MEDIAN_ERROR = 1.683, 1.2533


class Run(NamedTuple):
    """One run of a case: the logarithm of its median in microseconds, and the standard error of this logarithm."""

    log_median: float
    error: float


class Ratio(NamedTuple):
    """The candidate's time over the base's; `low` and `high` bound its confidence interval."""

    value: float
    low: float
    high: float


def run_of(median: float, p20: float, p80: float, num_samples: int) -> Run:
    """Return a run from its median and percentiles, which are above 0."""
    deviation = math.log(p80 / p20) / _P20_TO_P80
    return Run(math.log(median), _MEDIAN_ERROR * deviation / math.sqrt(num_samples))


def ratio(base: Sequence[Run], candidate: Sequence[Run]) -> Ratio:
    """Compare the runs of one case; each side has one or more."""
    logs = []
    variance = 0.0
    for runs in (base, candidate):
        medians = [run.log_median for run in runs]
        logs.append(statistics.mean(medians))
        variance += statistics.mean(run.error**2 for run in runs) / len(runs)
        if len(runs) > 1:
            variance += statistics.variance(medians) / len(runs)
    log_ratio, width = logs[1] - logs[0], _CONFIDENCE * math.sqrt(variance)
    return Ratio(math.exp(log_ratio), math.exp(log_ratio - width), math.exp(log_ratio + width))


def read(path: Path) -> dict[str, Run]:
    """Return the runs of a file by case.

    Raises:
        InvalidInputError: the file cannot be read, or holds no times.
    """
    runs = {}
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        rows = report.get("rows", [])
        for case in report.get("benchmarks", []):
            samples = case["stats"]["data"]
            rows.append({"name": case["name"], "samples": len(samples), **times_us(samples)})
        for row in rows:
            if "median_us" in row:
                run = run_of(row["median_us"], row["p20_us"], row["p80_us"], row.get("samples", 2))
                if not math.isfinite(run.log_median) or not 0 <= run.error < math.inf:
                    raise ValueError(f"{row['name']}: times that are no numbers above 0")
                runs[row["name"]] = run
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidInputError(f"{path}: no results of a benchmark: {type(error).__name__}: {error}") from error
    if not runs:
        raise InvalidInputError(f"{path}: no times, expected a file written with --benchmark-json or --json")
    return runs


def measure(checkout: Path, options: Sequence[str]) -> dict[str, Run]:
    """Run the microbenchmarks of a checkout in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "bench", "--benchmark-only", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        subprocess.run([*command, f"--benchmark-json={path}", *options], cwd=checkout, env=environment, check=False,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        return read(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case that both results have."""
    parser = option_parser(__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("candidate", type=Path)
    parser.add_argument(
        "--threshold", type=float, default=1.1, help="ratio above which a case fails; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout; default: %(default)s")
    args, options = parser.parse_known_args(argv)
    sides = args.base, args.candidate
    runs: tuple[dict[str, list[Run]], ...] = (defaultdict(list), defaultdict(list))
    for _ in range(args.rounds if any(side.is_dir() for side in sides) else 1):
        for side, by_case in zip(sides, runs, strict=True):
            measured = measure(side, options) if side.is_dir() else read(side)
            for name, run in measured.items():
                by_case[name].append(run)
    base, candidate = runs
    common = [name for name in base if name in candidate]
    if not common:
        raise InvalidInputError(f"{args.base}, {args.candidate}: no case is in both")
    num_slower = 0
    for name in common:
        result = ratio(base[name], candidate[name])
        verdict = ""
        if result.low > args.threshold:
            verdict, num_slower = "  SLOWER", num_slower + 1
        elif result.high < 1 / args.threshold:
            verdict = "  faster"
        print(f"{name:60} {result.value:6.3f}x ({result.low:.3f} to {result.high:.3f}){verdict}")
    only = sorted(base.keys() ^ candidate.keys())
    if only:
        print(f"in one of both only: {', '.join(only)}")
    print(f"{num_slower} of {len(common)} cases slower by more than {args.threshold:g}x")
    return int(num_slower > 0)


if __name__ == "__main__":
    sys.exit(main())
