"""Interfaces of rules that a request brings: token masks, logits processors, ends of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class TokenMask(Protocol):
    """Grammar state of one completion, with the methods of `xgrammar.GrammarMatcher`."""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> object:
        """Fill row `index` of `bitmask` int32 [n, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 allows token t."""

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token; return False without advancing if the token is not allowed."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""

    def is_terminated(self) -> bool:
        """Return whether the text is complete and no token may follow."""

    def fork(self) -> TokenMask:
        """Return an independent copy."""


@runtime_checkable
class AwaitedMask(TokenMask, Protocol):
    """Mask computed in another thread while steps run; a completion joins a step once its mask has arrived."""

    def is_ready(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the next mask or an error; return whether it arrived."""

    @property
    def is_quick(self) -> bool:
        """Whether masks usually arrive before they are needed."""

    def close(self) -> None:
        """Free all resources; called when the completion has ended."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """Function of a completion's tokens and logits, which may have state."""

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits to sample from, float32 [vocab_size] on the device of `logits`.

        token_ids: the output so far, then the drafts before this position.
        """

    def fork(self) -> LogitsProcessor:
        """Return a copy for another completion of the same request."""


@runtime_checkable
class TextEnd(Protocol):
    """Tells when a completion's text is complete. No step waits for it, as with stop strings."""

    def read(self, text: str) -> bool:
        """Read the text added by a token; return whether the text is complete, from then on always True."""

    def fork(self) -> TextEnd:
        """Return a fresh one, without text, for another completion of the request."""
