"""Text token by token: that of the whole, also where characters and spaces depend on neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.executors.text.detokenizer import Detokenizer
from paged.executors.text.stop_strings import StopReader, StopStrings


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


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string to be complete, the longest of them, by looking everywhere."""
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - len(max(complete, key=len))], max(complete, key=len)
    return text, None


PIECES = st.lists(st.text("ab€", max_size=4), max_size=8)


@given(pieces=PIECES, stops=st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4))
def test_stops_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    reader, so_far, found = StopReader(StopStrings(stops)), "", None
    for piece in pieces:
        shown, found = reader.read(piece)
        so_far += shown
        if found is not None:
            break
        assert not any(stop.startswith(so_far[-1:]) for stop in stops if reader.held == "" and so_far[-1:])
        assert reader.held == "" or any(stop.startswith(reader.held) for stop in stops)
    assert (so_far if found else so_far + reader.held, found) == first_stop("".join(pieces), stops)


def test_stops_that_may_not_end_the_text_yet() -> None:
    reader = StopReader(StopStrings(["end", "###"]))
    assert reader.read("an end #", may_stop=False) == ("an end ", None)
    assert reader.held == "#"
    assert reader.read("## more") == ("", "###")
