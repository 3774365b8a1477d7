"""What the state machine believes of the cache: plain lists, and no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paged.cache.slot_reservation import KvSlotReservation


@dataclass
class Model:
    """One sequence. `cells` are the numbers that fill the K of positions 0.. (V has the negatives), as far as written;
    below `length`, and below `written`, they can be read.

    `ids`: token ids of the positions from 0 whose cell is the number of (namespace, ids up to and including it).
    `known`: how many of them the manager has been told. `first`: blocks behind the sliding window.
    """

    namespace: str | None
    length: int = 0
    written: int = 0
    cells: list[int | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    known: int = 0
    first: int = 0
    is_swapped: bool = False

    @property
    def readable(self) -> int:
        return max(self.length, self.written)

    def put(self, position: int, numbers: Sequence[int], ids: Sequence[int] = ()) -> None:
        """`numbers` stand at `position`..; with `ids`, they are those of these ids after the ones before."""
        if numbers:
            end = position + len(numbers)
            self.cells += [None] * (end - len(self.cells))
            self.cells[position:end] = numbers
            self.ids[position:] = ids

    def cut(self, length: int) -> None:
        self.length = self.written = length
        self.known = min(self.known, length)
        del self.cells[length:], self.ids[length:]

    def copy(self, length: int) -> Model:
        copied = replace(self, cells=self.cells.copy(), ids=self.ids.copy())
        copied.cut(length)
        return copied


@dataclass
class Open:
    """A reservation that has not ended: the length each sequence would commit to, and what a rollback goes back to."""

    reservation: KvSlotReservation
    targets: dict[int, int]
    before: dict[int, tuple[tuple[int, ...], Model]]
    replaced: dict[int, set[int]]
