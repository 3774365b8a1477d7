"""Answers of a given form: grammars compiled by xgrammar or llguidance into matchers for `token_mask`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.common.scalars import shown
from paged.printable import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["json", "regex", "grammar", "choice", "structural_tag"]
# xgrammar's time grows with the cube of a schema's properties: 1,000 take 1.6 s over 288 tokens, 3,000 more than 25 s.
_MAX_CHARACTERS, _MAX_VALUES, _MAX_DEPTH = 1 << 16, 2048, 64
_NUM_THREADS = 4  # so that a hostile grammar, which nothing can end, leaves the others
_MAX_BYTES = 512 << 20


class GrammarCompiler:
    """Compiles grammars over one vocabulary and keeps the last of them.

    Args:
        vocab_size: the model's, which may be larger than the tokenizer's.
        end_token_ids: tokens that may follow a whole answer.
        max_cached: grammars to keep, least recently used dropped first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Sequence[int],
        *,
        backend: Literal["xgrammar", "llguidance"] = "xgrammar",
        max_cached: int = 64,
    ) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, list(end_token_ids)
        self._make = {"xgrammar": self._xgrammar, "llguidance": self._llguidance}[backend]
        self._max_cached = max_cached
        self._matchers: dict[tuple[str, str], asyncio.Future[Callable[[], Any]]] = {}  # the least recently used first
        self._compile: Callable[[str, str], Callable[[], Any]] | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="paged-grammar")

    async def compile(self, kind: Kind, grammar: Any, *, seconds: float = 10.0) -> Any:
        """Return a fresh matcher, see `TokenMask`; other coroutines run meanwhile.

        Args:
            kind: "json" for a JSON schema, as a mapping or text; "regex"; "grammar" for EBNF as xgrammar reads it, or
                Lark's with llguidance; "choice" for a list of texts; "structural_tag" for xgrammar's own.

        Raises:
            InvalidInputError: it is malformed, larger than 65,536 characters or 2,048 JSON values, deeper than 64, or
                takes longer than `seconds`.
            UnsupportedError: the backend is not installed.
        """
        kind, text = _checked(kind, grammar)
        future = self._matchers.pop((kind, text), None)
        if future is None or (future.done() and (future.cancelled() or future.exception() is not None)):
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._compiled, kind, text)
        self._matchers[kind, text] = future
        if len(self._matchers) > self._max_cached:
            del self._matchers[next(iter(self._matchers))]
        try:
            async with asyncio.timeout(seconds):
                return (await asyncio.shield(future))()
        except TimeoutError:
            raise InvalidInputError(f"{kind}: not compiled within {seconds} s") from None

    def _compiled(self, kind: str, text: str) -> Callable[[], Any]:
        try:
            if self._compile is None:
                self._compile = self._make()
            return self._compile(kind, text)
        except ImportError as error:
            raise UnsupportedError(f"structured output needs {error.name}: pip install 'paged[serve]'") from error
        except Exception as error:
            raise InvalidInputError(f"{kind}: {one_line(error, 500)}") from error

    def _xgrammar(self) -> Callable[[str, str], Callable[[], Any]]:
        import xgrammar

        tokens = [""] * self._vocab_size
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if index < self._vocab_size:
                tokens[index] = token
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(self._tokenizer.to_str())
        info = xgrammar.TokenizerInfo(
            tokens, vocab_size=self._vocab_size, stop_token_ids=self._end_token_ids or None, **found
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_MAX_BYTES)
        of_kind: dict[str, Callable[[str], Any]] = {
            "json": lambda text: compiler.compile_json_schema(_plain_texts(text), any_whitespace=False),
            "structural_tag": lambda text: compiler.compile_structural_tag(_plain_texts(text)),
            "regex": compiler.compile_regex,
            "grammar": compiler.compile_grammar,
            "choice": lambda text: compiler.compile_grammar(f"root ::= {_alternatives(text)}"),
        }
        return lambda kind, text: partial(xgrammar.GrammarMatcher, of_kind[kind](text))

    def _llguidance(self) -> Callable[[str, str], Callable[[], Any]]:
        import llguidance

        end = self._end_token_ids or None
        vocabulary = llguidance.LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=end)
        matcher = llguidance.LLMatcher
        of_kind: dict[str, Callable[[str], str]] = {
            "json": lambda text: matcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False}),
            "regex": matcher.grammar_from_regex,
            "grammar": matcher.grammar_from_lark,
            "choice": lambda text: matcher.grammar_from_lark(f"start: {_alternatives(text)}"),
        }

        def compiled(kind: str, text: str) -> Callable[[], Any]:
            if kind not in of_kind:
                raise InvalidInputError(f"{kind}: not with llguidance, expected xgrammar")
            grammar = of_kind[kind](text)
            if reason := matcher.validate_grammar(grammar, vocabulary):
                raise InvalidInputError(reason)
            return lambda: _LlguidanceMatcher(matcher(vocabulary, grammar), self._end_token_ids)

        return compiled


class _LlguidanceMatcher:
    """An LLMatcher under xgrammar's names. Its text may be whole before an end token has come; then it stops."""

    def __init__(self, matcher: Any, end_token_ids: Sequence[int], *, is_ended: bool = False) -> None:
        self._matcher, self._end_token_ids, self._is_ended = matcher, end_token_ids, is_ended

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        from llguidance.torch import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, bitmask, index)
        return True

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

    def fork(self) -> _LlguidanceMatcher:
        return _LlguidanceMatcher(self._matcher.deep_copy(), self._end_token_ids, is_ended=self._is_ended)


def _checked(kind: Any, grammar: Any) -> tuple[Any, str]:
    """Return the kind, and the grammar as text of a bounded size and depth."""
    if kind not in get_args(Kind):
        raise InvalidInputError(f"kind: {shown(kind)}, expected one of {', '.join(get_args(Kind))}")
    if kind == "choice" and not (
        isinstance(grammar, list) and grammar and all(x and isinstance(x, str) for x in grammar)
    ):
        raise InvalidInputError(f"choice: {shown(grammar)}, expected texts")
    try:
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
        size = _size(json.loads(text)) if kind in ("json", "structural_tag") else 0
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{kind}: {one_line(error, 200)}") from error
    if len(text) > _MAX_CHARACTERS or size > _MAX_VALUES:
        most = f"{_MAX_CHARACTERS} characters, {_MAX_VALUES} values, {_MAX_DEPTH} levels"
        raise InvalidInputError(f"{kind}: too large, expected at most {most}")
    return kind, text


def _size(value: Any, levels: int = _MAX_DEPTH) -> float:
    """Return the number of values in JSON, infinite beyond the levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_size(one, levels - 1) for one in inner) if levels else math.inf


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
