"""Positions of states: where a prompt's chunks end, where states are kept, and what a slot holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged.errors import PagedError

if TYPE_CHECKING:
    from paged.cache.guard import Rollback

# Scan chunks start at multiples of this length, so that results do not depend on how a prompt is split into steps.
SCAN_CHUNK = 64


def snapshot_positions(
    start: int, end: int, *, block_size: int, prompt_len: int, junction: int, interval: int | None
) -> list[int]:
    """Return the block boundaries in (start, end] at which a sequence keeps its state, ascending.

    Within the prompt, these are multiples of `interval`, the position `junction` where earlier prompts diverge (0 for
    none), and the last boundary before the prompt's last token. Behind the prompt, it is the last boundary up to `end`.
    """
    last = max(prompt_len - 1, 0) // block_size * block_size
    positions = {junction, last}
    if interval is not None:
        positions.update(range(interval, end + 1, interval))
    passed = end // block_size * block_size
    if passed > last:
        positions.add(passed)
    return sorted(position for position in positions if start < position <= end)


def chunk_end(start: int, limit: int, total: int, kept: list[int], *, max_append: int, may_leave_grid: bool) -> int:
    """Return where a prompt chunk from `start` ends, at most `limit`; `start` if it should wait for the next step.

    Chunks end at multiples of SCAN_CHUNK, so that a prompt's results do not depend on other requests. For the same
    reason, a last piece that is short enough to be appended is always a chunk of its own.

    Args:
        total: number of tokens of the prompt.
        kept: `snapshot_positions` in (start, limit]. A chunk may contain one of them, if it is a multiple of
            SCAN_CHUNK. At any other one, the chunk ends.
        may_leave_grid: whether a chunk too short for a multiple of SCAN_CHUNK may end elsewhere.
    """
    inside = [position for position in kept if position < limit]
    for index, position in enumerate(inside):
        if index or position % SCAN_CHUNK:
            return position
    aligned = limit // SCAN_CHUNK * SCAN_CHUNK
    is_cut = limit < total or 0 < total - aligned <= max_append
    if not is_cut or aligned == limit:
        return limit
    if aligned > start:
        return aligned
    if limit == total or may_leave_grid:
        return limit
    return start


class SlotPositions:
    """Positions whose states each slot of a pool holds, from `starts[slot]` (the base) to `ends[slot]` (the newest ring
    token)."""

    def __init__(self, num_slots: int, rollback: Rollback) -> None:
        self.starts = [0] * (num_slots + 1)
        self.ends = [-1] * (num_slots + 1)
        self._rollback = rollback

    def place(self, slot: int, start: int, end: int) -> None:
        """Note that a slot holds the state at the positions from `start` to `end`."""
        self._rollback.append((self._place, slot, self.starts[slot], self.ends[slot]))
        self._place(slot, start, end)

    def cursor(self, slot: int, position: int) -> int:
        """Return the number of ring tokens before `position` in a slot.

        Raises:
            PagedError: the slot does not hold the state at that position.
        """
        if not self.starts[slot] <= position <= self.ends[slot]:
            raise PagedError(
                f"state slot {slot} holds positions {self.starts[slot]}..{self.ends[slot]}, expected {position}"
            )
        return position - self.starts[slot]

    def _place(self, slot: int, start: int, end: int) -> None:
        self.starts[slot], self.ends[slot] = start, end
