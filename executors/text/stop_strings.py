"""The first of several strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopReader:
    """Reads one text as it grows. held: its end, which may be the beginning of a string and is not to be shown yet.

    The beginning of what is held only moves on, so that each character is tried as one a single time.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._firsts = {string[0] for string in strings}
        self.held = ""

    def read(self, added: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Read on: the characters that can be shown now, and the string that was found, before which they end.

        The first string to be complete counts, the longest of those complete at the same character. `may_stop=False`
        passes over those that are complete within `added`.
        """
        text, before = self.held + added, len(self.held)
        if self._firsts.isdisjoint(text):
            return text, None
        if may_stop:
            starts = ((text.find(one, max(0, before + 1 - len(one))), one) for one in self._strings)
            ends = [(start + len(one), -len(one), one) for start, one in starts if start >= 0]
            if ends:
                end, _, found = min(ends)
                return text[: end - len(found)], found
        shown = next((start for start in range(len(text)) if self._begins(text, start)), len(text))
        self.held = text[shown:]
        return text[:shown], None

    def _begins(self, text: str, start: int) -> bool:
        """Whether the text from there on is the beginning of a string, and not all of it."""
        if text[start] not in self._firsts:
            return False
        end = text[start:]
        return any(len(one) > len(end) and one.startswith(end) for one in self._strings)
