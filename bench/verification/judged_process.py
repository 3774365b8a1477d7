"""The judge's end of a candidate's process: whatever the function does, a request comes to an answer or to an error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from paged.bench.check import WrongResultError
from paged.bench.verification.candidate_process import COMMAND
from paged.errors import InvalidInputError

# Longest line of an answer, and bytes of what a function prints that are passed on.
_MAX_BYTES = 1 << 16
# Processes that are started again after they have ended; each takes seconds to import PyTorch.
_MAX_RESTARTS = 5
# Seconds for the start beside the limit of a call.
_START_S = 60.0
_NOT_ASKED = "its process answered what was not asked"


class JudgedProcess:
    """A process that calls a function. It starts again after it has ended, but not after a call that took too long.

    Args:
        path: "module:function".
        seconds: limit of each call.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._process: subprocess.Popen[str] | None = None
        self._connection: socket.socket | None = None
        self._printer: threading.Thread | None = None
        self._pending = b""
        self._number = 0
        self._restarts = 0
        self._given_up = ""

    def start(self) -> tuple[frozenset[str], bool]:
        """Start it; return the names of the arguments that the function takes, and whether it takes all.

        Raises:
            InvalidInputError: there is no such function, or its module does not load.
        """
        try:
            self._open()
            hello = self._receive(0, self._seconds + _START_S)
        except WrongResultError as error:
            raise InvalidInputError(f"--candidate {self._path}: {error}, expected MODULE:FUNCTION") from error
        if "error" in hello:
            raise InvalidInputError(f"--candidate {self._path}: {hello['error']}, expected MODULE:FUNCTION")
        if not _is_hello(hello):
            self.close()
            raise InvalidInputError(f"--candidate {self._path}: {_NOT_ASKED}, expected MODULE:FUNCTION")
        return frozenset(hello["names"]), hello["takes_all"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            WrongResultError: the process ended, took too long, or answered what was not asked.
        """
        if self._given_up:
            raise WrongResultError(self._given_up)
        if self._process is None:
            self._restart()
        self._number += 1
        assert self._connection is not None
        with contextlib.suppress(OSError):  # that it has ended shows when the answer is received
            self._connection.sendall(json.dumps({**request, "number": self._number}).encode() + b"\n")
        answer = self._receive(self._number, self._seconds)
        if answer.get("error") is None and not _is_answer(answer):
            return {"error": _NOT_ASKED}
        return answer

    def close(self) -> None:
        """End the process and those that it started."""
        if self._process is None or self._connection is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._printer is not None:
            self._printer.join(1.0)  # longer only where a process that has left the group holds the pipe
        self._connection.close()
        self._process = self._connection = None
        self._pending = b""

    def _restart(self) -> None:
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            self._given_up = f"not called: its process has ended {_MAX_RESTARTS} times before"
            raise WrongResultError(self._given_up)
        try:
            self.start()
        except InvalidInputError as error:
            raise WrongResultError(f"its module does not load again: {error}") from error

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [os.path.abspath(path) if path else "" for path in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(theirs.fileno()), self._path, *paths],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        # What it prints is no line of the judge's.
        self._printer = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
        self._printer.start()

    def _pass_on(self, output: Any) -> None:
        """Print the lines of the process on stderr, with its name before them."""
        left = _MAX_BYTES
        with contextlib.suppress(OSError, ValueError):  # either end is closed
            for line in iter(lambda: output.readline(_MAX_BYTES), ""):
                if left > 0:
                    print(f"{self._path}: {line[:left].rstrip()}", file=sys.stderr)
                left -= len(line)

    def _receive(self, number: int, seconds: float) -> dict[str, Any]:
        """Wait for the answer of a number; end the process if another one comes, or none."""
        try:
            line = self._line(seconds)
            answer = json.loads(line)
            if not isinstance(answer, dict) or answer.get("number") != number:
                raise WrongResultError(_NOT_ASKED)
        except (ValueError, RecursionError) as error:
            self.close()
            raise WrongResultError(_NOT_ASKED) from error
        except BaseException:
            self.close()
            raise
        return answer

    def _line(self, seconds: float) -> bytes:
        assert self._connection is not None
        assert self._process is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._pending:
            self._connection.settimeout(max(end - time.monotonic(), 0.001))
            try:
                data = self._connection.recv(_MAX_BYTES)
            except TimeoutError as error:
                self._given_up = f"not called: an earlier call took more than {seconds:g} s"
                raise WrongResultError(f"no answer within {seconds:g} s") from error
            except OSError:
                data = b""
            if not data:
                raise WrongResultError(f"its process ended with {self._exit()}")
            self._pending += data
            if len(self._pending) > _MAX_BYTES:
                raise WrongResultError(_NOT_ASKED)
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _exit(self) -> str:
        """Return how the process ended; it may only have closed its connection."""
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "no exit code"
        if code < 0:
            return f"signal {-code}"
        return f"exit code {code}, which is no verdict"


def _is_hello(answer: dict[str, Any]) -> bool:
    """Return whether an answer says what a function takes; the function may have written the answer itself."""
    if answer.keys() != {"number", "names", "takes_all"}:
        return False
    return _is_list_of_texts(answer["names"]) and isinstance(answer["takes_all"], bool)


def _is_answer(answer: dict[str, Any]) -> bool:
    """Return whether an answer is one to a call that returned."""
    if answer.keys() != {"number", "error", "shared", "is_reused"}:
        return False
    shared = answer["shared"]
    if not isinstance(shared, list) or not isinstance(answer["is_reused"], bool):
        return False
    return all(_is_list_of_texts(names) for names in shared)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
