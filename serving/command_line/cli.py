"""Command line `paged COMMAND`. A command's module is imported when it runs, so that help needs no torch."""

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
    """Parser that reports an error in one line, without argparse's usage of up to 20 lines."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 1 for an error or a wrong result, 2 for invalid arguments, 130 after an interrupt. An error is one
    line on stderr. Python's development mode (`python -X dev -m paged`) adds the traceback of unexpected errors.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        with safe_output():
            args = _parser(argv).parse_args(argv)
            if args.imports:
                sys.path.append("")  # search the current folder, as `python -m` does
            for module in args.imports:
                importlib.import_module(module)
            return int(args.run(args))
    except PagedError as error:
        return _failed(error)
    except KeyboardInterrupt:
        drop_unwritten()
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe
        drop_unwritten()
        return 0
    except OSError as error:  # for example, a full disk
        return _failed(error)
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        return _failed(error)


def start() -> int:
    """Run `main` as a program. An interrupt at any moment, also during imports, exits with 130."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        return main()
    finally:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> NoReturn:
    os._exit(_INTERRUPTED)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise the interrupt; during an import, exit at once, because imports may catch or replace it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _failed(error: Exception) -> int:
    with contextlib.suppress(OSError, AttributeError):  # stderr is full or closed; only the exit code remains
        reason = getattr(error, "strerror", None) or error
        if not isinstance(error, PagedError) and getattr(error, "filename", None) is not None:
            reason = f"{error.filename}: {reason}"  # type: ignore[attr-defined]
        print(f"paged: {type(error).__name__}: {one_line(reason)}", file=SafeStream(sys.stderr), flush=True)
    drop_unwritten()
    return 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands; only the called command has its arguments."""
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
