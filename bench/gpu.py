"""Run everything for a machine with a GPU: correctness, benchmarks, report.

    python -m bench.gpu [--out DIR] [--budget SECONDS] [--peers DIR] [--only STEP ...]      or  make gpu

Needs torch, triton and pytest, and installs nothing. Each step is a process with a share of the remaining time. If one
fails or runs out of time, the others still run, and its results so far are kept. If a benchmark's process ends early or
loses the GPU, another one continues with the remaining cases.

DIR gets gpu.json (the steps), gpu.log (all output), attention.json, moe.json, engine.json, kernels.json, report.html,
and the tuned tiles in tiles/. Later steps get little of 540 seconds: `--only engine tune report` gives them the time of
another run.
"""

from __future__ import annotations

import os
import re
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

from paged.bench.benchmark import DEVICE, environment, option_parser, save

ROOT = Path(__file__).resolve().parents[1]
# Compiling is most of the tests' time; so many processes keep most of 16 cores busy with it and share the GPU.
_TEST_PROCESSES = 14
# Ahead-of-time compilation needs no GPU, and kernels with faults may end the device's context for all tests after them.
_CPU_ONLY_TESTS = ("tests/kernels/test_compile.py", "tests/kernels/attention/test_mutations.py")
# A benchmark starts no case this long before its end: the slowest takes as long with its compilation.
_LAST_CASE_SECONDS = 30.0
# Processes that a benchmark may use up.
_MOST_PROCESSES = 6
_STEPS = ("tests", "attention", "moe", "engine", "kernels", "tune", "report")
# What compilers say of kernels, Triton, LLVM and ptxas: it is in the log alone.
_COMPILER_WARNING = re.compile(r"ptxas|wgmma|MLIR|(loc\(.*\)|\w:\d+:\d+): (warning|remark):")


@dataclass(frozen=True)
class Step:
    """command: takes its seconds. share: of the remaining time at its start. resumes: whether the same command with
    --resume continues after its process ended early."""

    name: str
    command: Callable[[float], list[str]]
    share: float
    resumes: bool = False


@dataclass(frozen=True)
class Outcome:
    """returncode: negative after a signal, SIGKILL at the time limit. summary: the last printed line."""

    name: str
    limit_s: float
    seconds: float
    returncode: int
    summary: str


def steps(out: Path) -> list[Step]:
    """Correctness, attention, MoE, engine, all kernels, tiles of the MoE, report: 180, 160, 70, 65, 25, 20 and 15 of
    540 seconds, or more where one is early."""
    python = [sys.executable, "-m"]
    ignored = [f"--ignore={path}" for path in _CPU_ONLY_TESTS]
    paths = ["tests/kernels", "tests/cache", "tests/models/test_step_graphs.py"]
    tests = [*python, "paged.bench.suite", "--processes", str(_TEST_PROCESSES), *paths, *ignored]
    tune = [*python, "paged.bench.moe.tune", "--model", "Qwen3-30B-A3B", "--tokens", "64", "4096"]

    def bench(name: str, share: float, *options: str) -> Step:
        def command(seconds: float) -> list[str]:
            budget = str(max(0.0, seconds - _LAST_CASE_SECONDS))
            file = str(out / f"{name}.json")
            return [*python, f"paged.bench.{name}.run", "--json", file, "--budget", budget, *options]

        return Step(name, command, share, resumes=True)

    def report(_: float) -> list[str]:
        written = [str(path) for path in sorted(out.glob("*.json"))]
        return [*python, "paged.bench.report.build", *written, "--out", str(out)]

    def tiles(seconds: float) -> list[str]:
        return [*tune, "--out", str(out / "tiles"), "--budget", str(max(0.0, seconds - _LAST_CASE_SECONDS))]

    return [
        Step("tests", lambda _: tests, 0.33),
        bench("attention", 0.45),
        bench("moe", 0.35),
        bench("engine", 0.5, "--device", "cuda"),
        bench("kernels", 0.4),
        Step("tune", tiles, 0.6),
        Step("report", report, 1.0),
    ]


def run_step(step: Step, seconds: float, variables: Mapping[str, str], log: TextIO) -> Outcome:
    """Run a step, passing its output on line by line; at its limit it is killed with all that it started."""
    start = time.monotonic()
    resume: list[str] = []
    for _ in range(_MOST_PROCESSES):
        left = seconds - (time.monotonic() - start)
        returncode, summary = _run_process([*step.command(left), *resume], left, variables, log)
        left = seconds - (time.monotonic() - start)
        if returncode in (0, 1) or not step.resumes or left < _LAST_CASE_SECONDS:
            break
        resume = ["--resume"]
    return Outcome(step.name, round(seconds, 1), round(time.monotonic() - start, 1), returncode, summary)


def _run_process(command: Sequence[str], seconds: float, variables: Mapping[str, str], log: TextIO) -> tuple[int, str]:
    """The exit code, and the last line."""
    summary = ""
    log.write(f"\n=== at most {seconds:.0f} s: {' '.join(command)}\n")
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
            log.write(line)
            log.flush()
            if not _COMPILER_WARNING.search(line):
                print(line, end="", flush=True)
                summary = line.strip() or summary
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        returncode = process.wait()
        watch.cancel()
    return returncode, summary


def run(steps: Sequence[Step], out: Path, budget: float, peers: Path | None = None) -> int:
    """Run the steps within `budget` seconds, write gpu.json after each; 0 where all ended well."""
    end = time.monotonic() + budget
    paths = [str(ROOT), *([str(peers.resolve())] if peers else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread: the references work on tensors so small that waiting for other threads takes 20 times as long.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    outcomes, told = [], environment("gpu", torch.device(DEVICE))
    with (out / "gpu.log").open("w") as log:
        for step in steps:
            seconds = max(1.0, step.share * (end - time.monotonic()))
            outcomes.append(run_step(step, seconds, variables, log))
            save(out / "gpu.json", {**told, "steps": [asdict(outcome) for outcome in outcomes]})
    for outcome in outcomes:
        print(f"{outcome.name:10} {outcome.returncode:4} {outcome.seconds:6.0f} s  {outcome.summary}")
    return int(any(outcome.returncode for outcome in outcomes))


def main(argv: list[str] | None = None) -> int:
    """Refuses a machine without a GPU, where a benchmark of it would mean nothing."""
    parser = option_parser(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu", help="%(default)s by default")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all steps; %(default)s by default")
    parser.add_argument("--peers", type=Path, help="folder with peers' packages, added to PYTHONPATH")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=_STEPS, help="of %(choices)s")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    if args.peers and not args.peers.is_dir():
        parser.error(f"--peers {args.peers}: no such folder")
    out = args.out.resolve()  # the steps run in the repository's folder
    out.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in steps(out) if args.only is None or step.name in args.only]
    return run(chosen, out, args.budget, args.peers)


if __name__ == "__main__":
    sys.exit(main())
