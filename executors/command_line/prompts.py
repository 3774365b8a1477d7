"""Where the prompts of a command come from."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from paged.errors import InvalidInputError
from paged.executors.command_line.cli import RECALL

_MAX_COUNT = 100_000
# A file may be /dev/zero; 64 MiB are more tokens than any context holds.
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Prompt:
    """expected: its answer, where the task tells."""

    text: str
    expected: str | None = None


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """`--prompt`s, then the lines of `--prompts`. Without any, the bundled checkpoint's own task; for another model
    the lines of stdin, where that is no terminal.

    Raises:
        InvalidInputError: there are none, or the file cannot be read.
    """
    texts, is_recall = list(args.prompt), False
    with contextlib.suppress(OSError, ValueError):  # no name of a file
        is_recall = Path(args.model).resolve() == RECALL
    if args.system is not None and not args.chat:
        raise InvalidInputError("--system: only with --chat")
    if not 0 < args.count <= _MAX_COUNT:
        raise InvalidInputError(f"--count {args.count}: expected 1 to {_MAX_COUNT}")
    if args.prompts is not None:
        texts += _lines(args.prompts)
    elif not texts and not is_recall and sys.stdin is not None and not sys.stdin.isatty():
        texts += _lines("-")
    if texts:
        return [Prompt(text) for text in texts]
    if args.prompts is not None or not is_recall:
        raise InvalidInputError("no prompts: give --prompt TEXT, --prompts FILE, or lines on stdin")
    from paged.models.recall.task import sample_prompts

    return [Prompt(prompt.text, prompt.answer) for prompt in sample_prompts(args.seed, args.count)]


def _lines(source: str) -> list[str]:
    """Lines end at newlines alone: form feeds, U+2028 and so on are text. Blank ones are skipped."""
    try:
        if source != "-":
            with Path(source).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        elif sys.stdin is None:
            raise InvalidInputError("--prompts -: stdin is closed")
        elif hasattr(sys.stdin, "buffer"):  # as bytes: the stream lets some faults of UTF-8 pass
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            data = sys.stdin.read(_MAX_BYTES + 1).encode()
        if len(data) > _MAX_BYTES:
            raise InvalidInputError(f"--prompts {source}: more than {_MAX_BYTES} bytes")
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidInputError(f"--prompts {source}: {reason}") from error
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
