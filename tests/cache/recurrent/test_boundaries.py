"""Where states are kept and prompts are cut."""

import random

import pytest

from paged.cache.kinds.state_positions import SCAN_CHUNK, chunk_end, snapshot_positions


@pytest.mark.parametrize("seed", range(3))
def test_positions_and_chunks_of_random_prompts(seed: int) -> None:
    """States are kept at block ends, with a token left to compute; chunks advance, and keep what lies inside them."""
    rng = random.Random(seed)
    for _ in range(300):
        block_size, append = rng.choice([4, 16, 48, 64]), rng.randint(1, 16)
        total = rng.randint(1, 500)
        junction = rng.randrange(total) // block_size * block_size
        interval = rng.choice([None, block_size, 3 * block_size])
        known = {"block_size": block_size, "prompt_len": total, "junction": junction, "interval": interval}
        wanted = snapshot_positions(0, total, **known)
        assert wanted == sorted(set(wanted))
        assert all(position % block_size == 0 < position <= total for position in wanted)
        last = (total - 1) // block_size * block_size
        assert {junction, last} - {0} <= {*wanted}
        assert interval is None or {*range(interval, total + 1, interval)} <= {*wanted}
        # In parts they are the same, but for boundaries behind the prompt's last.
        cut = rng.randint(0, total)
        parts = snapshot_positions(0, cut, **known) + snapshot_positions(cut, total, **known)
        assert {*parts} == {*wanted}

        start, reached, may_leave_grid = 0, [], rng.random() < 0.5
        while start < total:
            limit = min(total, start + rng.choice([1, 30, 64, 200, 500]))
            kept = snapshot_positions(start, limit, **known)
            end = chunk_end(start, limit, total, kept, max_append=append, may_leave_grid=may_leave_grid)
            if end == start:  # it waits for a step with more tokens
                assert not may_leave_grid
                assert limit < start // SCAN_CHUNK * SCAN_CHUNK + SCAN_CHUNK
                end = limit = min(total, start + 500)
                kept = snapshot_positions(start, limit, **known)
                end = chunk_end(start, limit, total, kept, max_append=append, may_leave_grid=may_leave_grid)
            assert start < end <= limit
            inside = [position for position in kept if position < end]
            assert len(inside) <= 1
            assert all(position % SCAN_CHUNK == 0 for position in inside)
            reached += [position for position in kept if position <= end]
            start = end
        assert {*wanted} <= {*reached}
