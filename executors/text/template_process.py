"""Rendering of chat templates in a separate process, so that a text or an error always returns in bounded time."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from paged.errors import UnsupportedError
from paged.executors.text.template_sandbox import CPU_S

_DEADLINE_S = 20.0  # for a process that sleeps, or a system without a limit of CPU time
# Isolated mode: neither the environment nor the working folder changes the modules.
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from paged.executors.text.template_sandbox import serve; serve()"


class Rendered(NamedTuple):
    """text, or error instead. is_syntax: the template is invalid; is_last: the process must be replaced."""

    text: str = ""
    error: str | None = None
    is_syntax: bool = False
    is_last: bool = False


class _TemplateProcess:
    """Keeps one process; starts it on first use and after a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, values: dict[str, Any], limit: int) -> Rendered:
        request = json.dumps({"template": template, "values": values, "limit": limit}).encode() + b"\n"
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = _start()
            # Write from another thread: a read from a pipe has no deadline on every system.
            timer = threading.Timer(_DEADLINE_S, process.kill)
            timer.start()
            reply = b""
            reason = f"it takes more than {CPU_S} s of CPU time, or overflows the stack"
            found = Rendered(error=reason, is_last=True)
            try:
                assert process.stdin is not None and process.stdout is not None  # noqa: PT018
                with contextlib.suppress(OSError):  # it has ended
                    process.stdin.write(request)
                    process.stdin.flush()
                    reply = process.stdout.readline(12 * limit + 65536)  # a character takes at most 12 bytes
                if reply.endswith(b"\n"):
                    found = Rendered(**json.loads(reply))
            finally:
                timer.cancel()
                if found.is_last:  # also after an interrupt
                    self.stop()
        return found

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # unread input
                    pipe.close()  # type: ignore[union-attr]


def render_bounded(template: str, values: dict[str, Any], limit: int) -> Rendered:
    """Render a template with JSON values; the result is a text of at most `limit` characters, or an error.

    Raises:
        UnsupportedError: a process cannot be started.
    """
    return _shared.render(template, values, limit)


def _start() -> subprocess.Popen[bytes]:
    paths = [os.path.abspath(path) for path in sys.path]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # only the caller handles the terminal's interrupts
        )
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"chat templates run in a process of their own, which cannot start: {error}") from error


def _renew() -> None:
    """Forget the process after a fork: its pipes belong to the parent."""
    global _shared
    _shared = _TemplateProcess()


_shared = _TemplateProcess()
atexit.register(lambda: _shared.stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
