"""Answers of a given form: grammars compiled by xgrammar or llguidance into matchers for `token_mask`."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Compiles grammars over one vocabulary and keeps the last of them. Each call of `compile` gives a fresh matcher.

    A matcher has xgrammar's methods: `fill_next_token_bitmask(bitmask, index)`, `accept_token(id)`, `rollback(n)`,
    `is_terminated()`, `fork()`.

    Args:
        tokenizer: of the model.
        vocab_size: the model's, which may be larger than the tokenizer's.
        end_token_ids: tokens that may follow a whole answer.
        backend: who compiles.
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
        self._matchers: OrderedDict[tuple[str, str], asyncio.Future[Callable[[], Any]]] = OrderedDict()
        self._compile: Callable[[str, str], Callable[[], Any]] | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="paged-grammar")

    async def compile(self, kind: Kind, grammar: Any, *, seconds: float = 10.0) -> Any:
        """Return a matcher at the beginning of the grammar; other coroutines run meanwhile.

        Args:
            kind: "json" for a JSON schema, as a mapping or text; "regex"; "grammar" for EBNF as xgrammar reads it, or
                Lark's with llguidance; "choice" for a list of texts; "structural_tag" for xgrammar's own.

        Raises:
            InvalidInputError: it is malformed, larger than 65,536 characters or 2,048 JSON values, deeper than 64, or
                takes longer than `seconds`.
            UnsupportedError: the backend is not installed.
        """
        kind, text = _checked(kind, grammar)
        future = self._matchers.get((kind, text))
        if future is None or (future.done() and (future.cancelled() or future.exception() is not None)):
            loop = asyncio.get_running_loop()
            future = self._matchers[kind, text] = loop.run_in_executor(self._threads, self._compiled, kind, text)
        self._matchers.move_to_end((kind, text))
        while len(self._matchers) > self._max_cached:
            self._matchers.popitem(last=False)
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

        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        tokens = [""] * self._vocab_size
        for token, index in vocabulary.items():
            if index < self._vocab_size:
                tokens[index] = token
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(self._tokenizer.to_str())
        info = xgrammar.TokenizerInfo(
            tokens,
            found["vocab_type"],
            vocab_size=self._vocab_size,
            stop_token_ids=self._end_token_ids or None,
            add_prefix_space=found["add_prefix_space"],
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_MAX_BYTES)

        def compiled(kind: str, text: str) -> Callable[[], Any]:
            if kind == "json":
                grammar = compiler.compile_json_schema(json.dumps(_plain_texts(json.loads(text))), any_whitespace=False)
            elif kind == "structural_tag":
                grammar = compiler.compile_structural_tag(json.dumps(_plain_texts(json.loads(text))))
            elif kind == "regex":
                grammar = compiler.compile_regex(text)
            else:
                grammar = compiler.compile_grammar(_alternatives(text) if kind == "choice" else text)
            return lambda: xgrammar.GrammarMatcher(grammar)

        return compiled

    def _llguidance(self) -> Callable[[str, str], Callable[[], Any]]:
        import llguidance

        end = self._end_token_ids or None
        vocabulary = llguidance.LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=end)
        matcher = llguidance.LLMatcher

        def compiled(kind: str, text: str) -> Callable[[], Any]:
            if kind == "json":
                grammar = matcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
            elif kind == "regex":
                grammar = matcher.grammar_from_regex(text)
            elif kind == "structural_tag":
                raise InvalidInputError("structural_tag: not with llguidance, expected xgrammar")
            else:
                grammar = matcher.grammar_from_lark(
                    f"start: {' | '.join(map(json.dumps, json.loads(text)))}" if kind == "choice" else text
                )
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
        isinstance(grammar, list) and grammar and all(isinstance(x, str) and x for x in grammar)
    ):
        raise InvalidInputError(f"choice: {shown(grammar)}, expected texts")
    try:
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
        value = json.loads(text) if kind in ("json", "structural_tag") else None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{kind}: {one_line(error, 200)}") from error
    if len(text) > _MAX_CHARACTERS or not _is_small(value):
        most = f"{_MAX_CHARACTERS} characters, {_MAX_VALUES} values, {_MAX_DEPTH} levels"
        raise InvalidInputError(f"{kind}: too large, expected at most {most}")
    return kind, text


def _is_small(value: Any) -> bool:
    """Whether JSON keeps to the limits of values and depth."""
    level, count = [value], 0
    for _ in range(_MAX_DEPTH):
        count += len(level)
        containers = [
            list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [inner for outer in containers for inner in outer]
        if not level:
            return count <= _MAX_VALUES
    return False


def _plain_texts(schema: Any) -> Any:
    """Give texts of a bounded length a pattern without control characters, which xgrammar 0.2.8 lets into them."""
    if isinstance(schema, list):
        return [_plain_texts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _plain_texts(value) for name, value in schema.items()}
    bounds = [found.pop(name, None) for name in ("minLength", "maxLength")] if found.get("type") == "string" else []
    if any(type(bound) is int for bound in bounds) and not {"pattern", "format", "enum", "const"} & found.keys():
        least, most = bounds
        found["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least or 0},{"" if most is None else most}}}$'
    elif bounds:
        found |= {
            name: bound for name, bound in zip(("minLength", "maxLength"), bounds, strict=True) if bound is not None
        }
    return found


def _alternatives(text: str) -> str:
    """Return EBNF for a JSON list of texts."""
    return f"root ::= {' | '.join(json.dumps(one) for one in json.loads(text))}"
