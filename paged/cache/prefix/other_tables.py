"""Published blocks of further tables, each beside the first table's block with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from paged.cache.blocks.rollback import Rollback
from paged.errors import PagedError

_Location = tuple[int, int]
"""The block of the first table, and the column of a further table."""


class OtherTables:
    """Published blocks of further tables. Blocks of tables without a window are withdrawn together; behind a window
    they may be missing.

    on_withdrawn: called with each block that is withdrawn together with another.
    """

    def __init__(self, num_blocks: int, are_needed: Sequence[bool], published: set[int], rollback: Rollback) -> None:
        """are_needed: whether each further table has no window, so that its blocks must not be missing."""
        self.on_withdrawn: Callable[[int], None] = lambda block: None
        self._are_needed = are_needed
        self._published = published
        self._rollback = rollback
        self._rows = np.zeros((num_blocks + 1, len(are_needed)), np.int32)
        self.locations: dict[int, _Location] = {}

    def of(self, blocks: Sequence[int]) -> NDArray[np.int32]:
        """Return [len(blocks), further tables], 0 for a missing block."""
        return self._rows[np.array(blocks, np.int64)]

    def first_of(self, block: int) -> int:
        """Return the first table's block beside which `block` is published, or `block` itself."""
        return self.locations[block][0] if block in self.locations else block

    def missing(self, block: int, others: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield those of `others`, one of each further table or 0, that `block` lacks, with their columns."""
        for column, other in enumerate(others):
            if other and not self._rows[block, column]:
                yield other, column

    def add(self, other: int, block: int, column: int) -> None:
        """Publish `other`, an unpublished block, beside `block`."""
        self._rollback.keep_absence(self.locations, (other,))
        self._rows[block, column] = other
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
            gone.update(block for block in self.of(list(firsts)).ravel().tolist() if block)
        locations = {block: self.locations[block] for block in gone}
        self._rollback.append((self.locations.update, locations))
        for block, location in locations.items():
            del self.locations[block]
            self._published.remove(block)
            self._rows[location] = 0
        for block in (*firsts, *gone):
            if block not in given:
                self.on_withdrawn(block)
        return list(firsts)

    def check(self, published: Set[int]) -> None:
        """Check that both directions agree, and nothing is published beside an unpublished block.

        Raises:
            PagedError: names the first error.
        """
        for block, (first, column) in self.locations.items():
            if first not in published or self._rows[first, column] != block:
                raise PagedError(f"block {block} is published beside block {first}, but not the reverse")
        if np.count_nonzero(self._rows) != len(self.locations):
            raise PagedError(f"{np.count_nonzero(self._rows)} blocks beside others, {len(self.locations)} published")
        for first in published:
            if not all(block for block, needed in zip(self._rows[first], self._are_needed, strict=True) if needed):
                raise PagedError(f"block {first} is published without its blocks of further tables")

    def recount(self) -> None:
        """Derive the rest from `locations`, which a rollback has restored."""
        self._rows[:] = 0
        self._published.update(self.locations)
        for block, location in self.locations.items():
            self._rows[location] = block
