"""Interfaces of a request's own rules for its tokens: a mask of the next token, or a function of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class TokenMask(Protocol):
    """State of a grammar along one completion, with the methods of `xgrammar.GrammarMatcher`."""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> object:
        """Set row `index` of `bitmask`, int32 [n, ceil(vocab_size / 32)]: bit t % 32 of word t // 32 allows token t."""

    def accept_token(self, token_id: int) -> bool:
        """Move on by a token; return False, and stay, if it is not allowed."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""

    def is_terminated(self) -> bool:
        """Return whether the text is complete, so that no token may follow."""

    def fork(self) -> TokenMask:
        """Return a copy that goes on by itself."""


@runtime_checkable
class AwaitedMask(TokenMask, Protocol):
    """A mask that is computed elsewhere while steps run: a completion joins a step once its mask has arrived."""

    def is_ready(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the next mask, or an error; return whether it arrived."""

    @property
    def is_quick(self) -> bool:
        """Whether a mask is likely to have arrived when it is needed."""

    def close(self) -> None:
        """Free what it holds; its completion has ended."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """A function of a completion's tokens and logits, which may keep a state."""

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits to sample from, float32 [vocab_size] on the device of `logits`.

        token_ids: the output so far, and the drafts before this position.
        """

    def fork(self) -> LogitsProcessor:
        """Return a copy for another completion of the same request."""


@runtime_checkable
class TextEnd(Protocol):
    """Says when a completion's text is complete. As for stop strings, no step waits for it."""

    def read(self, text: str) -> bool:
        """Read what a token adds to the text; return whether the text ends with it, and from then on True."""

    def fork(self) -> TextEnd:
        """Return one for another completion of the same request, which has read nothing."""
