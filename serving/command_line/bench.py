"""`paged bench`: run one benchmark of `paged.bench`, or several with a report."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paged.errors import UnsupportedError
from paged.executors.progress import tracked
from paged.serving.command_line.safe_output import print_json


@dataclass(frozen=True)
class Preset:
    """Benchmark preset. module: module in `paged.bench`, imported by name to avoid a cycle. arguments: defaults."""

    module: str
    summary: str
    arguments: tuple[str, ...] = ()
    needs_gpu: bool = False


PRESETS = {
    "quick": Preset(
        "kernels.run", "every kernel at small sizes, a minute", ("--small", "--repeats", "5", "--budget", "60")
    ),
    "kernels": Preset("kernels.run", "every kernel against its hardware limit"),
    "micro": Preset("micro.test_micro", "kernels and cache through pytest-benchmark, whose options it takes"),
    "attention": Preset("attention.run", "attention against other packages"),
    "moe": Preset("moe.run", "mixture of experts against other packages"),
    "cache": Preset("cache.run", "host time of the KV cache against vLLM's"),
    "engine": Preset("engine.run", "the engine against transformers' continuous batching"),
    "compile": Preset("compilation.compile", "compile every kernel ahead of time, without a GPU"),
    "tune-attention": Preset("attention.tune", "time the tile sizes of attention", needs_gpu=True),
    "tune-moe": Preset("moe.tune", "find the MoE tile sizes for a model and write them", needs_gpu=True),
    "compare": Preset("compare", "two results or two checkouts: ratios, and whether a case became slower"),
    "trace-set": Preset("traces.write", "write our rows or recorded calls in the format of FlashInfer-Bench"),
    "report": Preset("report.build", "a page of tables from results written with --json"),
}
# Presets that `paged bench all` runs, most important first.
_ALL = ("attention", "moe", "kernels", "engine", "cache")

DESCRIPTION = (
    "Run one benchmark. All arguments after its name go to it; `paged bench PRESET --help` lists them. "
    "Most take --json FILE, --only NAME and --repeats N. Without a preset, list the presets. `all` runs "
    f"{', '.join(_ALL)} and writes a report."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the preset and its arguments."""
    parser.add_argument("--json", action="store_true", help="list the presets as JSON; after a preset: --json FILE")
    text = "time a recorded call, FILE, beside peers (see paged.record); all arguments after it go there"
    parser.add_argument("--replay", nargs=argparse.REMAINDER, metavar="FILE", help=text)
    text = "time the calls and solutions of a FlashInfer-Bench trace set; all arguments after it go there"
    parser.add_argument("--trace", nargs=argparse.REMAINDER, metavar="PATH", help=text)
    parser.add_argument("preset", nargs="?", choices=[*PRESETS, "all"], help="what to run", metavar="PRESET")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the preset", metavar="...")


def run(args: argparse.Namespace) -> int:
    """List the presets, run a preset, or run all.

    Raises:
        UnsupportedError: the preset needs a GPU or package that is missing.
    """
    for option, arguments in (("--replay", args.replay), ("--trace", args.trace)):
        if arguments is not None:
            return _run_module(option, "verification.speed", [option, *arguments])
    if args.preset is None and args.json:
        print_json({name: asdict(preset) for name, preset in PRESETS.items()})
        return 0
    if args.preset is None:
        for name, preset in PRESETS.items():
            note = " (GPU)" if preset.needs_gpu else ""
            print(f"{name:15} {preset.summary}{note}")
        print(f"{'all':15} {', '.join(_ALL)}, each in its own process, and a report")
        return 0
    if args.preset == "all":
        return _run_all(args.arguments)
    preset = PRESETS[args.preset]
    if preset.needs_gpu:
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError(f"paged bench {args.preset} needs a GPU, and torch finds none")
    return _run_module(args.preset, preset.module, [*preset.arguments, *args.arguments])


def _run_module(name: str, path: str, arguments: list[str]) -> int:
    """Run a module of `paged.bench` as `paged bench NAME`."""
    try:
        module = importlib.import_module(f"paged.bench.{path}")
    except ImportError as error:
        raise UnsupportedError(f"paged bench {name} needs {error.name}, which is not installed") from error
    # argparse reads the command's name for help and errors from sys.argv[0].
    before, sys.argv[0] = sys.argv[0], f"paged bench {name}"
    try:
        return module.main(arguments) or 0
    finally:
        sys.argv[0] = before


def _run_all(arguments: Sequence[str]) -> int:
    """Run the benchmarks one after the other, each in its own process; return the worst exit code."""
    parser = argparse.ArgumentParser(prog="paged bench all", description="Run the benchmarks and write a report.")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for results; %(default)s")
    parser.add_argument("--repeats", type=int, help="samples per case")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    repeats = ["--repeats", str(options.repeats)] if options.repeats else []
    code = 0
    written = []
    for name in tracked(_ALL, desc="benchmarks", unit="benchmark"):
        file = options.out / f"{name}.json"
        code = max(code, _call(name, "--json", str(file), *repeats))
        if file.is_file():
            written.append(str(file))
    if written:
        code = max(code, _call("report", *written, "--out", str(options.out)))
    return code


def _call(*arguments: str) -> int:
    """Run a benchmark in a process and return its exit code; an end by a signal counts as failure."""
    return abs(subprocess.run([sys.executable, "-m", "paged", "bench", *arguments], check=False).returncode)
