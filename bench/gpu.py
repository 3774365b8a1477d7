"""Everything a machine with a GPU is asked for, in one go: correctness, benchmarks, report.

    python -m bench.gpu [--out DIR] [--budget SECONDS] [--peers DIR] [--only STEP ...]      or  make gpu

Needs torch, triton and pytest, and installs nothing. Each step is a process of its own with a share of the time left;
when one fails or runs out of time the others follow all the same, and what it wrote so far stays. DIR gets gpu.json
(the steps), gpu.log (all output), attention.json, moe.json, kernels.json, engine.json, report.html and a PNG of every
chart. The engine comes last and has little of 540 seconds: `--only engine report` gives it all of another run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch

from paged.bench.benchmark import option_parser
from paged.bench.environment import DEVICE, environment, save

ROOT = Path(__file__).resolve().parents[1]
# Compiling is most of the tests' time; 8 processes keep 8 cores busy with it and share the GPU.
_TEST_PROCESSES = 8
# Ahead-of-time compilation needs no GPU, and kernels with faults may end the device's context for all tests after them.
_CPU_ONLY_TESTS = ("tests/kernels/test_compile.py", "tests/kernels/attention/test_mutations.py")
# A benchmark starts no case this long before its end: the slowest takes as long with its compilation.
_LAST_CASE_SECONDS = 30.0


@dataclass(frozen=True)
class Step:
    """command: from the seconds it may take. share: of the time that is left when it starts."""

    name: str
    command: Callable[[float], list[str]]
    share: float


@dataclass(frozen=True)
class Outcome:
    """returncode: negative where a signal ended it, at its limit SIGKILL. summary: the last line that it printed."""

    name: str
    limit_s: float
    seconds: float
    returncode: int
    summary: str


def steps(out: Path) -> list[Step]:
    """Correctness, attention, MoE, all kernels, engine, report: 190, 175, 70, 50, 40 and 15 of 540 seconds, or more
    where one is early.
    """
    python = [sys.executable, "-m"]
    ignored = [f"--ignore={path}" for path in _CPU_ONLY_TESTS]
    parallel = ["-n", str(_TEST_PROCESSES)] if importlib.util.find_spec("xdist") else []
    paths = ["tests/kernels", "tests/cache", "tests/models/test_decode_graphs.py"]
    tests = [*python, "pytest", *paths, "-q", "-p", "no:cacheprovider", *ignored, *parallel]
    attention, moe, kernels, engine = (out / f"{name}.json" for name in ("attention", "moe", "kernels", "engine"))

    def bench(module: str, path: Path, *options: str) -> Callable[[float], list[str]]:
        def command(seconds: float) -> list[str]:
            budget = str(max(0.0, seconds - _LAST_CASE_SECONDS))
            return [*python, module, "--json", str(path), "--budget", budget, *options]

        return command

    def report(_: float) -> list[str]:
        written = [str(path) for path in (attention, moe, kernels, engine, out / "gpu.json") if path.exists()]
        return [*python, "paged.bench.report.build", *written, "--out", str(out)]

    return [
        Step("tests", lambda _: tests, 0.35),
        Step("attention", bench("paged.bench.attention.run", attention), 0.5),
        Step("moe", bench("paged.bench.moe.run", moe), 0.4),
        Step("kernels", lambda _: [*python, "paged.bench.kernels.run", "--json", str(kernels)], 0.48),
        Step("engine", bench("paged.bench.engine.run", engine, "--device", "cuda"), 0.75),
        Step("report", report, 1.0),
    ]


def run_step(step: Step, seconds: float, variables: Mapping[str, str], log: TextIO) -> Outcome:
    """Run a step, passing its output on line by line; at its limit it is killed with all that it started."""
    command, start, summary = step.command(seconds), time.monotonic(), ""
    log.write(f"\n=== {step.name}, at most {seconds:.0f} s: {' '.join(command)}\n")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    assert process.stdout is not None
    watch = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            log.flush()
            summary = line.strip() or summary
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        returncode = process.wait()
        watch.cancel()
    return Outcome(step.name, round(seconds, 1), round(time.monotonic() - start, 1), returncode, summary)


def run(steps: Sequence[Step], out: Path, budget: float, peers: Path | None = None) -> int:
    """Run the steps within `budget` seconds and write gpu.json after each; 0 where all ended well."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + budget
    paths = [str(ROOT), *([str(peers.resolve())] if peers else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread: the references work on tensors so small that waiting for other threads takes 20 times as long.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    outcomes, told = [], environment("gpu", torch.device(DEVICE))
    with (out / "gpu.log").open("w") as log:
        for step in steps:
            outcomes.append(run_step(step, max(1.0, step.share * (end - time.monotonic())), variables, log))
            save(out / "gpu.json", {**told, "steps": [asdict(outcome) for outcome in outcomes]})
    for outcome in outcomes:
        print(f"{outcome.name:10} {outcome.returncode:4} {outcome.seconds:6.0f} s  {outcome.summary}")
    return int(any(outcome.returncode for outcome in outcomes))


def main(argv: list[str] | None = None) -> int:
    """Refuses a machine without a GPU, where a benchmark of it would mean nothing."""
    parser = option_parser(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu", help="%(default)s by default")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all steps; %(default)s by default")
    parser.add_argument("--peers", type=Path, help="a folder that holds peers' packages, put on PYTHONPATH")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="tests, attention, moe, kernels, engine, report")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    if args.peers and not args.peers.is_dir():
        parser.error(f"--peers {args.peers}: no such folder")
    out = args.out.resolve()  # the steps run in the repository's folder
    chosen = [step for step in steps(out) if args.only is None or step.name in args.only]
    return run(chosen, out, args.budget, args.peers)


if __name__ == "__main__":
    sys.exit(main())
