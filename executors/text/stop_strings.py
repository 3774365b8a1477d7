"""The first of several strings in a text that grows, found by reading each character once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of Aho and Corasick (1975): a state is the longest end of the text that some string begins with.

    Shared by all completions of a request; `StopReader` reads a text with it. Building it takes time and memory linear
    in the strings' length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._fallback = [0]
        self.lengths = [0]
        # The longest string that ends where a state is reached.
        self.found: list[str | None] = [None]
        for string in strings:
            state = 0
            for char in string:
                state = self._next.setdefault((state, char), len(self.lengths))
                if state == len(self.lengths):
                    self.lengths.append(0)
                    self.found.append(None)
                    self._fallback.append(0)
            self.found[state] = string
        self._link()

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (after := self._next.get((state, char))) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return after

    def _link(self) -> None:
        """Set lengths and fallbacks, breadth first: the shorter ends of a state's text come before it."""
        children: dict[int, list[tuple[str, int]]] = {}
        for (parent, char), child in self._next.items():
            children.setdefault(parent, []).append((char, child))
        queue = deque([0])
        while queue:
            parent = queue.popleft()
            for char, child in children.get(parent, ()):
                self.lengths[child] = self.lengths[parent] + 1
                if parent:
                    self._fallback[child] = self.advance(self._fallback[parent], char)
                self.found[child] = self.found[child] or self.found[self._fallback[child]]
                queue.append(child)


class StopReader:
    """Reads one text as it grows. held: its end, which may be the beginning of a string and is not to be shown yet."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self.held = ""

    def read(self, added: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Read on: the characters that can be shown now, and the string that was found, before which they end.

        The first string to be complete counts, the longest of those complete at the same character. `may_stop=False`
        passes over those that are complete within `added`.
        """
        text, before, state = self.held + added, len(self.held), self._state
        for end, char in enumerate(added, before + 1):
            state = self._strings.advance(state, char)
            found = self._strings.found[state]
            if found is not None and may_stop:
                return text[: end - len(found)], found
        self._state = state
        shown = len(text) - self._strings.lengths[state]
        self.held = text[shown:]
        return text[:shown], None
