"""Run everything for a machine with a GPU, in slices of nine minutes, each useful alone.

    python -m bench.gpu [--slice N ...] [--results PATH ...] [--out DIR] [--budget SECONDS] [--peers DIR]
        [--only STEP ...] [--cases TEXT]      or  make gpu SLICE=N

Slice 1 has a little of everything that matters most; 2 the engine and tiles; 3 attention, experts and kernels against
peers; 4 the other tests and more tiles; 5 sanitizers. The first three are enough. They need torch, triton and pytest,
and install nothing. Each step is a process with a share of its slice's remaining time. If a step fails or runs out of
time, the others still run, and its results so far are kept. If a benchmark's process ends early, loses the GPU or
hangs, another process continues with the remaining cases.

DIR gets report.html and, after every step, results-N.tar.xz with the results of each device, tuned tiles, passed tests
and the log. At the end it gets Triton's cache in kernels-1.tar.xz, kernels-2.tar.xz, ..., of at most 15 MiB each. Pass
all of these files to the next slice as `--results`, on this machine or another: cases with rows and passed tests are
skipped, refused cases come last, and nothing is compiled twice. `--results build/gpu` continues from that folder.
Without `--results`, everything starts anew.
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TextIO

import torch

from paged.bench.benchmark import DEVICE, HUNG, environment, option_parser, save
from paged.bench.timing import device_name

ROOT = Path(__file__).resolve().parents[1]
# How to run a module, and the folder of results until they are packed. A test's emulated device replaces both.
PYTHON: Sequence[str] = (sys.executable, "-m")
WORK = ROOT / "build" / "gpu"
_CACHE = "cache"  # Triton's cache, in WORK
# Seconds without progress after which a benchmark's case counts as hung. Even a step of a minute then has time left for
# other cases.
CASE_SECONDS = 45.0
_SLICES = range(1, 6)
# Number of test processes. Tests mostly compile, so this many keep most of 16 cores busy while they share the GPU.
_TEST_PROCESSES = 14
# Skip tests without a Triton kernel, and tests of kernels with faults, which may end the device's context.
_SKIPPED_TESTS = r"[\[-]torch[\]-]|pytorch|numba|test_checks_see_the_fault|test_plan.py"
# A benchmark starts no case this long before its end, because most cases take a few seconds.
_LAST_CASE_SECONDS = 10.0
# Largest number of processes that are started for a benchmark, one after another, if each ends early.
_MAX_PROCESSES = 6
# Seconds at the end of a slice that are kept for packing its results.
_PACKING_SECONDS = 15.0
# Bytes from which on an archive takes no more kernels. It may exceed them by one kernel and by the compressor's buffer,
# less than a MiB.
_ARCHIVE_BYTES = 13 << 20
# Messages of Triton, LLVM and ptxas about kernels, which go to the log alone.
_COMPILER_WARNING = re.compile(r"ptxas|wgmma|MLIR|(loc\(.*\)|\w:\d+:\d+): (warning|remark):")
# Sections of ncu: limits, reasons for stalls, L2 and shared memory, registers and programs per SM.
_NCU_SECTIONS = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "MemoryWorkloadAnalysis",
                 "MemoryWorkloadAnalysis_Tables", "Occupancy", "LaunchStats")  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A process of a slice.

    share: share of the slice's time. command: returns the command for a number of seconds. resumes: whether the step
    is a benchmark, which the same command continues if its process ended early.
    """

    slice: int
    name: str
    share: float
    command: Callable[[float], list[str]]
    resumes: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a step. returncode: negative after a signal, SIGKILL at the limit. summary: the last printed line."""

    name: str
    limit_s: float
    seconds: float
    returncode: int
    summary: str


def results_folder(work: Path) -> Path:
    """Return the folder for results of this device; other devices have folders beside it."""
    return work / re.sub(r"\W+", "-", device_name(torch.device(DEVICE)))


def steps(work: Path, out: Path, cases: str = "") -> list[Step]:
    """Return the steps of all slices; their shares are seconds of 540.

    cases: text; if given, return only benchmarks, and only cases whose name contains it.
    """
    folder = results_folder(work)

    def budget(seconds: float) -> list[str]:
        return ["--budget", str(max(seconds / 2, seconds - _LAST_CASE_SECONDS))]

    def bench(number: int, name: str, share: float, module: str, *options: str, file: str = "") -> Step:
        """file: name of the results without .json; by default the module's name, for all slices."""
        file = file or module.replace(".run", "").replace(".", "_")

        def command(seconds: float) -> list[str]:
            path = folder / f"{file}.json"
            words = [*PYTHON, f"paged.bench.{module}", "--json", str(path), "--resume"]
            words += ["--case-limit", str(CASE_SECONDS), *budget(seconds), *options]
            if cases:
                words += ["--cases", cases]
            return words

        return Step(number, name, share, command, resumes=True)

    def plain(number: int, name: str, share: float, *command: str) -> Step:
        return Step(number, name, share, lambda _: list(command))

    def tests(number: int, share: float, *paths: str, name: str = "tests") -> Step:
        options = ["--skip", _SKIPPED_TESTS, "--done", str(folder / "passed.txt")]
        suite = [*PYTHON, "paged.bench.suite", "--processes", str(_TEST_PROCESSES), *options]
        return plain(number, name, share, *suite, *(f"tests/{path}" for path in paths))

    def compiled(number: int, share: float) -> Step:
        """Compile what this slice launched on an emulated device, in the order of its steps."""
        files = sorted(work.glob(f"variants/{number}.*"), key=lambda path: path.stat().st_mtime)
        ahead = [sys.executable, "-m", "paged.bench.compilation.ahead", *map(str, files)]
        return Step(number, "compile", share, lambda seconds: [*ahead, *budget(seconds)])

    def profile(name: str, kernel: str, module: str, case: str) -> list[Step]:
        """Profile the first two launches of a kernel in a case by ncu; return no step if ncu is missing.

        Two launches, because prompts also launch a tile for short sequences, and experts launch two products.
        """
        ncu = _tool("ncu")
        if ncu is None:
            return []
        options = ["--clock-control", "none", "--launch-count", "2", "--print-details", "all"]
        for section in _NCU_SECTIONS:
            options += ["--section", section]
        options += ["--force-overwrite", "--log-file", str(folder / f"{name}.txt"), "--kernel-name", kernel]
        program = [*PYTHON, f"paged.bench.{module}", "--repeats", "2", "--only", case]
        return [plain(1, name, 20, ncu, *options, *program)]

    def report(number: int) -> Step:
        command = [*PYTHON, "paged.bench.report.build", "--out", str(out)]
        return Step(number, "report", 15, lambda _: [*command, *map(str, sorted(work.glob("*/*.json")))])

    def tune(number: int, share: float, *tokens: str) -> Step:
        options = ["--model", "Qwen3-30B-A3B", "--tokens", *tokens, "--out", str(folder / "tiles")]
        return bench(number, "tune", share, "moe.tune", *options, file=f"moe_tune_{number}")

    memcheck = _tool("compute-sanitizer")
    gpu = ("--device", "cuda")
    all_steps = [
        bench(1, "ceilings", 20, "kernels.run", *gpu, "--only", "rms_norm"),
        compiled(1, 70),
        bench(1, "verify", 75, "verification.run", *gpu),
        bench(1, "attention", 75, "attention.run", *gpu),
        bench(1, "stages", 45, "attention.tune", "--only", "chosen with"),
        bench(1, "moe", 35, "moe.run", *gpu, "--only", "Qwen3-30B-A3B.balanced"),
        tests(1, 30, "models/test_step_graphs.py", name="graphs"),
        bench(1, "engine", 75, "engine.run", *gpu, "--only", "decode.Qwen3-8B"),
        *profile("ncu_decode", "_attention_kernel", "attention.run", "decode.64x8k.h32_8.b64"),
        *profile("ncu_prefill", "_attention_kernel", "attention.run", "prefill.4x4k.h32_8.b64"),
        *profile("ncu_experts", "_expert_gemm_kernel", "moe.run", "Qwen3-30B-A3B.balanced.16384"),
        tests(1, 45, *(f"kernels/{family}" for family in ("attention", "cache", "moe"))),
        report(1),
        compiled(2, 40),
        bench(2, "engine", 310, "engine.run", *gpu),
        tune(2, 120, "64", "4096"),
        bench(2, "tune_attention", 65, "attention.tune"),
        report(2),
        compiled(3, 50),
        bench(3, "attention", 190, "attention.run", *gpu),
        bench(3, "moe", 190, "moe.run", *gpu),
        bench(3, "kernels", 105, "kernels.run", *gpu),
        report(3),
        tests(4, 150, *(f"kernels/{family}" for family in ("layers", "lora", "quantization", "sampling"))),
        tune(4, 200, "16", "1024", "16384"),
        bench(4, "tune_attention", 185, "attention.tune"),
        report(4),
        # Under the sanitizer, one kernel takes 33 s to compile.
        bench(5, "sanitize", 330, "verification.sanitize", "--case-limit", "120"),
    ]
    if memcheck is not None:
        verify = [*PYTHON, "paged", "verify", "--quick"]
        all_steps.append(plain(5, "memcheck", 200, memcheck, "--error-exitcode", "9", *verify))
    all_steps.append(report(5))
    if cases:
        return [step for step in all_steps if step.resumes and step.name != "ceilings"]
    return all_steps


def _tool(name: str) -> str | None:
    """Find a program of the CUDA toolkit, whose folder need not be on PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def run_step(step: Step, seconds: float, variables: Mapping[str, str], log: TextIO) -> Outcome:
    """Run a step and pass its output on line by line; at its limit, kill the step and its children."""
    start = time.monotonic()
    end = start + seconds
    for _ in range(_MAX_PROCESSES):
        remaining = end - time.monotonic()
        returncode, summary = _run_process(step.command(remaining), remaining, variables, log)
        if returncode in (0, 1) or not step.resumes or end - time.monotonic() < _LAST_CASE_SECONDS:
            break
    name = f"{step.slice}.{step.name}"
    return Outcome(name, round(seconds, 1), round(time.monotonic() - start, 1), returncode, summary)


def _run_process(command: Sequence[str], seconds: float, variables: Mapping[str, str], log: TextIO) -> tuple[int, str]:
    """Return the exit code and the last line. The process's children end with it, or at the limit."""
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

    def end_group() -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with suppress(ProcessLookupError):  # a compiler that survives would keep the output pipe open
            os.killpg(process.pid, signal.SIGKILL)

    watcher = threading.Thread(target=end_group)
    watcher.start()
    try:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if not _COMPILER_WARNING.search(line):
                print(line, end="", flush=True)
                summary = line.strip() or summary
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        returncode = process.wait()
        watcher.join()
    return returncode, summary


def pack_results(work: Path, path: Path) -> None:
    """Write all results, without compiled kernels, to one file, atomically."""
    draft = path.with_suffix(".part")
    with tarfile.open(draft, "w:xz", preset=1) as archive:
        for member in sorted(work.iterdir()):
            if member.name != _CACHE:
                archive.add(member, member.name)
    os.replace(draft, path)


def pack_kernels(work: Path, out: Path) -> list[Path]:
    """Write the compiled kernels to files of at most 15 MiB, and replace earlier files."""
    for path in out.glob("kernels-*.tar.xz"):
        path.unlink()
    waiting = sorted((work / _CACHE).glob("*"))
    paths: list[Path] = []
    while waiting:
        paths.append(out / f"kernels-{len(paths) + 1}.tar.xz")
        with paths[-1].open("wb") as file, tarfile.open(fileobj=file, mode="w:xz", preset=1) as archive:
            while waiting and file.tell() < _ARCHIVE_BYTES:
                member = waiting.pop(0)
                archive.add(member, f"{_CACHE}/{member.name}")
    return paths


def unpack(paths: Sequence[Path], work: Path) -> None:
    """Unpack archives so that another run can continue."""
    for path in paths:
        with tarfile.open(path) as archive:
            archive.extractall(work, filter="data")
    for group in (work / _CACHE).rglob("__grp__*"):  # this file has absolute paths of a kernel's files
        paths_of_files = json.loads(group.read_text())["child_paths"]
        for name in paths_of_files:
            paths_of_files[name] = str(group.with_name(name))
        group.write_text(json.dumps({"child_paths": paths_of_files}))


def requeue(folder: Path) -> None:
    """Put cases that were refused, or that ran at the time limit, behind the others.

    Cases that hung stay refused, because each would take most of a minute again.
    """
    for path in folder.glob("*.json"):
        results = json.loads(path.read_text())
        if "not_run" not in results:
            continue
        hung = {}
        again = []
        for name, reason in results["refused"].items():
            if reason.startswith(HUNG):
                hung[name] = reason
            else:
                again.append(name)
        if "running" in results:
            again.append(results.pop("running"))
        first = [name for name in results["not_run"] if name not in again]
        save(path, {**results, "refused": hung, "not_run": first + again})


def run(steps: Sequence[Step], work: Path, out: Path, budget: float, peers: Path | None = None) -> int:
    """Run the steps, each slice within `budget` seconds; return 1 if a step failed.

    gpu.json and the results are written after each step, the kernels at the end. A step that reached its time limit has
    not failed.
    """
    paths = [str(ROOT)]
    if peers:
        paths.append(str(peers.resolve()))
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    # One thread: the references' tensors are so small that waiting for other threads takes 20 times as long.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"TRITON_CACHE_DIR": str(work / _CACHE), "TRITON_STORE_BINARY_ONLY": "1"}
    folder = results_folder(work)
    folder.mkdir(exist_ok=True)
    about, path = environment("gpu", torch.device(DEVICE)), folder / "gpu.json"
    before = []
    if path.exists():
        before = json.loads(path.read_text())["steps"]
    outcomes: list[Outcome] = []
    written: list[Path] = []
    with (work / "gpu.log").open("a") as log:
        for number, members in groupby(steps, lambda step: step.slice):
            requeue(folder)
            written.append(out / f"results-{number}.tar.xz")
            end, waiting = time.monotonic() + budget - _PACKING_SECONDS, list(members)
            while waiting:
                share = waiting[0].share / sum(step.share for step in waiting)
                seconds = max(1.0, share * (end - time.monotonic()))
                outcomes.append(run_step(waiting.pop(0), seconds, variables, log))
                save(path, {**about, "steps": [*before, *map(asdict, outcomes)]})
                pack_results(work, written[-1])
    written += pack_kernels(work, out)
    for archive in written:
        print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")
    for outcome in outcomes:
        print(f"{outcome.name:16} {outcome.returncode:4} {outcome.seconds:6.0f} s  {outcome.summary}")
    has_failed = [outcome.returncode not in (0, -signal.SIGKILL) for outcome in outcomes]
    return int(any(has_failed))


def main(argv: list[str] | None = None) -> int:
    """Run the steps that the arguments choose; refuse a machine without a GPU."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--slice", type=int, nargs="+", choices=_SLICES, default=_SLICES, help="slices to run; default: all"
    )
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[], metavar="PATH", help=f"archives to continue from, or {WORK}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "bench" / "results" / "gpu",
        help="folder of the results; default: %(default)s",
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds per slice; default: %(default)s")
    parser.add_argument("--peers", type=Path, help="folder with peers' packages, added to PYTHONPATH")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only steps with these names")
    parser.add_argument(
        "--cases", default="", metavar="TEXT", help="run only benchmarks, and only cases whose name contains this"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    if args.peers and not args.peers.is_dir():
        parser.error(f"--peers {args.peers}: no such folder")
    goes_on = False
    archives = []
    for path in args.results:
        if path.resolve() == WORK:
            goes_on = True
        elif path.is_file():
            archives.append(path)
        else:
            parser.error(f"--results {path}: no such file")
    if not goes_on:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()  # the steps run in the repository's folder
    out.mkdir(parents=True, exist_ok=True)
    unpack(archives, WORK)
    chosen = [step for step in steps(WORK, out, args.cases) if step.slice in args.slice]
    if args.only:
        chosen = [step for step in chosen if step.name in args.only]
    if not chosen:
        parser.error(f"no step of {' '.join(map(str, args.slice))} is named {' or '.join(args.only)}")
    return run(chosen, WORK, out, args.budget, args.peers)


if __name__ == "__main__":
    sys.exit(main())
