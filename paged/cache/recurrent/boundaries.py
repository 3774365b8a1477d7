"""Where sequences keep their state for the prefix cache, and where prompts are cut for it."""

from __future__ import annotations

# Chunks of the scan start at multiples of this position, whatever a step's tokens are.
SCAN_CHUNK = 64


def snapshot_positions(
    start: int, end: int, *, block_size: int, prompt_len: int, junction: int, interval: int | None
) -> list[int]:
    """Return the positions in (start, end] at which a sequence keeps its state, ascending; all are block boundaries.

    In a prompt: where earlier prompts part from it (`junction`, 0 for none), its last boundary that leaves a token to
    compute, and every `interval`. Behind these, the last boundary that is passed.
    """
    last = max(prompt_len - 1, 0) // block_size * block_size
    wanted = {junction, last}
    if interval is not None:
        wanted.update(range(interval, end + 1, interval))
    passed = end // block_size * block_size
    if passed > last:
        wanted.add(passed)
    return sorted(position for position in wanted if start < position <= end)


def chunk_end(start: int, limit: int, total: int, kept: list[int], *, max_append: int, may_leave_grid: bool) -> int:
    """Return where a prompt chunk from `start` ends, at most `limit`; `start` if it had better wait for the next step.

    Chunks end at multiples of SCAN_CHUNK, so that a prompt's numbers do not depend on the requests beside it. A last
    piece that is short enough to be appended is always a chunk of its own, for the same reason.

    Args:
        total: tokens of the prompt.
        kept: `snapshot_positions` of (start, limit]. One inside a chunk has to be a multiple of SCAN_CHUNK; a chunk
            ends at others, and at a second one.
        may_leave_grid: whether a chunk may end elsewhere if it does not reach a multiple.
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
    return limit if limit == total or may_leave_grid else start
