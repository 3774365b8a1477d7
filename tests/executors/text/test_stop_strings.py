"""Stop strings: the first to be complete ends a text, however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from paged.executors.text.stop_strings import StopReader


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string to be complete, the longest of them, by looking everywhere."""
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - len(max(complete, key=len))], max(complete, key=len)
    return text, None


PIECES = st.lists(st.text("ab€", max_size=4), max_size=8)


@given(pieces=PIECES, stops=st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4))
def test_stops_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    reader, so_far, found = StopReader(stops), "", None
    for piece in pieces:
        shown, found = reader.read(piece)
        so_far += shown
        if found is not None:
            break
        assert not any(stop.startswith(so_far[-1:]) for stop in stops if reader.held == "" and so_far[-1:])
        assert reader.held == "" or any(stop.startswith(reader.held) for stop in stops)
    assert (so_far if found else so_far + reader.held, found) == first_stop("".join(pieces), stops)


def test_stops_that_may_not_end_the_text_yet() -> None:
    reader = StopReader(["end", "###"])
    assert reader.read("an end #", may_stop=False) == ("an end ", None)
    assert reader.held == "#"
    assert reader.read("## more") == ("", "###")
