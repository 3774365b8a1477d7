"""Published blocks of further tables, each beside the first table's block with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np

from paged.cache.blocks.rollback import Rollback
from paged.errors import PagedError

_Location = tuple[int, int]
"""The block of the first table, and the column of a further table."""


class OtherTables:
    """Published blocks of further tables. Blocks of tables without a window are withdrawn together; behind a window
    they may be missing.

    rows: the blocks beside each block of the first table, [blocks, further tables], 0 for a missing one.
    on_withdrawn: called with blocks that are withdrawn together with others.
    """

    def __init__(self, num_blocks: int, are_needed: Sequence[bool], published: set[int], rollback: Rollback) -> None:
        """are_needed: whether each further table has no window, so that its blocks must not be missing."""
        self.on_withdrawn: Callable[[list[int]], None] = lambda blocks: None
        self._are_needed = are_needed
        self._published = published
        self._rollback = rollback
        self.rows = np.zeros((num_blocks + 1, len(are_needed)), np.int32)
        self.locations: dict[int, _Location] = {}

    def add(self, other: int, block: int, column: int) -> None:
        """Publish `other`, an unpublished block, beside `block`."""
        self._rollback.keep_absence(self.locations, (other,))
        self.rows[block, column] = other
        self.locations[other] = block, column
        self._published.add(other)

    def withdraw(self, blocks: Sequence[int]) -> list[int]:
        """Withdraw published blocks of further tables among `blocks`, and those that need them; return the rest."""
        given = set(blocks)
        firsts = dict.fromkeys(block for block in blocks if block not in self.locations)
        for block in given & self.locations.keys():
            first, column = self.locations[block]
            if self._are_needed[column]:
                firsts[first] = None
        gone = given & self.locations.keys()
        if firsts:
            gone.update(block for block in self.rows[list(firsts)].ravel().tolist() if block)
        locations = {block: self.locations[block] for block in gone}
        self._rollback.append((self.locations.update, locations))
        for block, location in locations.items():
            del self.locations[block]
            self._published.remove(block)
            self.rows[location] = 0
        self.on_withdrawn([block for block in (*firsts, *gone) if block not in given])
        return list(firsts)

    def check(self, published: Set[int]) -> None:
        """Raise PagedError unless both directions agree and nothing is published beside an unpublished block."""
        for block, (first, column) in self.locations.items():
            if first not in published or self.rows[first, column] != block:
                raise PagedError(f"block {block} is published beside block {first}, but not the reverse")
        if np.count_nonzero(self.rows) != len(self.locations):
            raise PagedError(f"{np.count_nonzero(self.rows)} blocks beside others, {len(self.locations)} published")
        for first in published:
            if not all(block for block, needed in zip(self.rows[first], self._are_needed, strict=True) if needed):
                raise PagedError(f"block {first} is published without its blocks of further tables")

    def recount(self) -> None:
        """Derive the rest from `locations`, which a rollback has restored."""
        self.rows[:] = 0
        self._published.update(self.locations)
        for block, location in self.locations.items():
            self.rows[location] = block
