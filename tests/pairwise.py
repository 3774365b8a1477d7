"""Few cases over many parameters: every two values of two parameters meet in one of them."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over rows in which all pairs of values of different axes occur; values need not be hashable.

    A fault that needs three values at once may be missed: the product has a place of its own where that matters.
    """
    names = list(axes)
    rows = [[axes[name][i] for name, i in zip(names, row, strict=True)] for row in rows_of_pairs(axes.values())]
    return pytest.mark.parametrize(names, rows)


def rows_of_pairs(axes: Sequence[Sequence[Any]] | Any) -> Iterator[tuple[int, ...]]:
    """Indices into each axis, a row at a time: the one of the product that has the most pairs not yet seen."""
    every_row = list(product(*(range(len(axis)) for axis in axes)))
    seen: set[tuple[tuple[int, int], ...]] = set()
    if len(every_row[0]) == 1:
        yield from every_row
        return
    while True:
        row = max(every_row, key=lambda row: len(_pairs(row) - seen))
        if _pairs(row) <= seen:
            return
        seen |= _pairs(row)
        yield row


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(row), 2))
