"""The protocol of sources of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paged.cache.manager import PagedKvCacheManager
from paged.executors.requests.request import Completion
from paged.executors.sampling.sampler import Drafts


class Proposer(Protocol):
    """Drafts tokens for completions that decode.

    num_tokens: the most for one of them at a time. vocab_size: of the ids it drafts; None where they are of the text.
    """

    num_tokens: int
    vocab_size: int | None

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        """Draft at most `limits` tokens for each completion; none is always right."""

    def forget(self, completion: Completion) -> None:
        """Drop what is kept of a completion that is finished, or was preempted."""

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        """Give back all it holds in a target's cache; False if that is nothing."""
