"""The judge's end of a candidate's process: whatever the function does, a request gets an answer or an error."""

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

# Limit of bytes in an answer's line, and of bytes that are passed on from a function's output.
_MAX_BYTES = 1 << 16
# Limit of restarts after the process has ended, because each takes seconds to import PyTorch.
_MAX_RESTARTS = 5
# Seconds that the start may take, in addition to the limit of a call.
_START_S = 60.0
_NOT_ASKED = "its process answered what was not asked"


class JudgedProcess:
    """A process that calls a function. It restarts after it has ended, but not after a call that took too long.

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
        """Start the process; return the names of the arguments that the function takes, and whether it takes all.

        Raises:
            InvalidInputError: the function does not exist, or its module does not load.
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
            WrongResultError: the process ended, took too long, or gave an unexpected answer.
        """
        if self._given_up:
            raise WrongResultError(self._given_up)
        if self._process is None:
            self._restart()
        self._number += 1
        assert self._connection is not None
        with contextlib.suppress(OSError):  # an ended process shows when the answer is received
            self._connection.sendall(json.dumps({**request, "number": self._number}).encode() + b"\n")
        answer = self._receive(self._number, self._seconds)
        if answer.get("error") is None and not _is_answer(answer):
            self.close()
            raise WrongResultError(_NOT_ASKED)
        return answer

    def close(self) -> None:
        """End the process and its children."""
        if self._process is None or self._connection is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._printer is not None:
            self._printer.join(1.0)  # a child outside of the group may hold the pipe for longer
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
        # A thread passes on what the function prints, so that it cannot look like the judge's output.
        self._printer = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
        self._printer.start()

    def _pass_on(self, output: Any) -> None:
        """Print the process's output on stderr; each line begins with the function's path."""
        budget = _MAX_BYTES
        with contextlib.suppress(OSError, ValueError):  # either end is closed
            for line in iter(lambda: output.readline(_MAX_BYTES), ""):
                if budget > 0:
                    print(f"{self._path}: {line[:budget].rstrip()}", file=sys.stderr)
                budget -= len(line)

    def _receive(self, number: int, seconds: float) -> dict[str, Any]:
        """Wait for the answer with this number; end the process if another answer or none comes."""
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
        """Return the exit code or signal of the process as text; 'no exit code' if it still runs."""
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "no exit code"
        if code < 0:
            return f"signal {-code}"
        return f"exit code {code}, which is no verdict"


def _is_hello(answer: dict[str, Any]) -> bool:
    """Return whether an answer lists what a function takes. The function may have written the answer itself."""
    if answer.keys() != {"number", "names", "takes_all"}:
        return False
    return _is_list_of_texts(answer["names"]) and isinstance(answer["takes_all"], bool)


def _is_answer(answer: dict[str, Any]) -> bool:
    """Return whether an answer belongs to a call that returned."""
    if answer.keys() != {"number", "error", "shared", "is_reused"}:
        return False
    shared = answer["shared"]
    if not isinstance(shared, list) or not isinstance(answer["is_reused"], bool):
        return False
    return all(_is_list_of_texts(names) for names in shared)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
