"""Text token by token: that of the whole, also where characters and spaces depend on neighbours."""

import pytest

from paged.executors.text.detokenizer import Detokenizer


class Bytes:
    """A token is a byte of UTF-8; an unfinished character decodes to U+FFFD."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def decode(self, token_ids: list[int]) -> str:
        self.lengths.append(len(token_ids))
        return bytes(token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "smörgås", "日本語 text 🙂!", "🙂🙂"])
def test_characters_of_several_tokens(text: str) -> None:
    ids, reader, so_far = list(text.encode()), Detokenizer(Bytes()), ""
    for end in range(1, len(ids) + 1):
        so_far += reader.read(ids, end)
        assert text.startswith(so_far)
        assert "\N{REPLACEMENT CHARACTER}" not in so_far
    assert so_far == text


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
