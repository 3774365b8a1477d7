"""Random ways through a grammar, a byte at a time, without a process around it."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from paged.serving.text.token_texts import _BYTE_LETTERS
from tests.serving.grammar.test_structured import END, VOCABULARY, byte_tokenizer

if TYPE_CHECKING:
    from paged.serving.grammar.compiler import Compiler
    from paged.serving.grammar.matchers import Matcher


@cache
def compiler() -> Compiler:
    from paged.serving.grammar.compiler import Compiler

    return Compiler(byte_tokenizer().to_str(), VOCABULARY, [END])


@cache
def letters() -> list[bytes]:
    """The byte of every token but the end."""
    tokenizer = byte_tokenizer()
    return [bytes([_BYTE_LETTERS[tokenizer.id_to_token(token)]]) for token in range(END)]


@cache
def tokens_by_byte() -> dict[int, int]:
    return {letter[0]: token for token, letter in enumerate(letters())}


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits).tolist()
    return tokens


def walk(matcher: Matcher, rng: random.Random, most: int = 400) -> str | None:
    """Return a text that the grammar ends, None if it goes on for long or if nothing may follow.

    Ends and closing characters are likely, so that texts become short.
    """
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(matcher)
        if not choices:
            return None
        if END in choices and (len(choices) == 1 or rng.random() < 0.5):
            assert matcher.accept(END)
            assert matcher.mask() == b""
            return b"".join(letters()[token] for token in tokens).decode(errors="replace")
        choices = [token for token in choices if token != END]
        closing = [token for token in choices if letters()[token] in b'"]}']
        ascii_ones = [token for token in choices if letters()[token][0] < 128]
        if closing and rng.random() < 0.4:
            choices = closing
        elif ascii_ones and rng.random() < 0.95:
            choices = ascii_ones
        tokens.append(rng.choice(choices))
        assert matcher.accept(tokens[-1])
    return None


def accepts(matcher: Matcher, text: str) -> bool:
    """Return whether a text is whole under a grammar that has taken nothing yet."""
    tokens = [tokens_by_byte()[byte] for byte in text.encode()]
    count = 0
    for token in tokens:
        if not matcher.accept(token):
            break
        count += 1
    is_whole = count == len(tokens) and END in allowed(matcher)
    matcher.rollback(count)
    return is_whole
