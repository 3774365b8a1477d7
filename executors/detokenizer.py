"""Text of a growing list of token ids, without decoding it anew for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; those of `tokenizers` and of transformers have it."""

    def decode(self, token_ids: list[int], /) -> str: ...


class Detokenizer:
    """Appends the text of new tokens to that of the tokens before.

    A token's text may depend on the one before it (a leading space), and a character may take several tokens: the text
    is the difference between two decodings of the last few tokens, and waits for the end of an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context = 0
        self._read = 0
        self.text = ""

    def read(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text of all of `token_ids`, which begin with those of the call before."""
        if len(token_ids) > self._read:
            before = self._tokenizer.decode(list(token_ids[self._context : self._read]))
            after = self._tokenizer.decode(list(token_ids[self._context :]))
            if is_last or not after.endswith("\N{REPLACEMENT CHARACTER}"):
                self.text += after[len(before) :]
                self._context, self._read = self._read, len(token_ids)
        return self.text


def find_stop(text: str, stops: Sequence[str], start: int) -> int:
    """Where the first of `stops` begins in `text` at or after `start`, -1 if none does."""
    return min((found for stop in stops if (found := text.find(stop, max(0, start))) >= 0), default=-1)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `stops`."""
    longest = max(map(len, stops), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
