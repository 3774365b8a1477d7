"""Compiler of grammars over one vocabulary: by llguidance, or by xgrammar for EBNF and its own tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import xgrammar
from tokenizers import Tokenizer

from paged.serving.grammar.matchers import GuidedMatcher, Matcher, XgrammarMatcher
from paged.serving.grammar.patterns import python_pattern
from paged.serving.grammar.tags import (
    UnknownTagError,
    choice_grammar,
    json_grammar,
    pattern_grammar,
    tag_grammar,
)
from paged.serving.grammar.xgrammar_schemas import check_tag


class Compiler:
    """Makes matchers from a kind and a text of grammar.

    Args:
        tokenizer: serialised tokenizer.
        vocab_size: vocabulary size of the model, which may exceed the tokenizer's.
        end_token_ids: tokens that may follow a complete answer; if empty, the tokenizer's.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        read = Tokenizer.from_str(tokenizer)
        texts = [""] * vocab_size
        for token, index in read.get_vocab(with_added_tokens=True).items():
            if index < vocab_size:
                texts[index] = token
        metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer)
        info = xgrammar.TokenizerInfo(
            texts, vocab_size=vocab_size, stop_token_ids=list(end_token_ids) or None, **metadata
        )
        self._vocab_size = vocab_size
        self.stop_ids = frozenset(info.stop_token_ids)
        special = {}
        for index, added in read.get_added_tokens_decoder().items():
            if added.special and index < vocab_size:
                special[added.content] = index
        self._special = special
        self._xgrammar = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        words = _Words(info.decoded_vocab, {*special.values(), *self.stop_ids})
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=[words.eos_token_id]
        )

    def matcher(self, kind: str, text: str) -> Matcher:
        """Return a matcher at the beginning of a text.

        Raises:
            ValueError: the grammar is malformed or has an unsupported part.
        """
        if kind == "json":
            return self._guided(json_grammar(json.loads(text)))
        if kind == "regex":
            return self._guided(pattern_grammar(python_pattern(text)))
        if kind == "choice":
            return self._guided(choice_grammar(json.loads(text)))
        if kind == "structural_tag":
            tag = json.loads(text)
            try:
                return self._guided(tag_grammar(tag, self._special))
            except UnknownTagError:
                check_tag(tag)
                text = json.dumps(tag, ensure_ascii=False)
                return self._compiled(self._xgrammar.compile_structural_tag, text)
        return self._compiled(self._xgrammar.compile_grammar, text)

    def _compiled(self, compile_text: Callable[[str], Any], text: str) -> Matcher:
        try:
            return XgrammarMatcher(compile_text(text), self._vocab_size)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def _guided(self, grammar: str) -> Matcher:
        return GuidedMatcher(self._vocabulary, self._vocab_size, self.stop_ids, grammar)


class _Words:
    """Vocabulary for llguidance, with a row after all tokens that ends a text."""

    bos_token_id = None

    def __init__(self, words: Sequence[bytes], special_ids: set[int]) -> None:
        self.tokens = [*words, b""]
        self.eos_token_id = len(words)
        self.special_token_ids = sorted({*special_ids, self.eos_token_id})

    def __call__(self, text: Any) -> list[int]:
        """Encode nothing, because tokens are only read."""
        return []
