"""Search for stop strings in a growing text."""

from __future__ import annotations

from collections.abc import Sequence


class StopReader:
    """Searches a growing text for stop strings.

    The start of the held text only moves forward, so each character is tried once as the start of a stop string.

    Attributes:
        held: end of the text that may begin a stop string and is not shown yet.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._firsts = {string[0] for string in strings}
        self.held = ""

    def read(self, added: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return the text that can be shown now and the stop string that ended it, or None.

        The first string to complete wins; if several complete at the same character, the longest one does.
        `may_stop=False` ignores strings that complete within `added`.
        """
        text, before = self.held + added, len(self.held)
        if self._firsts.isdisjoint(text):
            return text, None
        if may_stop:
            ends = []
            for string in self._strings:
                start = text.find(string, max(0, before + 1 - len(string)))
                if start >= 0:
                    ends.append((start + len(string), -len(string), string))
            if ends:
                end, _, string = min(ends)
                return text[: end - len(string)], string
        num_shown = 0
        while num_shown < len(text) and not self._begins(text, num_shown):
            num_shown += 1
        self.held = text[num_shown:]
        return text[:num_shown], None

    def _begins(self, text: str, start: int) -> bool:
        """Return whether the text from `start` is a proper prefix of a stop string."""
        if text[start] not in self._firsts:
            return False
        end = text[start:]
        return any(len(string) > len(end) and string.startswith(end) for string in self._strings)
