"""Complements of patterns, by a deterministic automaton that is converted back to a pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

Ranges = tuple[tuple[int, int], ...]
"""Code points as ranges that include both ends."""

LAST_CHARACTER = 0x10FFFF
_MOST_STATES, _MOST_CHARACTERS = 64, 1 << 14


class Automaton(NamedTuple):
    """Nondeterministic automaton that begins in state 0 and ends in the last state.

    Attributes:
        edges: for each state, (characters, next state) pairs; None stands for no character.
    """

    edges: list[list[tuple[Ranges | None, int]]]

    def state(self) -> int:
        """Add a state and return it.

        Raises:
            ValueError: there are too many states.
        """
        if len(self.edges) > 4 * _MOST_STATES:
            raise ValueError("pattern: a negative lookahead is too large")
        self.edges.append([])
        return len(self.edges) - 1

    def link(self, begin: int, ranges: Ranges | None, end: int) -> None:
        self.edges[begin].append((ranges, end))


def complement_pattern(automaton: Automaton, end: int, as_set: Callable[[Ranges], str]) -> str:
    """Return a pattern of all texts that do not lead an automaton from state 0 to `end`.

    Args:
        as_set: converts a set of characters to a pattern.

    Raises:
        ValueError: the pattern is too large or matches nothing.
    """
    letters = _letters(automaton)
    start = _closure(automaton, {0})
    numbers = {start: 0}
    waiting = [start]
    steps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    while waiting:
        states = waiting.pop()
        for letter in letters:
            reached = set()
            for state in states:
                for ranges, target in automaton.edges[state]:
                    if ranges is not None and any(first <= letter[0] <= last for first, last in ranges):
                        reached.add(target)
            targets = _closure(automaton, reached)
            if targets not in numbers:
                if len(numbers) >= _MOST_STATES:
                    raise ValueError("pattern: a negative lookahead is too large")
                numbers[targets] = len(numbers)
                waiting.append(targets)
            steps.setdefault((numbers[states], numbers[targets]), []).append(letter)
    edges = {pair: as_set(tuple(ranges)) for pair, ranges in steps.items()}
    outside = [number for states, number in numbers.items() if end not in states]
    return _without_states(edges, len(numbers), outside)


def _letters(automaton: Automaton) -> list[tuple[int, int]]:
    """Return ranges of characters that every edge contains entirely or not at all."""
    bounds = {0, LAST_CHARACTER + 1}
    for edges in automaton.edges:
        for ranges, _ in edges:
            for first, last in ranges or ():
                bounds |= {first, last + 1}
    points = sorted(bounds)
    return [(first, behind - 1) for first, behind in pairwise(points)]


def _closure(automaton: Automaton, states: Iterable[int]) -> frozenset[int]:
    reached = set(states)
    waiting = list(reached)
    while waiting:
        for ranges, target in automaton.edges[waiting.pop()]:
            if ranges is None and target not in reached:
                reached.add(target)
                waiting.append(target)
    return frozenset(reached)


def _without_states(edges: dict[tuple[int, int], str], num_states: int, accepting: Iterable[int]) -> str:
    """Return the pattern of a deterministic automaton, by eliminating one state after the other."""
    begin, end = -1, -2
    edges = {**edges, (begin, 0): ""}
    for state in accepting:
        edges[state, end] = ""
    for state in reversed(range(num_states)):
        loop = edges.pop((state, state), None)
        around = "" if loop is None else f"(?:{loop})*"
        before = [(pair[0], edges.pop(pair)) for pair in list(edges) if pair[1] == state]
        behind = [(pair[1], edges.pop(pair)) for pair in list(edges) if pair[0] == state]
        for source, first in before:
            for target, last in behind:
                text = f"{first}{around}{last}"
                other = edges.get((source, target))
                edges[source, target] = text if other is None else f"(?:{other}|{text})"
        if sum(map(len, edges.values())) > _MOST_CHARACTERS:
            raise ValueError("pattern: a negative lookahead is too large")
    if (begin, end) not in edges:
        raise ValueError("pattern: a negative lookahead leaves no text")
    return edges[begin, end]
