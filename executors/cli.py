"""The command line: `paged COMMAND`. A command's module is loaded when it is called, so that help takes no torch."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import paged
from paged.errors import PagedError

RECALL = Path(__file__).resolve().parent.parent / "models" / "recall"

# command -> (module, what it does). A module has DESCRIPTION, add_arguments(parser) and run(args) -> exit code. Those
# of benchmarks are known by their names alone, as `bench` imports this package.
_COMMANDS = {
    "bench": ("paged.executors.commands.bench", "run a benchmark, or all of them"),
    "generate": ("paged.executors.commands.generate", "answer prompts with a checkpoint"),
    "info": ("paged.executors.commands.info", "say what this machine has and what runs on it"),
    "inspect": ("paged.executors.commands.inspect", "describe a checkpoint, or draw a cache at work"),
    "verify": ("paged.bench.verify", "check every kernel on this machine against float64"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 1 for a named error or a result that is wrong, 2 for arguments that do not parse, 130 when
    interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    try:
        return int(args.run(args))
    except PagedError as error:
        print(f"paged: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands, with the arguments of the one that is called."""
    parser = argparse.ArgumentParser(prog="paged", description="Paged attention and fused MoE in Triton.")
    parser.add_argument("--version", action="version", version=f"paged {paged.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in argv[:1]:
            module = importlib.import_module(module_name)
            command.description = module.DESCRIPTION
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
