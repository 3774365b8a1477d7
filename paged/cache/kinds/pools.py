"""Tables of layers with pooled keys, and of the rows of open pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged.cache.kinds.kind import Kind
from paged.cache.kinds.window import WindowTable
from paged.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from paged.cache.slot_reservation import SequenceState


class PooledTable(Kind):
    """Block tables of layers with entries."""

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Raise UnsupportedError: a caller that writes keys and values would leave entries unwritten."""
        raise UnsupportedError(f"{call}: pooled keys are written by a forward; use reserve")


class OpenPoolTable(WindowTable):
    """Block tables with the rows of open pools. Between two pools, no row is needed."""

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Allow what `PooledTable` allows."""

    def check_truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError if rows of the pool that is open at `num_tokens` have been freed."""
        if self._has_gap(state, self.group.first_seen_block(num_tokens, self._block_size), num_tokens):
            raise InvalidInputError(f"num_tokens: {num_tokens}, but rows of its open pool have been freed")
