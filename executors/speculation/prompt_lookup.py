"""Speculative decoding by prompt lookup: drafts are the tokens that followed the same n-gram earlier in the text."""

from __future__ import annotations

from collections.abc import Sequence

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError
from paged.executors.requests.request import Completion
from paged.executors.sampling.sampler import Drafts
from paged.seq_id import SeqId


class PromptLookup:
    """`Proposer` that looks up n-grams in the text (prompt lookup decoding, Saxena, 2023).

    Args:
        num_tokens: maximum number of drafts for a completion.
        max_ngram: length of the longest n-gram; shorter n-grams are tried after it.

    Raises:
        InvalidInputError: a number is below 1.
    """

    vocab_size: int | None = None

    def __init__(self, num_tokens: int = 4, *, max_ngram: int = 3) -> None:
        if num_tokens < 1 or max_ngram < 1:
            raise InvalidInputError(f"num_tokens {num_tokens}, max_ngram {max_ngram}: expected at least 1")
        self.num_tokens = num_tokens
        self._max_ngram = max_ngram
        self._texts: dict[SeqId, _Text] = {}

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        drafts = []
        for completion, limit in zip(completions, limits, strict=True):
            text = self._texts.setdefault(completion.seq_id, _Text(self._max_ngram))
            text.extend(completion.tokens_from(len(text.tokens)))
            drafts.append(text.continuation(min(limit, self.num_tokens)))
        return Drafts(drafts)

    def forget(self, completion: Completion) -> None:
        self._texts.pop(completion.seq_id, None)

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        return False


class _Text:
    """A growing text with the last end position of each n-gram of up to `max_ngram` tokens."""

    def __init__(self, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self._max_ngram = max_ngram
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens. N-grams that end at the newest token are noted later, because `continuation` looks them up."""
        first = max(len(self.tokens), 1)
        self.tokens += tokens
        for end in range(first, len(self.tokens)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(self.tokens[end - size : end])] = end

    def continuation(self, count: int) -> list[int]:
        """Return the tokens that followed the longest n-gram at the end of the text at its previous occurrence."""
        for size in range(min(self._max_ngram, len(self.tokens) - 1), 0, -1):
            end = self._ends.get(tuple(self.tokens[-size:]))
            if end is not None:
                return self.tokens[end : end + count]
        return []
