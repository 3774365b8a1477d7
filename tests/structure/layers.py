"""Rows of a layered graph: what others need stands further down, in an order with as few crossings as are found."""

from __future__ import annotations

from itertools import combinations, pairwise

from tests.structure.imports import Graph

# What stands in a row: a box, by its name, or a line that passes between boxes, by the two that it joins.
Entry = str | tuple[str, str]
Row = list[Entry]


def rows_of(graph: Graph) -> list[Row]:
    """Rows from the top down."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max(map(height, graph[name]), default=-1)
        return heights[name]

    rows: list[Row] = [[] for _ in range(1 + max(map(height, graph)))]
    for name in sorted(graph):
        rows[-1 - heights[name]].append(name)
        for end in sorted(graph[name]):
            for between in range(heights[end] + 1, heights[name]):
                rows[-1 - between].append((name, end))
    for _ in range(6):
        for row in rows:
            for first, second in combinations(range(len(row)), 2):
                before = _badness(graph, rows)
                row[first], row[second] = row[second], row[first]
                if _badness(graph, rows) >= before:
                    row[first], row[second] = row[second], row[first]
    return rows


def are_joined(graph: Graph, upper: Entry, lower: Entry) -> bool:
    """Whether a line leads from an entry of one row to one of the next."""
    if isinstance(upper, tuple):
        return lower in (upper, upper[1])
    return lower[0] == upper if isinstance(lower, tuple) else lower in graph[upper]


def _badness(graph: Graph, rows: list[Row]) -> tuple[int, float]:
    """Crossings, then the distance that the lines go to the side where every row is centred."""
    crossings, distance = 0, 0.0
    for upper, lower in pairwise(rows):
        lines = [(a, b) for a, x in enumerate(upper) for b, y in enumerate(lower) if are_joined(graph, x, y)]
        crossings += sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(lines, 2))
        distance += sum(abs((a - (len(upper) - 1) / 2) - (b - (len(lower) - 1) / 2)) for a, b in lines)
    return crossings, distance
