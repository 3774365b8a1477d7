"""Grammars within a bounded process: compiled by xgrammar or llguidance, and followed token by token.

The root process holds the vocabulary, a branch of it a compiled grammar, a branch of that one completion's state.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from paged.bounded_process import limit_memory

Backend = Literal["xgrammar", "llguidance"]
MAX_MEGABYTES = 512
"""Memory that a grammar may take, compiled and followed."""
REFUSED, STOPPED = b"\x00", b"\x01"
"""Replies in place of a mask: the grammar forbids a token; the text is complete."""


def move(num_back: int, tokens: Sequence[int]) -> bytes:
    """Return a request to follow a grammar: to take tokens back, then to accept others."""
    return array("i", [num_back, *tokens]).tobytes()


def handler() -> Callable[[bytes], bytes]:
    """Return the function that answers requests, see `bounded_process.Root`."""
    with contextlib.suppress(ImportError):  # here, so that branches need not load them again
        import tokenizers  # noqa: F401
        import xgrammar  # noqa: F401
    return _Grammar().answer


class _Followed(NamedTuple):
    """A grammar's state: a matcher with xgrammar's names, what computes its mask, and the tokens that end a text."""

    matcher: Any
    mask: Callable[[], bytes]
    stop_ids: Sequence[int]

    def answer(self, message: bytes) -> bytes:
        """Answer a move by the next mask, or one of the words above."""
        num_back, *tokens = memoryview(message).cast("i")
        if num_back:
            self.matcher.rollback(num_back)
        for token in tokens:
            if not self.matcher.accept_token(token):
                return REFUSED
        return STOPPED if self.matcher.is_terminated() else self.mask()


class _Grammar:
    """What a process knows: first nothing, then the vocabulary, then a grammar."""

    def __init__(self) -> None:
        self._compile: Callable[[str, str], _Followed] | None = None
        self._followed: _Followed | None = None

    def answer(self, message: bytes) -> bytes:
        """Answer a move by a mask or one of the words above, anything else by {} or {error, missing} in JSON."""
        if self._followed is not None:
            return self._followed.answer(message)
        try:
            request = json.loads(message)
            if self._compile is None:
                make = {"xgrammar": _xgrammar, "llguidance": _llguidance}[request.pop("backend")]
                self._compile = make(**request)
                return b"{}"
            limit_memory(MAX_MEGABYTES << 20)
            self._followed = self._compile(request["kind"], request["text"])
            return json.dumps({"stops": list(self._followed.stop_ids)}).encode()
        except ImportError as error:
            return json.dumps({"missing": error.name}).encode()
        except Exception as error:
            return json.dumps({"error": str(error)[:2000]}).encode()


def _xgrammar(tokenizer: str, vocab_size: int, end_token_ids: Sequence[int]) -> Callable[[str, str], _Followed]:
    import xgrammar
    from tokenizers import Tokenizer

    tokens = [""] * vocab_size
    for token, index in Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True).items():
        if index < vocab_size:
            tokens[index] = token
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer)
    info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=list(end_token_ids) or None, **metadata)
    words = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    of_kind: dict[str, Callable[[str], Any]] = {
        "json": lambda text: compiler.compile_json_schema(_plain_texts(text), any_whitespace=False),
        "structural_tag": lambda text: compiler.compile_structural_tag(_plain_texts(text)),
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
        "choice": lambda text: compiler.compile_grammar(f"root ::= {_alternatives(text)}"),
    }

    def compiled(kind: str, text: str) -> _Followed:
        matcher = xgrammar.GrammarMatcher(of_kind[kind](text))

        def mask() -> bytes:
            words.fill_(-1)
            matcher.fill_next_token_bitmask(words)
            return words.numpy().tobytes()

        return _Followed(matcher, mask, matcher.stop_token_ids)

    return compiled


def _llguidance(tokenizer: str, vocab_size: int, end_token_ids: Sequence[int]) -> Callable[[str, str], _Followed]:
    import llguidance

    vocabulary = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_token_ids) or None)
    matcher = llguidance.LLMatcher
    of_kind: dict[str, Callable[[str], str]] = {
        "json": lambda text: matcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}),
        "regex": matcher.grammar_from_regex,
        "grammar": matcher.grammar_from_lark,
        "choice": lambda text: matcher.grammar_from_lark(f"start: {_alternatives(text)}"),
    }

    def compiled(kind: str, text: str) -> _Followed:
        if kind not in of_kind:
            raise ValueError("not with llguidance, expected xgrammar")
        grammar = of_kind[kind](text)
        if reason := matcher.validate_grammar(grammar, vocabulary):
            raise ValueError(reason)
        state = matcher(vocabulary, grammar)

        def mask() -> bytes:
            return bytes(state.compute_bitmask()[: -(-vocab_size // 32) * 4])

        return _Followed(_LlguidanceMatcher(state, end_token_ids), mask, end_token_ids)

    return compiled


class _LlguidanceMatcher:
    """An LLMatcher under xgrammar's names. Its text may be whole before an end token has come; then it stops."""

    def __init__(self, matcher: Any, end_token_ids: Sequence[int]) -> None:
        self._matcher, self._end_token_ids, self._is_ended = matcher, end_token_ids, False

    def accept_token(self, token_id: int) -> bool:
        if token_id in self._end_token_ids:
            self._is_ended = bool(self._matcher.is_accepting())
            return self._is_ended
        return bool(self._matcher.consume_token(token_id))

    def rollback(self, num_tokens: int = 1) -> None:
        num_tokens, self._is_ended = num_tokens - self._is_ended, False
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def is_terminated(self) -> bool:
        return self._is_ended


def _plain_texts(text: str) -> str:
    """Give texts of a bounded length a pattern without control characters, which xgrammar 0.2.8 lets into them."""

    def bound(schema: dict[str, Any]) -> dict[str, Any]:
        least, most = schema.get("minLength"), schema.get("maxLength")
        is_other = schema.get("type") != "string" or {"pattern", "format", "enum", "const"} & schema.keys()
        if is_other or int not in (type(least), type(most)):
            return schema
        pattern = f'^[^"\\\\\\x00-\\x1f]{{{least or 0},{"" if most is None else most}}}$'
        return {name: one for name, one in schema.items() if name not in ("minLength", "maxLength")} | {
            "pattern": pattern
        }

    return json.dumps(json.loads(text, object_hook=bound))


def _alternatives(text: str) -> str:
    """Return EBNF, or Lark's, for a JSON list of texts."""
    return " | ".join(map(json.dumps, json.loads(text)))
