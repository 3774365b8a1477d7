"""Incremental decoding: the text of a growing list of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import shown

# Tokens that may wait for the end of a character. A UTF-8 character has at most 4 bytes, so longer waits are no text.
_MAX_PENDING = 16
_CHARACTER_BYTES = 4


Message = Mapping[str, Any]  # of a chat: "role", "content" and what a template reads besides


class Tokenizer(Protocol):
    """The tokenizer interface of the engine; tokenizers of `tokenizers` and transformers have it."""

    def decode(self, token_ids: list[int], /) -> str: ...


@runtime_checkable
class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that also encodes prompts, in which special tokens are plain text; see `ChatTokenizer`."""

    def encode(self, text: str, /) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]: ...


class Detokenizer:
    """Returns the text that new tokens add, in linear time.

    A token's text may depend on the one before it (a leading space), and a character may take several tokens. So the
    text is the difference between two decodings of the last few tokens, and waits for the end of an unfinished
    character, for at most 16 tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context = 0
        self._read = 0

    def read(self, token_ids: list[int], end: int, *, is_last: bool = False) -> str:
        """Return the text that the tokens before `end` add to the text read so far; `token_ids` only grows."""
        if end <= self._read:
            return ""
        before = self._decode(token_ids[self._context : self._read])
        after = self._decode(token_ids[self._context : end])
        if not is_last and after.endswith("\N{REPLACEMENT CHARACTER}"):
            if end - self._read < _MAX_PENDING:
                return ""
            end, after = self._finished(token_ids, end, after)
        self._context, self._read = self._read, end
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids)
        if not isinstance(text, str):
            raise InvalidInputError(f"tokenizer: decode returned {shown(text)}, expected a str")
        return text

    def _finished(self, token_ids: list[int], end: int, after: str) -> tuple[int, str]:
        """Return the end and text of the longest prefix of tokens without a cut character, or of all if none."""
        for cut in range(end - _CHARACTER_BYTES + 1, end - 2 * _CHARACTER_BYTES, -1):
            text = self._decode(token_ids[self._context : cut])
            if after.startswith(text):
                return cut, text
        return end, after
