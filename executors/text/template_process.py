"""Rendering of chat templates in a bounded process, so that a text or an error always returns in bounded time."""

from __future__ import annotations

import json
import os
import threading
from functools import lru_cache
from typing import Any, NamedTuple

from paged.bounded_process import Branch, ProcessEndedError, Root
from paged.executors.text.template_sandbox import CPU_S

_DEADLINE_S = 20.0  # for a process that sleeps
_ROOT = Root("paged.executors.text.template_sandbox")


class Rendered(NamedTuple):
    """text, or error instead. is_syntax: the template is invalid; is_last: the process must be replaced."""

    text: str = ""
    error: str | None = None
    is_syntax: bool = False
    is_last: bool = False


class _TemplateProcess:
    """Keeps one process, with the templates that it has compiled, until a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Branch | None = None

    def render(self, template: str, values: dict[str, Any], limit: int) -> Rendered:
        request = json.dumps({"template": template, "values": values, "limit": limit}).encode()
        with self._lock:
            process, self._process = self._process or _ROOT.branch(), None
            process.send(request, cpu_s=CPU_S, seconds=_DEADLINE_S)
            try:
                rendered = Rendered(**json.loads(process.receive().message))
            except ProcessEndedError:
                reason = f"it takes more than {CPU_S} s of CPU time, or overflows the stack"
                return Rendered(error=reason, is_last=True)
            if not rendered.is_last:
                self._process = process
            return rendered


def render_bounded(template: str, values: dict[str, Any], limit: int) -> Rendered:
    """Render a template with JSON values; the result is a text of at most `limit` characters, or an error.

    Raises:
        UnsupportedError: a process cannot be started.
    """
    return _process_of(os.getpid()).render(template, values, limit)


@lru_cache(maxsize=1)
def _process_of(owner: int) -> _TemplateProcess:
    """Return the process of an owner; after a fork it belongs to the parent."""
    return _TemplateProcess()
