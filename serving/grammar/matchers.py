"""Matchers of llguidance and xgrammar with a common interface."""

from __future__ import annotations

import re
from typing import Any, Protocol

import numpy as np
import torch
from llguidance import LLMatcher

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class Matcher(Protocol):
    """State of a grammar after the tokens so far."""

    def accept(self, token: int) -> bool:
        """Advance by a token; return False without advancing if the token is not allowed."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""

    def mask(self) -> bytes:
        """Return the allowed tokens as bits in words of 32; empty if the text has ended."""


class GuidedMatcher:
    """llguidance's matcher over a vocabulary with an extra row after all tokens, which ends a text.

    Args:
        stop_ids: tokens that may follow a complete text.

    Raises:
        ValueError: the grammar is malformed.
    """

    def __init__(self, vocabulary: Any, vocab_size: int, stop_ids: frozenset[int], grammar: str) -> None:
        # no_forcing: any tokens may spell a text, not only the tokenizer's choice.
        self._begin = LLMatcher(vocabulary, f'%llguidance {{"no_forcing": true}}\n{grammar}', log_level=0)
        if self._begin.is_error():
            error = _PLACE.sub("", self._begin.get_error().partition("\n")[0])
            if error.startswith("Unable to determine if regex is empty"):
                error = "pattern: too complex beside the other rules of its text"
            elif error.startswith("oneOf "):
                error = "oneOf: not supported unless no two options have a value in common"
            raise ValueError(error)
        self._matcher = self._begin.deep_copy()
        self._vocab_size, self._stop_ids = vocab_size, stop_ids
        self._tokens: list[int] = []
        self._has_ended = False

    def accept(self, token: int) -> bool:
        if self._has_ended:
            return False
        if self._matcher.try_consume_tokens([token]) == 1:
            self._tokens.append(token)
            return True
        self._has_ended = token in self._stop_ids and self._matcher.is_accepting()
        return self._has_ended

    def rollback(self, num_tokens: int) -> None:
        if self._has_ended and num_tokens:
            self._has_ended = False
            num_tokens -= 1
        if not num_tokens:
            return
        del self._tokens[-num_tokens:]
        if self._matcher.is_error() or not self._matcher.rollback(num_tokens):
            self._matcher = self._begin.deep_copy()
            self._matcher.consume_tokens(self._tokens)

    def mask(self) -> bytes:
        if self._has_ended:
            return b""
        is_whole = self._matcher.is_accepting()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8).copy()
        bits = bits[: -(-self._vocab_size // 32) * 4]
        if self._matcher.is_error():
            error = self._matcher.get_error()
            if not error.startswith("NoExtension"):
                raise RuntimeError(error)
            bits[:] = 0
        if self._vocab_size // 8 < len(bits):  # clear bits behind the vocabulary
            bits[self._vocab_size // 8] &= 0xFF >> (8 - self._vocab_size % 8)
            bits[self._vocab_size // 8 + 1 :] = 0
        if is_whole:
            for token in self._stop_ids:
                bits[token // 8] |= 1 << token % 8
        return bits.tobytes()


class XgrammarMatcher:
    """Matcher of xgrammar for a compiled grammar."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = torch.empty(1, -(-vocab_size // 32), dtype=torch.int32)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def mask(self) -> bytes:
        if self._matcher.is_terminated():  # xgrammar gives no mask then
            return b""
        self._mask.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask.numpy().tobytes()
