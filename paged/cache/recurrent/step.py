"""What one sequence's state does in a step."""

from __future__ import annotations

from typing import NamedTuple


class StateStep(NamedTuple):
    """A step of one sequence that has been reserved and not committed.

    Attributes:
        start, num_tokens: position of the step's first token, and number of tokens.
        read: slot with the state at `start`; -1 if the sequence begins.
        write: slot that holds the state after the step; `read` if its tokens are appended to the ring there.
        cursor: ring tokens in `read` before `start`.
        snapshot, snapshot_len: slot for the state after that many tokens of the sequence; -1 for none.
    """

    start: int
    num_tokens: int
    read: int
    write: int
    cursor: int
    snapshot: int
    snapshot_len: int

    @property
    def is_in_place(self) -> bool:
        """Whether it writes the slot that it reads."""
        return self.read == self.write

    @property
    def own_slots(self) -> tuple[int, int]:
        """Slots that the step holds beside its sequence's: the written one and the snapshot's, 0 for none."""
        return 0 if self.is_in_place else self.write, max(self.snapshot, 0)
