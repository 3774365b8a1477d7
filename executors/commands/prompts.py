"""Where the prompts of a command come from."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from paged.errors import InvalidInputError
from paged.executors.cli import RECALL


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
    texts = list(args.prompt)
    is_recall = Path(args.model).resolve() == RECALL
    if args.prompts is not None:
        texts += _lines(args.prompts)
    elif not texts and not is_recall and not sys.stdin.isatty():
        texts += _lines("-")
    if texts:
        return [Prompt(text) for text in texts]
    if args.prompts is not None or not is_recall:
        raise InvalidInputError("no prompts: give --prompt TEXT, --prompts FILE, or lines on stdin")
    from paged.models.recall.task import sample_prompts

    return [Prompt(prompt.text, prompt.answer) for prompt in sample_prompts(args.seed, args.count)]


def _lines(source: str) -> list[str]:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidInputError(f"--prompts {source}: {reason}") from error
    return [line for line in text.splitlines() if line.strip()]
