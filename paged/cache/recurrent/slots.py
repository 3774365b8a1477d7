"""Slots of states: which are free, who holds them, and the positions whose state each one holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paged.cache.blocks.rollback import Rollback
from paged.errors import PagedError


class StateSlots:
    """Slots 1..num_slots with reference counts. Slot 0 is never handed out: padding rows point at it.

    A slot holds the state at every position from `starts[slot]`, its base, to `ends[slot]`, its newest ring token.
    free: slots without a holder.
    """

    def __init__(self, num_slots: int, rollback: Rollback) -> None:
        self.num_slots = num_slots
        self.starts = [0] * (num_slots + 1)
        self.ends = [-1] * (num_slots + 1)
        self.references: Counter[int] = Counter()
        self.free = list(range(num_slots, 0, -1))
        self._rollback = rollback

    @property
    def num_free(self) -> int:
        """Number of slots without a holder."""
        return len(self.free)

    def allocate(self) -> int:
        """Return a free slot with one reference; the caller has made sure that there is one."""
        slot = self.free.pop()
        self.references[slot] = 1
        return slot

    def share(self, slot: int) -> int:
        """Add a reference to a slot in use, and return the slot."""
        self.references[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Drop one reference; slot 0 is skipped."""
        if slot:
            self.references[slot] -= 1
            if not self.references[slot]:
                del self.references[slot]
                self.free.append(slot)

    def place(self, slot: int, start: int, end: int) -> None:
        """Record that a slot holds the state at the positions from `start` to `end`."""
        self._rollback.append((self._place, slot, self.starts[slot], self.ends[slot]))
        self._place(slot, start, end)

    def check(self, slot: int, position: int) -> int:
        """Return the ring tokens before `position` in a slot.

        Raises:
            PagedError: the slot does not hold the state at that position.
        """
        if not (self.references[slot] and self.starts[slot] <= position <= self.ends[slot]):
            raise PagedError(
                f"state slot {slot} holds positions {self.starts[slot]}..{self.ends[slot]}, expected {position}"
            )
        return position - self.starts[slot]

    def recount(self, held: Iterable[int]) -> None:
        """Set the reference counts to those held."""
        self.references = Counter(held)
        del self.references[0]
        self.free = [slot for slot in range(self.num_slots, 0, -1) if slot not in self.references]

    def check_counts(self, held: Iterable[int]) -> None:
        """Compare with the references that the holders count; raise PagedError if one is wrong."""
        counted = Counter(held)
        del counted[0]
        if counted != +self.references:
            raise PagedError(f"state slots: references {dict(+self.references)}, but {dict(counted)} are held")
        if sorted([*self.free, *counted]) != list(range(1, self.num_slots + 1)):
            raise PagedError(f"state slots: free {sorted(self.free)} beside {sorted(counted)} of {self.num_slots}")

    def _place(self, slot: int, start: int, end: int) -> None:
        self.starts[slot], self.ends[slot] = start, end
