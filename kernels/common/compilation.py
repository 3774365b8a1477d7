"""What it is when Triton compiles a kernel while requests are served: PAGED_JIT=allow (as when not set), warn or error.

A compilation takes seconds in which no sequence gets a token. Serving begins with `serving_begins`, and pauses within
`warming_up`. Kernels that Triton finds in its cache on disk count, too: they were not warmed up either.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from paged.kernels.common.compat import HAS_TRITON, triton
from paged.kernels.common.errors import InvalidInputError, UnsupportedError

_CHOICES = ("allow", "warn", "error")
# Of this thread or task alone: another one may be serving.
_IS_WARMING_UP = ContextVar("_IS_WARMING_UP", default=False)


class _Watch:
    """Triton's hook before a compilation, in front of the one that was there.

    warned: the kernels that were named in a warning.
    """

    def __init__(self, before: Any) -> None:
        self._before = before
        self.warned: set[str] = set()

    def __call__(self, **given: Any) -> Any:
        fn, is_ours = given["fn"], given["fn"].module.startswith("paged.")
        choice = _choice() if is_ours and not (given["is_manual_warmup"] or _IS_WARMING_UP.get()) else "allow"
        message = f"{fn.name} is compiled while serving, for {given['repr']}"
        if choice == "error":
            raise UnsupportedError(f"PAGED_JIT=error: {message}")
        if choice == "warn" and fn.name not in self.warned:
            self.warned.add(fn.name)
            logging.getLogger(__name__).warning("PAGED_JIT=warn: %s", message)
        return None if self._before is None else self._before(**given)


def serving_begins() -> None:
    """From here on a compilation is what PAGED_JIT says, in the whole process.

    Raises:
        InvalidInputError: PAGED_JIT holds another word.
    """
    _choice()
    if HAS_TRITON and not isinstance(triton.knobs.runtime.jit_cache_hook, _Watch):
        triton.knobs.runtime.jit_cache_hook = _Watch(triton.knobs.runtime.jit_cache_hook)


@contextmanager
def warming_up() -> Iterator[None]:
    """What is compiled inside is expected, in a process that serves already, too."""
    token = _IS_WARMING_UP.set(True)
    try:
        yield
    finally:
        _IS_WARMING_UP.reset(token)


def _choice() -> str:
    choice = os.environ.get("PAGED_JIT") or "allow"
    if choice not in _CHOICES:
        raise InvalidInputError(f"PAGED_JIT={choice!r}: expected {', '.join(map(repr, _CHOICES))}")
    return choice
