"""Grammars within a bounded process: compiled by xgrammar, and followed token by token.

The root process holds the vocabulary, a branch of it a compiled grammar, a branch of that one completion's state.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paged.bounded_process import limit_memory, may_have_memory
from paged.errors import PagedError

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
        import tokenizers  # noqa: F401
        import xgrammar  # noqa: F401
    return _Grammar().answer


class _Grammar:
    """What a process knows: first nothing, then the vocabulary, then a grammar."""

    def __init__(self) -> None:
        self._compile: Callable[[str, str], Any] | None = None
        self._matcher: Any = None
        self._mask = torch.empty(0, dtype=torch.int32)

    def answer(self, message: bytes) -> bytes:
        """Answer a move by a mask or REFUSED, anything else by {} or {error, missing} in JSON."""
        try:
            if self._matcher is not None:
                return self._follow(message)
            return self._prepare(message)
        except MemoryError as error:
            if not may_have_memory(_MAX_BYTES):
                raise
            raise PagedError(f"the grammar takes more than {MAX_MEGABYTES} MB") from error

    def _prepare(self, message: bytes) -> bytes:
        """Take the vocabulary, then compile a grammar."""
        try:
            request = json.loads(message)
            if self._compile is None:
                self._compile = _compiler(**request)
                self._mask = torch.empty(1, -(-request["vocab_size"] // 32), dtype=torch.int32)
                return b"{}"
            limit_memory(_MAX_BYTES)
            self._matcher = self._compile(request["kind"], request["text"])
            return json.dumps({"stops": list(self._matcher.stop_token_ids)}).encode()
        except ImportError as error:
            return json.dumps({"missing": error.name}).encode()
        except MemoryError:
            raise
        except Exception as error:
            return json.dumps({"error": str(error)[:2000]}).encode()

    def _follow(self, message: bytes) -> bytes:
        num_back, *tokens = memoryview(message).cast("i")
        if num_back:
            self._matcher.rollback(num_back)
        for token in tokens:
            if not self._matcher.accept_token(token):
                return REFUSED
        if self._matcher.is_terminated():  # xgrammar has no mask then
            return b""
        self._mask.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask.numpy().tobytes()


def _compiler(tokenizer: str, vocab_size: int, end_token_ids: Sequence[int]) -> Callable[[str, str], Any]:
    """Return what makes a matcher of a kind and a text."""
    import xgrammar
    from tokenizers import Tokenizer

    tokens = [""] * vocab_size
    for token, index in Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True).items():
        if index < vocab_size:
            tokens[index] = token
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer)
    info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=list(end_token_ids) or None, **metadata)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    of_kind: dict[str, Callable[[str], Any]] = {
        "json": lambda text: compiler.compile_json_schema(_plain_texts(text), any_whitespace=False),
        "structural_tag": lambda text: compiler.compile_structural_tag(_plain_texts(text)),
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
        "choice": lambda text: compiler.compile_grammar(_alternatives(text)),
    }
    return lambda kind, text: xgrammar.GrammarMatcher(of_kind[kind](text))


def _plain_texts(text: str) -> str:
    """Give texts of a bounded length a pattern without control characters, which xgrammar 0.2.8 lets into them."""

    def bound(schema: dict[str, Any]) -> dict[str, Any]:
        shortest, longest = schema.get("minLength"), schema.get("maxLength")
        is_other = schema.get("type") != "string" or {"pattern", "format", "enum", "const"} & schema.keys()
        if is_other or int not in (type(shortest), type(longest)):
            return schema
        end = "" if longest is None else longest
        bounded = schema | {"pattern": f'^[^"\\\\\\x00-\\x1f]{{{shortest or 0},{end}}}$'}
        bounded.pop("minLength", None)
        bounded.pop("maxLength", None)
        return bounded

    return json.dumps(json.loads(text, object_hook=bound))


def _alternatives(text: str) -> str:
    """Return EBNF for a JSON list of texts."""
    return "root ::= " + " | ".join(map(json.dumps, json.loads(text)))
