"""Run everything for a machine with a GPU, in slices of nine minutes, each useful alone.

    python -m bench.gpu [--slice N ...] [--results ARCHIVE] [--out DIR] [--budget SECONDS] [--peers DIR]
        [--only STEP ...] [--cases TEXT]      or  make gpu SLICE=N

Slices: 1 correctness and the first attention cases; 2 the engine; 3 attention and experts against peers; 4 all kernels,
then tiles; 5 sanitizers. Needs torch, triton and pytest, and installs nothing. Each step is a process with a share of
its slice's remaining time. If one fails or runs out of time, the others still run, and its results so far are kept. If
a benchmark's process ends early or loses the GPU, another one continues with the remaining cases.

DIR gets report.html and, after every step, slice-N.tar.xz with results, tuned tiles, the log and Triton's cache. Pass
it to the next slice as `--results`, on this machine or another: cases with rows and passed tests are skipped, refused
cases come last, and nothing is compiled twice. Without `--results`, everything starts anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TextIO

import torch

from paged.bench.benchmark import DEVICE, environment, option_parser, save

ROOT = Path(__file__).resolve().parents[1]
# How to run a module, and the folder of results until they are packed; an emulated device replaces both.
PYTHON: Sequence[str] = (sys.executable, "-m")
WORK = ROOT / "build" / "gpu"
_SLICES = range(1, 6)
# Compiling is most of the tests' time; so many processes keep most of 16 cores busy with it and share the GPU.
_TEST_PROCESSES = 14
# Tests without a Triton kernel, and those of kernels with faults, which may end the device's context.
_SKIPPED_TESTS = r"[\[-]torch[\]-]|pytorch|numba|test_checks_see_the_fault|test_plan.py"
# A benchmark starts no case this long before its end: the slowest takes as long with its compilation.
_LAST_CASE_SECONDS = 30.0
# Processes that a benchmark may use up.
_MOST_PROCESSES = 6
# What compilers say of kernels, Triton, LLVM and ptxas: it is in the log alone.
_COMPILER_WARNING = re.compile(r"ptxas|wgmma|MLIR|(loc\(.*\)|\w:\d+:\d+): (warning|remark):")


@dataclass(frozen=True)
class Step:
    """share: of its slice's time. command: takes its seconds. resumes: whether it is a benchmark, continued by the same
    command if its process ended early."""

    slice: int
    name: str
    share: float
    command: Callable[[float], list[str]]
    resumes: bool = False


@dataclass(frozen=True)
class Outcome:
    """returncode: negative after a signal, SIGKILL at the time limit. summary: the last printed line."""

    name: str
    limit_s: float
    seconds: float
    returncode: int
    summary: str


def steps(work: Path, out: Path, cases: str = "") -> list[Step]:
    """Return the steps of all slices; their shares are seconds of 540. cases: only benchmarks, and only cases whose
    name contains this."""

    def budget(seconds: float) -> list[str]:
        return ["--budget", str(max(seconds / 2, seconds - _LAST_CASE_SECONDS))]

    def bench(number: int, name: str, share: float, module: str, *options: str) -> Step:
        def command(seconds: float) -> list[str]:
            only = ["--only", cases] if cases else []
            path = work / f"{module.replace('.run', '').replace('.', '_')}.json"
            return [
                *PYTHON,
                f"paged.bench.{module}",
                "--json",
                str(path),
                "--resume",
                *budget(seconds),
                *options,
                *only,
            ]

        return Step(number, name, share, command, resumes=True)

    def plain(number: int, name: str, share: float, *command: str, is_timed: bool = False) -> Step:
        return Step(number, name, share, lambda seconds: [*command, *(budget(seconds) if is_timed else [])])

    def tests(number: int, name: str, share: float, *paths: str) -> Step:
        options = ["--skip", _SKIPPED_TESTS, "--done", str(work / "passed.txt")]
        suite = [*PYTHON, "paged.bench.suite", "--processes", str(_TEST_PROCESSES), *options]
        return plain(number, name, share, *suite, *(f"tests/{path}" for path in paths))

    def compiled(number: int, *names: str) -> Step:
        """Compile what these programs launched on an emulated device."""
        files = [str(path) for name in names if (path := work / "variants" / name).exists()]
        ahead = [sys.executable, "-m", "paged.bench.compilation.ahead"]
        return plain(number, "compile", 60, *ahead, *files, is_timed=True)

    def report(number: int) -> Step:
        command = [*PYTHON, "paged.bench.report.build", "--out", str(out)]
        return Step(number, "report", 10, lambda _: [*command, *map(str, sorted(work.glob("*.json")))])

    verify = [*PYTHON, "paged", "verify", "--quick"]
    tune = [*PYTHON, "paged.bench.moe.tune", "--model", "Qwen3-30B-A3B", "--tokens", "64", "4096"]
    memcheck = shutil.which("compute-sanitizer")
    gpu = ("--device", "cuda")
    found = [
        bench(1, "first", 45, "kernels.run", *gpu, "--only", "rms_norm"),
        compiled(1, "paged", "attention"),
        plain(1, "verify", 60, *verify),
        tests(1, "graphs", 60, "models/test_step_graphs.py"),
        tests(1, "tests", 200, *(f"kernels/{family}" for family in ("attention", "cache", "moe"))),
        bench(1, "attention", 105, "attention.run", *gpu),
        report(1),
        compiled(2, "engine"),
        bench(2, "engine", 470, "engine.run", *gpu),
        report(2),
        compiled(3, "attention", "moe"),
        bench(3, "attention", 200, "attention.run", *gpu),
        bench(3, "moe", 270, "moe.run", *gpu),
        report(3),
        compiled(4, "kernels", "attention.tune"),
        bench(4, "kernels", 100, "kernels.run", *gpu),
        tests(4, "tests", 110, *(f"kernels/{family}" for family in ("layers", "lora", "quantization", "sampling"))),
        plain(4, "tune", 180, *tune, "--out", str(work / "tiles"), is_timed=True),
        bench(4, "tune_attention", 80, "attention.tune"),
        report(4),
        bench(5, "sanitize", 330, "verification.sanitize"),
        *([plain(5, "memcheck", 200, memcheck, "--error-exitcode", "9", *verify)] if memcheck else []),
        report(5),
    ]
    return [step for step in found if not cases or (step.resumes and step.name != "first")]


def run_step(step: Step, seconds: float, variables: Mapping[str, str], log: TextIO) -> Outcome:
    """Run a step, passing its output on line by line; at its limit it is killed with all that it started."""
    start = time.monotonic()
    for _ in range(_MOST_PROCESSES):
        left = seconds - (time.monotonic() - start)
        returncode, summary = _run_process(step.command(left), left, variables, log)
        left = seconds - (time.monotonic() - start)
        if returncode in (0, 1) or not step.resumes or left < _LAST_CASE_SECONDS:
            break
    name = f"{step.slice}.{step.name}"
    return Outcome(name, round(seconds, 1), round(time.monotonic() - start, 1), returncode, summary)


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


def pack(work: Path, path: Path) -> None:
    """Write a folder to one file, atomically."""
    draft = path.with_suffix(".part")
    with tarfile.open(draft, "w:xz", preset=1) as archive:
        archive.add(work, ".")
    os.replace(draft, path)


def unpack(path: Path, work: Path) -> None:
    """Unpack an archive so that another run can continue. Cases that were refused, or running at the end, come last."""
    with tarfile.open(path) as archive:
        archive.extractall(work, filter="data")
    for group in (work / "cache").rglob("__grp__*"):  # in which Triton names the files of a kernel by their whole paths
        files = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.with_name(name)) for name in files}}))
    for file in work.glob("*.json"):
        results = json.loads(file.read_text())
        if "not_run" in results:
            last = [*results["refused"], *filter(None, [results.pop("running", None)])]
            first = [name for name in results["not_run"] if name not in last]
            save(file, {**results, "refused": {}, "not_run": first + last})


def run(steps: Sequence[Step], work: Path, out: Path, budget: float, peers: Path | None = None) -> int:
    """Run the steps, those of a slice within `budget` seconds; write gpu.json and the slice's archive after each.

    Returns 1 if a step failed; one that was cut at its limit has not.
    """
    paths = [str(ROOT), *([str(peers.resolve())] if peers else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread: the references work on tensors so small that waiting for other threads takes 20 times as long.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"TRITON_CACHE_DIR": str(work / "cache"), "TRITON_STORE_BINARY_ONLY": "1"}
    told, path = environment("gpu", torch.device(DEVICE)), work / "gpu.json"
    before = json.loads(path.read_text())["steps"] if path.exists() else []
    outcomes: list[Outcome] = []
    with (work / "gpu.log").open("a") as log:
        for number, members in groupby(steps, lambda step: step.slice):
            end, waiting = time.monotonic() + budget, list(members)
            while waiting:
                share = waiting[0].share / sum(step.share for step in waiting)
                seconds = max(1.0, share * (end - time.monotonic()))
                outcomes.append(run_step(waiting.pop(0), seconds, variables, log))
                save(path, {**told, "steps": [*before, *map(asdict, outcomes)]})
                pack(work, archive := out / f"slice-{number}.tar.xz")
            print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")
    for outcome in outcomes:
        print(f"{outcome.name:16} {outcome.returncode:4} {outcome.seconds:6.0f} s  {outcome.summary}")
    return int(any(outcome.returncode not in (0, -signal.SIGKILL) for outcome in outcomes))


def main(argv: list[str] | None = None) -> int:
    """Refuses a machine without a GPU, where a benchmark of it would mean nothing."""
    parser = option_parser(__doc__)
    parser.add_argument("--slice", type=int, nargs="+", choices=_SLICES, default=_SLICES, help="all by default")
    parser.add_argument("--results", type=Path, metavar="ARCHIVE", help="of an earlier slice, to continue from")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu", help="%(default)s by default")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds per slice; %(default)s by default")
    parser.add_argument("--peers", type=Path, help="folder with peers' packages, added to PYTHONPATH")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only steps with these names")
    parser.add_argument(
        "--cases", default="", metavar="TEXT", help="only benchmarks, and cases whose name contains this"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    if args.peers and not args.peers.is_dir():
        parser.error(f"--peers {args.peers}: no such folder")
    if args.results and not args.results.is_file():
        parser.error(f"--results {args.results}: no such file")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    out = args.out.resolve()  # the steps run in the repository's folder
    out.mkdir(parents=True, exist_ok=True)
    if args.results:
        unpack(args.results, WORK)
    chosen = [
        step
        for step in steps(WORK, out, args.cases)
        if step.slice in args.slice and (args.only is None or step.name in args.only)
    ]
    if not chosen:
        parser.error(f"no step of {' '.join(map(str, args.slice))} is named {' or '.join(args.only)}")
    return run(chosen, WORK, out, args.budget, args.peers)


if __name__ == "__main__":
    sys.exit(main())
