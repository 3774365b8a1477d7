"""Texts and bytes of single tokens, which together form an answer's text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from paged.executors.requests.output import CompletionOutput
from paged.executors.text.detokenizer import Detokenizer, Tokenizer
from paged.serving.text.chat_tokenizer import ChatTokenizer
from paged.serving.text.special_tokens import encoded

_REPLACED = "\N{REPLACEMENT CHARACTER}"  # decoded text of a partial character
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in SentencePiece vocabularies


def _byte_letters() -> dict[str, int]:
    """Return the byte by GPT-2's letter: printable bytes are themselves, others are letters from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    for index, byte in enumerate(unprintable):
        letters[chr(256 + index)] = byte
    return letters


_BYTE_LETTERS = _byte_letters()


class TokenTexts:
    """Text and bytes of each token, cached without limit because tokens are few."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._texts: dict[tuple[int, bool], str] = {}

    def text(self, token: int, *, is_first: bool = False) -> str:
        """Return the text that a token adds. The first token may lack its space."""
        text = self._texts.get((token, is_first))
        if text is None:
            text = self._decode([token])
            if not (is_first or token in self._special):
                twice = self._decode([token, token])
                if twice.startswith(text):
                    text = twice[len(text) :]
            self._texts[token, is_first] = text
        return text

    def bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes of a token's text, which may be part of a character."""
        text = self.text(token, is_first=is_first)
        if _REPLACED not in text:
            return text.encode()
        name = self._tokenizer.id_to_token(token) or ""
        match = _BYTE.fullmatch(name)
        if match is not None:
            return bytes.fromhex(match[1])
        if _BYTE_LETTERS.keys() >= set(name):
            return bytes(_BYTE_LETTERS[letter] for letter in name)
        return text.encode()

    def offsets(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        """Return the number of characters before each token; None if the text does not encode to these ids."""
        encoding = encoded(self._tokenizer, text, add_special_tokens=True)
        if encoding.ids != list(token_ids):
            return None
        offsets = []
        largest_end = 0
        for _, end in encoding.offsets:
            offsets.append(largest_end)
            largest_end = max(largest_end, end)
        return offsets

    def is_shown(self, token: int) -> bool:
        """Return whether decoded text shows a token."""
        return token not in self._special

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


class TokenRow(NamedTuple):
    """A token of an answer.

    Attributes:
        offset: number of characters before the token.
        bytes: the token's part of the text in UTF-8; empty if it is not shown. All parts together form the text.
        logprobs: log probability by token, the chosen token first; None for the first token of a prompt.
    """

    token: int
    is_first: bool
    offset: int
    bytes: bytes
    logprobs: Mapping[int, float] | None


class TokenReader:
    """Yields the tokens of a growing text, each when its part of the text is known."""

    def __init__(self, texts: TokenTexts, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._texts, self._detokenizer = texts, Detokenizer(tokenizer)
        self._offset = offset
        self._shown = 0  # number of bytes already assigned to tokens
        self._num_read = 0
        self._open: list[TokenRow] = []  # newest tokens, whose text is not known yet
        self._known: deque[TokenRow] = deque()  # earlier tokens, whose text may still be part of a stop string

    def read(self, part: CompletionOutput) -> Iterator[TokenRow]:
        """Yield the tokens that are known after the text has grown by `part`."""
        self._shown += len(part.text.encode())
        return self.read_tokens(part.growth.token_ids, part.logprobs or (), is_last=part.finish_reason is not None)

    def read_tokens(
        self, token_ids: list[int], rows: Sequence[Mapping[int, float] | None], *, is_last: bool
    ) -> Iterator[TokenRow]:
        """Yield the known tokens. rows: log probabilities of the new tokens. is_last: whether the text ends here."""
        for row in rows:
            token, is_first = token_ids[self._num_read], self._num_read == 0
            self._open.append(TokenRow(token, is_first, self._offset, b"", row))
            self._num_read += 1
            is_end = is_last and self._num_read == len(token_ids)
            text = self._detokenizer.read(token_ids, self._num_read, is_last=is_end)
            if text or is_end:
                self._close(text)
        if is_last and self._open:  # the text ended without a further token
            self._close(self._detokenizer.read(token_ids, self._num_read, is_last=True))
        while self._known and (is_last or len(self._known[0].bytes) <= self._shown):
            known = self._known.popleft()
            known = known._replace(bytes=known.bytes[: self._shown])
            self._shown -= len(known.bytes)
            yield known

    def _close(self, text: str) -> None:
        """Assign parts of the text to the open tokens; if the parts do not match, the last token gets all of it."""
        parts = []
        for row in self._open:
            part = b""
            if self._texts.is_shown(row.token):
                part = self._texts.bytes(row.token, is_first=row.is_first)
            parts.append(part)
        if b"".join(parts) != text.encode():
            parts = [b""] * (len(parts) - 1) + [text.encode()]
        begin = b""
        for row, part in zip(self._open, parts, strict=True):
            offset = self._offset + len(begin.decode(errors="ignore"))
            self._known.append(row._replace(offset=offset, bytes=part))
            begin += part
        self._open.clear()
        self._offset += len(text)
