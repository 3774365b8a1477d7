"""Text token by token: that of the whole, also where characters and spaces depend on neighbours."""

from __future__ import annotations

import pytest

from paged.executors.text.detokenizer import Detokenizer


class Bytes:
    """A token is a byte of UTF-8; an unfinished character decodes to U+FFFD."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def decode(self, token_ids: list[int]) -> str:
        self.lengths.append(len(token_ids))
        return bytes(token_ids).decode("utf-8", errors="replace")


class Words:
    """Tokens are words, with spaces between them."""

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(f"w{token}" for token in token_ids)


@pytest.mark.parametrize("text", ["plain", "smörgås", "日本語 text 🙂!", "🙂🙂"])
def test_characters_of_several_tokens(text: str) -> None:
    ids, reader, so_far = list(text.encode()), Detokenizer(Bytes()), ""
    for end in range(1, len(ids) + 1):
        so_far += reader.read(ids, end)
        assert text.startswith(so_far)
        assert "\N{REPLACEMENT CHARACTER}" not in so_far
    assert so_far == text


def test_an_unfinished_end_shows_at_last() -> None:
    ids, reader = list("a🙂".encode())[:-1], Detokenizer(Bytes())
    assert reader.read(ids, 4) == ""
    assert reader.read(ids, 4, is_last=True) == "a\N{REPLACEMENT CHARACTER}"


def test_spaces_between_words() -> None:
    reader, ids = Detokenizer(Words()), [0, 1, 2, 3]
    assert [reader.read(ids, end) for end in (1, 2, 4, 4)] == ["w0", " w1", " w2 w3", ""]


@pytest.mark.parametrize("ids", [[0xFF] * 300, [0xE2] * 300, [*b"\xff" * 15, *"€".encode()] * 20, [0x80, 0xE2] * 99])
def test_bytes_that_are_no_text_cost_the_same_each(ids: list[int]) -> None:
    """What is read is what the whole decodes to, by calls that look at few tokens each."""
    tokenizer, so_far = Bytes(), ""
    reader = Detokenizer(tokenizer)
    for end in range(1, len(ids) + 1):
        so_far += reader.read(ids, end, is_last=end == len(ids))
    assert so_far == tokenizer.decode(ids)
    assert max(tokenizer.lengths[:-1]) <= 2 * 16
    assert sum(tokenizer.lengths[:-1]) <= 50 * len(ids)
