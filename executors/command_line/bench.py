"""`paged bench`: the benchmarks of `paged.bench`, each by its name, or several of them with a report."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paged.errors import UnsupportedError
from paged.executors.command_line.safe_output import print_json
from paged.executors.progress import tracked


@dataclass(frozen=True)
class Preset:
    """module: of `paged.bench`, known by its name alone, as it imports this package. arguments: before the caller's."""

    module: str
    summary: str
    arguments: tuple[str, ...] = ()
    needs_gpu: bool = False


PRESETS = {
    "quick": Preset(
        "kernels.run", "every kernel at small sizes, a minute", ("--small", "--repeats", "5", "--budget", "60")
    ),
    "kernels": Preset("kernels.run", "every kernel against its hardware limit"),
    "attention": Preset("attention.run", "attention beside its peers"),
    "moe": Preset("moe.run", "experts beside their peers"),
    "cache": Preset("cache.run", "the cache's host time beside vLLM's"),
    "engine": Preset("engine.run", "the engine beside transformers' continuous batching"),
    "compile": Preset("compilation.compile", "every kernel compiled ahead of time, without a GPU"),
    "schedule": Preset("attention.schedule", "how evenly attention's work fills a chip"),
    "tune-attention": Preset("attention.tune", "attention's tiles beside one another", needs_gpu=True),
    "tune-moe": Preset("moe.tune", "finds and writes the experts' tiles for a model", needs_gpu=True),
    "report": Preset("report.build", "a page of tables of what the others wrote with --json"),
}
# What `all` runs, by importance.
_ALL = ("attention", "moe", "kernels", "engine", "cache")

DESCRIPTION = (
    "Runs one benchmark; all that follows its name goes to it, and `paged bench PRESET --help` says what it takes. "
    "Most take --json FILE, --only NAME and --repeats N. Without a preset it lists them; `all` runs "
    f"{', '.join(_ALL)} and writes a report."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The preset, and what goes to it."""
    parser.add_argument("--json", action="store_true", help="list the presets as JSON; after a preset: --json FILE")
    parser.add_argument("preset", nargs="?", choices=[*PRESETS, "all"], help="what to run", metavar="PRESET")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the preset", metavar="...")


def run(args: argparse.Namespace) -> int:
    """List, or run one or all.

    Raises:
        UnsupportedError: the preset needs a GPU, or a package, that is not here.
    """
    if args.preset is None and args.json:
        print_json({name: asdict(preset) for name, preset in PRESETS.items()})
        return 0
    if args.preset is None:
        for name, preset in PRESETS.items():
            print(f"{name:15} {preset.summary}{' (GPU)' if preset.needs_gpu else ''}")
        print(f"{'all':15} {', '.join(_ALL)}, each in a process of its own, and a report")
        return 0
    if args.preset == "all":
        return _run_all(args.arguments)
    preset = PRESETS[args.preset]
    if preset.needs_gpu:
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError(f"paged bench {args.preset} runs on a GPU alone, and torch sees none")
    try:
        module = importlib.import_module(f"paged.bench.{preset.module}")
    except ImportError as error:
        raise UnsupportedError(f"paged bench {args.preset} needs {error.name}, which is not installed") from error
    # Help and errors begin with the name of the command, which the parser takes from there.
    before, sys.argv[0] = sys.argv[0], f"paged bench {args.preset}"
    try:
        return module.main([*preset.arguments, *args.arguments]) or 0
    finally:
        sys.argv[0] = before


def _run_all(arguments: Sequence[str]) -> int:
    """Run one after the other, each in a process of its own; the worst exit code, when all had their turn."""
    parser = argparse.ArgumentParser(prog="paged bench all", description="Runs the benchmarks and writes a report.")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for results; %(default)s")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, help="samples a case")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    given = ["--only", options.only, *(["--repeats", str(options.repeats)] if options.repeats else [])]
    code = 0
    for name in tracked(_ALL, desc="benchmarks", unit="benchmark"):
        code = max(code, _call(name, "--json", str(options.out / f"{name}.json"), *given))
    written = [str(path) for name in _ALL if (path := options.out / f"{name}.json").is_file()]
    return max(code, _call("report", *written, "--out", str(options.out))) if written else code


def _call(*arguments: str) -> int:
    """Run a benchmark in a process; what a signal ended counts as failed, too."""
    return abs(subprocess.run([sys.executable, "-m", "paged", "bench", *arguments], check=False).returncode)
