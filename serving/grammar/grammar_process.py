"""Grammars within a bounded process: compiled, and followed token by token.

The root process holds the vocabulary, a branch of it a compiled grammar, a branch of that one completion's state.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paged.errors import PagedError
from paged.tools.bounded_process import limit_memory, may_have_memory

if TYPE_CHECKING:
    from paged.serving.grammar.compiler import Compiler
    from paged.serving.grammar.matchers import Matcher

MAX_MEGABYTES = 512
"""Memory that a grammar may take, compiled and followed."""
_MAX_BYTES = MAX_MEGABYTES << 20
REFUSED = b"\x00"
"""Reply in place of a mask: the grammar forbids a token."""


def move(num_back: int, tokens: Sequence[int]) -> bytes:
    """Return a request to follow a grammar: to take tokens back, then to accept others."""
    return array("i", [num_back, *tokens]).tobytes()


def handler() -> Callable[[bytes], bytes]:
    """Return the function that answers requests, see `bounded_process.Root`."""
    with contextlib.suppress(ImportError):  # here, so that branches need not load them again
        import paged.serving.grammar.compiler  # noqa: F401
    return _Grammar().answer


class _Grammar:
    """What a process knows: first nothing, then the vocabulary, then a grammar."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None
        self._matcher: Matcher | None = None

    def answer(self, message: bytes) -> bytes:
        """Answer a move by a mask or REFUSED, anything else by {} or {error, missing} in JSON."""
        try:
            if self._matcher is not None:
                return _follow(self._matcher, message)
            return self._prepare(message)
        except MemoryError as error:
            if not may_have_memory(_MAX_BYTES):
                raise
            raise PagedError(f"the grammar takes more than {MAX_MEGABYTES} MB") from error

    def _prepare(self, message: bytes) -> bytes:
        """Take the vocabulary, then compile a grammar."""
        try:
            request = json.loads(message)
            if self._compiler is None:
                from paged.serving.grammar.compiler import Compiler

                self._compiler = Compiler(**request)
                return b"{}"
            limit_memory(_MAX_BYTES)
            self._matcher = self._compiler.matcher(request["kind"], request["text"])
            return json.dumps({"stops": list(self._compiler.stop_ids)}).encode()
        except ImportError as error:
            return json.dumps({"missing": error.name}).encode()
        except MemoryError:
            raise
        except Exception as error:
            return json.dumps({"error": str(error)[:2000]}).encode()


def _follow(matcher: Matcher, message: bytes) -> bytes:
    num_back, *tokens = memoryview(message).cast("i")
    if num_back:
        matcher.rollback(num_back)
    for token in tokens:
        if not matcher.accept(token):
            return REFUSED
    return matcher.mask()
