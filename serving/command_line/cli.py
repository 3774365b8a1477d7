"""The command line: `paged COMMAND`. A command's module is imported when it runs, so that help needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import paged
from paged.errors import PagedError
from paged.serving.command_line.safe_output import SafeStream, drop_unwritten, safe_output
from paged.tools.printable import one_line

RECALL = Path(__file__).resolve().parents[2] / "models" / "recall"

# command -> (module, summary). A module has DESCRIPTION, add_arguments(parser) and run(args) -> exit code.
_COMMANDS = {
    "bench": ("paged.serving.command_line.bench", "run one benchmark, or all"),
    "generate": ("paged.serving.command_line.generate", "answer prompts with a checkpoint"),
    "info": ("paged.serving.command_line.info", "show this machine's hardware, versions, backend and features"),
    "inspect": ("paged.serving.command_line.inspect", "describe a checkpoint, or draw a KV cache"),
    "quantize": ("paged.serving.command_line.quantize", "write a quantised copy of a checkpoint"),
    "serve": ("paged.serving.command_line.serve", "serve a checkpoint by HTTP"),
    "verify": ("paged.serving.command_line.verify", "check every kernel on this machine against float64"),
}
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Report an error in one line; argparse would print the usage first, 20 lines for `generate`."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 1 for an error or a wrong result, 2 for arguments that do not parse, 130 after an interrupt.
    An error is one line on stderr. Python's development mode (`python -X dev -m paged`) adds the traceback if the error
    is not one of this package's.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        with safe_output():
            args = _parser(argv).parse_args(argv)
            if args.imports:
                sys.path.append("")  # the current folder, which a program, unlike `python -m`, does not search
            for module in args.imports:
                importlib.import_module(module)
            return int(args.run(args))
    except PagedError as error:
        return _failed(error)
    except KeyboardInterrupt:
        drop_unwritten()
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        drop_unwritten()
        return 0
    except OSError as error:  # a full disk
        return _failed(error)
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        return _failed(error)


def start() -> int:
    """Run `main` as its own process; an interrupt at any moment, imports included, exits with 130."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    os._exit(_INTERRUPTED)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise the interrupt. During an import, which could catch or replace it, exit at once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _failed(error: Exception) -> int:
    with contextlib.suppress(OSError, AttributeError):  # stderr is full or closed: only the exit code remains
        reason = getattr(error, "strerror", None) or error
        if not isinstance(error, PagedError) and getattr(error, "filename", None) is not None:
            reason = f"{error.filename}: {reason}"  # type: ignore[attr-defined]
        print(f"paged: {type(error).__name__}: {one_line(reason)}", file=SafeStream(sys.stderr), flush=True)
    drop_unwritten()
    return 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands; only the called one has its arguments."""
    parser = _Parser(prog="paged", description="Paged attention and fused MoE in Triton.")
    parser.add_argument("--version", action="version", version=f"paged {paged.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in argv[:1]:
            module = importlib.import_module(module_name)
            command.description = module.DESCRIPTION
            text = "import this first, also from this folder: it may add models; may be repeated"
            command.add_argument("--import", action="append", default=[], dest="imports", metavar="MODULE", help=text)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
