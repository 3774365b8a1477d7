"""Rendering of chat templates in bounded processes, so that a result or error always comes in bounded time."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, NamedTuple

from paged.serving.text.template_sandbox import CPU_S
from paged.tools.bounded_process import Branch, ProcessEndedError, ProcessLostError, Root

_DEADLINE_S = 20.0  # limit of real time, because a process that sleeps takes no CPU time
_ROOT = Root("paged.serving.text.template_sandbox")
# Idle processes with their compiled templates. There are at most as many as have rendered at the same time.
_IDLE: list[Branch] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_IDLE.clear)  # the processes belong to the parent


class Rendered(NamedTuple):
    """Result: a text or an error. is_syntax: the template is invalid. is_last: the process must be replaced."""

    text: str = ""
    error: str | None = None
    is_syntax: bool = False
    is_last: bool = False


def render_bounded(template: str, values: dict[str, Any], limit: int) -> Rendered:
    """Render a template with JSON values; return a text of at most `limit` characters, or an error.

    Raises:
        ProcessLostError: the system cannot start a process, or has ended it.
        UnsupportedError: this system has no fork.
    """
    request = json.dumps({"template": template, "values": values, "limit": limit}).encode()
    process = _idle() or _ROOT.branch()
    process.send(request, cpu_s=CPU_S, seconds=_DEADLINE_S)
    try:
        rendered = Rendered(**json.loads(process.receive().message))
    except ProcessLostError:
        raise
    except ProcessEndedError:
        return Rendered(error=f"it takes more than {CPU_S} s of CPU time, or overflows the stack")
    if not rendered.is_last:
        _IDLE.append(process)
    return rendered


def _idle() -> Branch | None:
    """Return an idle process, or None."""
    with contextlib.suppress(IndexError):
        while True:
            process = _IDLE.pop()
            # Nothing was asked, so a readable socket means that the process has ended.
            if not process.is_ready():
                return process
    return None
