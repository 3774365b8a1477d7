"""The kinds of a cache, made from its configuration."""

from __future__ import annotations

from dataclasses import replace

from paged.cache.kinds.kind import CacheParts, Kind
from paged.cache.kinds.state import States
from paged.cache.kinds.window import WindowTable


def make_kinds(parts: CacheParts) -> tuple[Kind, ...]:
    """Return one kind for all tables of the same shape and window, then the kinds with memory of their own.

    Tables that see all tokens are left out, because all their answers are those of `Kind`.
    """
    tables = parts.config.tables
    kinds: list[Kind] = []
    start = 0
    for end in range(1, len(tables) + 1):
        group = tables[start]
        if end < len(tables) and replace(tables[end], layers=group.layers) == group:
            continue
        kind: type[Kind] | None = group.kind
        if kind is None and group.most_seen is not None:
            kind = WindowTable
        if kind is not None:
            kinds.append(kind(group, range(start, end), parts))
        start = end
    for column, group in enumerate(parts.config.own_groups, len(tables)):
        kinds.append(group.kind(group, range(column, column + 1), parts))
    if parts.config.recurrent is not None:
        column = len(tables) + len(parts.config.own_groups)
        kinds.append(States(None, range(column, column + 1), parts))
    return tuple(kinds)
