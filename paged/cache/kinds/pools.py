"""Tables of layers with pooled keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged.cache.kinds.kind import Kind
from paged.errors import UnsupportedError

if TYPE_CHECKING:
    from paged.cache.slot_reservation import SequenceState


class PooledTable(Kind):
    """Block tables of layers with pooled keys, which have the life of their pool's last position."""

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Raise UnsupportedError: a caller that writes keys and values would leave pooled keys unwritten."""
        raise UnsupportedError(f"{call}: pooled keys are written by a forward; use reserve")
