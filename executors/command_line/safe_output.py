"""stdout and stderr of a command: what it prints can neither steer a terminal nor fail for a character."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from paged.printable import printable


class SafeStream:
    """A text stream before another: escapes what steers a terminal or what the other's encoding lacks.

    Whether the other is a terminal makes no difference: what goes to a file or a pipe is shown by one later. unescaped:
    the other, for a progress bar, which steers.
    """

    def __init__(self, unescaped: TextIO) -> None:
        self.unescaped = unescaped
        self._failure: OSError | None = None

    def write(self, text: str) -> int:
        encoding = getattr(self.unescaped, "encoding", None) or "utf-8"
        try:
            self.unescaped.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._failure = error
            raise
        return len(text)

    def flush(self) -> None:
        """Flush; raise again what `write` raised, which its caller may have dropped, as argparse does."""
        if self._failure is not None:
            raise self._failure
        self.unescaped.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


@contextlib.contextmanager
def safe_output() -> Iterator[None]:
    """Make both streams safe within; on leaving without an error all of stdout has been written.

    Raises:
        OSError: stdout takes no more, as on a full disk; BrokenPipeError where its reader has gone.
    """
    before = sys.stdout, sys.stderr
    # None where the process was started without one; print() then prints nothing.
    sys.stdout, sys.stderr = (stream and cast(TextIO, SafeStream(stream)) for stream in before)
    try:
        try:
            yield
        except SystemExit:  # --help has printed something
            _flush(sys.stdout)
            raise
        _flush(sys.stdout)
    finally:
        sys.stdout, sys.stderr = before


def drop_unwritten() -> None:
    """Let what cannot be written go nowhere, so that the end of the process does not try again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            _flush(stream)
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):  # closed, or no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()


@contextlib.contextmanager
def native_stderr_dropped() -> Iterator[None]:
    """What is written to file descriptor 2 goes nowhere within: Rust reports a panic there, in 20 lines, before it
    becomes the exception that is reported in one.
    """
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def print_json(value: Any) -> None:
    """Print one JSON object in ASCII, others escaped; numbers that JSON lacks, NaN and infinities, are null."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
