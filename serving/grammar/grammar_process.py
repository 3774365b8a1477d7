"""Grammars in a bounded process, compiled and advanced token by token.

The root process has the vocabulary. A branch of it has a compiled grammar. A branch of the branch has the state of one
completion.
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
"""Memory limit of a grammar in MB, for compiling and advancing."""
_MAX_BYTES = MAX_MEGABYTES << 20
REFUSED = b"\x00"
"""Reply in place of a mask: the grammar forbids a token."""


def move(num_back: int, tokens: Sequence[int]) -> bytes:
    """Return a request to advance a grammar: roll tokens back, then accept others."""
    return array("i", [num_back, *tokens]).tobytes()


def handler() -> Callable[[bytes], bytes]:
    """Return the function that answers requests, see `bounded_process.Root`."""
    with contextlib.suppress(ImportError):  # imported in the root, so that branches have them loaded
        import paged.serving.grammar.compiler  # noqa: F401
    return _Grammar().answer


class _Grammar:
    """State of a process: nothing, then the vocabulary, then a grammar."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None
        self._matcher: Matcher | None = None

    def answer(self, message: bytes) -> bytes:
        """Answer a move with a mask or REFUSED, any other request with {} or {error, missing} in JSON."""
        try:
            if self._matcher is not None:
                return _follow(self._matcher, message)
            return self._begin(message)
        except MemoryError as error:
            if not may_have_memory(_MAX_BYTES):
                raise
            raise PagedError(f"the grammar takes more than {MAX_MEGABYTES} MB") from error

    def _begin(self, message: bytes) -> bytes:
        """Receive the vocabulary, or compile a grammar."""
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
