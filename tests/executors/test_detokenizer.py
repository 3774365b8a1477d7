"""Text token by token: that of the whole, also where characters and spaces depend on neighbours."""

from __future__ import annotations

import pytest

from paged.executors.detokenizer import Detokenizer, find_stop, held_back


class Bytes:
    """A token is a byte of UTF-8; an unfinished character decodes to U+FFFD."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class Words:
    """Tokens are words, with spaces between them."""

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(f"w{token}" for token in token_ids)


@pytest.mark.parametrize("text", ["plain", "smörgås", "日本語 text 🙂!", "🙂🙂"])
def test_characters_of_several_tokens(text: str) -> None:
    ids, reader = list(text.encode()), Detokenizer(Bytes())
    for end in range(1, len(ids) + 1):
        so_far = reader.read(ids[:end])
        assert text.startswith(so_far)
        assert "\N{REPLACEMENT CHARACTER}" not in so_far
    assert so_far == text


def test_an_unfinished_end_shows_at_last() -> None:
    ids, reader = list("a🙂".encode())[:-1], Detokenizer(Bytes())
    assert reader.read(ids) == ""
    assert reader.read(ids, is_last=True) == "a\N{REPLACEMENT CHARACTER}"


def test_spaces_between_words() -> None:
    reader = Detokenizer(Words())
    assert [reader.read(list(range(end))) for end in (1, 2, 4)] == ["w0", "w0 w1", "w0 w1 w2 w3"]
    assert reader.read([0, 1, 2, 3]) == "w0 w1 w2 w3"


def test_stops_and_their_beginnings() -> None:
    assert find_stop("abcabc", ["c", "bc"], 0) == 1
    assert find_stop("abcabc", ["c"], 3) == 5
    assert find_stop("abc", ["x"], -5) == -1
    assert held_back("one ##", ["###", "no"]) == 2
    assert held_back("one n", ["###", "no"]) == 1
    assert held_back("one", ["###"]) == held_back("", ["ab"]) == held_back("x", []) == 0
