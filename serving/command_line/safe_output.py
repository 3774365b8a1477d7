"""Safe stdout and stderr of a command, which can neither control the terminal nor fail on a character."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from paged.tools.printable import printable


class SafeStream:
    """Text stream that escapes terminal controls and characters outside the target's encoding.

    It also escapes for files and pipes, because their text may be shown on a terminal later.

    unescaped: the target stream, for progress bars, which move the cursor.
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
        """Flush; raise an earlier error of `write` again, because its caller, such as argparse, may have dropped it."""
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
    """Make both streams safe within the context. A normal exit flushes stdout.

    Raises:
        OSError: stdout cannot be written, for example on a full disk.
        BrokenPipeError: the reader of stdout has closed the pipe.
    """
    before = sys.stdout, sys.stderr
    # A stream is None if the process lacks it; print() then prints nothing.
    sys.stdout, sys.stderr = _safe(sys.stdout), _safe(sys.stderr)
    try:
        try:
            yield
        except SystemExit:  # after --help
            _flush(sys.stdout)
            raise
        _flush(sys.stdout)
    finally:
        sys.stdout, sys.stderr = before


def _safe(stream: TextIO) -> TextIO:
    return stream and cast(TextIO, SafeStream(stream))


def drop_unwritten() -> None:
    """Discard output that cannot be written, so that the interpreter does not try again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            _flush(stream)
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):  # closed or not a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()


@contextlib.contextmanager
def native_stderr_dropped() -> Iterator[None]:
    """Discard writes to file descriptor 2 in the context, where Rust would print 20 lines for a panic."""
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
    """Print a JSON object in ASCII, with NaN and infinities as null."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
