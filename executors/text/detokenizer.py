"""Incremental decoding of a growing list of token ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from paged.errors import InvalidInputError
from paged.kernels.core.errors import shown

# Maximum number of tokens that may wait for the end of a character. A UTF-8 character has up to 4 bytes, so more tokens
# are no text.
_MAX_PENDING = 16
_CHARACTER_BYTES = 4


Message = Mapping[str, Any]  # chat message: "role", "content" and further keys for the template


class Tokenizer(Protocol):
    """Tokenizer interface of the engine, which tokenizers of `tokenizers` and transformers implement."""

    def decode(self, token_ids: list[int], /) -> str: ...


@runtime_checkable
class PromptTokenizer(Tokenizer, Protocol):
    """Tokenizer that also encodes prompts, with special tokens as plain text; see `ChatTokenizer`."""

    def encode(self, text: str, /) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]: ...


class Detokenizer:
    """Computes the text that new tokens add, in linear time.

    A token's text may depend on the previous token (a leading space), and a character may take several tokens.
    Therefore the text is the difference of two decodings of the last few tokens. It waits for the end of an unfinished
    character, for at most 16 tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context = 0
        self._read = 0

    def read(self, token_ids: list[int], end: int, *, is_last: bool = False) -> str:
        """Return the text that the tokens before `end` add to the text read so far. `token_ids` must only grow."""
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
        """Return end and text of the longest prefix of tokens that cuts no character, else of all tokens."""
        for cut in range(end - _CHARACTER_BYTES + 1, end - 2 * _CHARACTER_BYTES, -1):
            text = self._decode(token_ids[self._context : cut])
            if after.startswith(text):
                return cut, text
        return end, after
