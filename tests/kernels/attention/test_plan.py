"""The work list: every key block of every tile exactly once, within the bounds of the launches, in equal items."""

import math
import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from paged import paged_attention
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention.call import AttentionShape
from paged.kernels.attention.keys import NO_LIMIT
from paged.kernels.attention.plan import DECODE_MAX_ROWS, AttentionPlan, AttentionSchedule
from paged.kernels.attention.tiles import decode_tile, query_lengths
from tests.kernels.refusals import assert_refuses

thorough = pytest.mark.thorough
Batch = list[tuple[int, int]]


def _random_batch(seed: int) -> Batch:
    rng = random.Random(seed)
    return [(q := rng.choice([0, 1, 1, 5, 40, 200]), q + rng.randrange(6000)) for _ in range(rng.randrange(1, 30))]


BATCHES: dict[str, Batch] = {
    "decodes of equal length": [(1, 4096)] * 4,
    "one long, many short": [(1, 60000)] + [(1, 300)] * 20,
    "a chunk beside long decodes": [(500, 2500), *[(1, 8000)] * 6],
    "prompts": [(700, 700), (33, 33), (129, 463)],
    "verify rows": [(5, 900)] * 9,
    "empty and impossible ones": [(0, 7), (3, 0), (9, 4), (1, 1)],
    "more sequences than lanes": [(1, 40)] * 1100,
    **{f"random {seed}": _random_batch(seed) for seed in range(2)},
}


def _plan(
    batch: Batch, device: torch.device, group: int = 4, window: int = -1, chunk_size: int = 0
) -> list[AttentionSchedule]:
    offsets = torch.tensor([0, *(q for q, _ in batch)], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([seq_len for _, seq_len in batch], dtype=torch.int32, device=device)
    longest = {"max_seqlen_q": max(q for q, _ in batch), "max_seqlen_k": max(seq_len for _, seq_len in batch)}
    sizes = {"num_kv_heads": 2, "group": group, "head_dim": 64, "v_head_dim": 64, "element_size": 2}
    limits = {"window": (NO_LIMIT if window < 0 else window, 0), "chunk_size": chunk_size}
    shape = AttentionShape(num_tokens=int(offsets[-1]), **sizes, **limits)
    return AttentionPlan(offsets, lengths, **longest).schedules(shape)


def _tiles(
    schedule: AttentionSchedule, batch: Batch, is_decode: bool, group: int, window: int, chunk_size: int
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Each tile's key blocks by definition: those of BLOCK_N keys that hold a key some row of the tile sees."""
    block_m, block_n = schedule.tile.block_m, schedule.tile.block_n
    for seq, (q_len, seq_len) in enumerate(batch):
        rows = q_len * group
        if rows == 0 or (rows <= DECODE_MAX_ROWS) != is_decode:
            continue
        for tile in range(math.ceil(rows / block_m)):
            seen = set()
            for token in (tile * block_m // group, min(((tile + 1) * block_m - 1) // group, q_len - 1)):
                position = seq_len - q_len + token
                low = 0 if window < 0 else max(0, position - window)
                low = max(low, position // chunk_size * chunk_size) if chunk_size else low
                seen |= {key // block_n for key in (low, position) if 0 <= key < seq_len and low <= position}
            yield (seq, tile), list(range(min(seen), max(seen) + 1)) if seen else []


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    "sizes", [(4, -1, 0), (1, 300, 0), pytest.param((7, -1, 0), marks=thorough), (4, 900, 500)], ids=str
)
def test_covers_every_key_block_once(name: str, sizes: tuple[int, int, int], device: torch.device) -> None:
    """Of groups, windows and chunks."""
    batch = BATCHES[name]
    schedules = _plan(batch, device, *sizes)
    assert len(schedules) == 1 + any(q_len * sizes[0] > DECODE_MAX_ROWS for q_len, _ in batch)
    for schedule, is_decode in zip(schedules, (True, False), strict=False):
        num_items, num_split_tiles = schedule.counts.tolist()
        assert num_items <= schedule.items.shape[0]
        assert num_split_tiles <= schedule.split_tiles.shape[0]
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for seq, tile, begin, end, slot in schedule.items[:num_items].tolist():
            found.setdefault((seq, tile), []).append((begin, end, slot))
        expected = dict(_tiles(schedule, batch, is_decode, *sizes))
        assert {key: [b for begin, end, _ in found[key] for b in range(begin, end)] for key in found} == expected
        assert all((slot >= 0) == (len(splits) > 1) for splits in found.values() for _, _, slot in splits)
        slots = sorted(slot for splits in found.values() for _, _, slot in splits if slot >= 0)
        assert slots == list(range(len(slots)))
        assert len(slots) <= schedule.partial_out.shape[0]
        listed = {
            (seq, tile): list(range(first, first + count))
            for seq, tile, first, count in schedule.split_tiles[:num_split_tiles].tolist()
        }
        assert listed == {key: [slot for *_, slot in splits] for key, splits in found.items() if len(splits) > 1}


def test_long_decodes_split_beside_a_prefill_chunk(device: torch.device) -> None:
    schedule = _plan(BATCHES["a chunk beside long decodes"], device)[0]
    splits = [end - begin for _, _, begin, end, _ in schedule.items[: int(schedule.counts[0])].tolist()]
    assert len(splits) > 6
    assert max(splits) <= 2 * min(splits)


@pytest.mark.usefixtures("backend")
def test_a_plan_of_another_batch_is_refused(device: torch.device) -> None:
    tensors = vars(make(Problem("", ((1, 40), (3, 3), (0, 5), (9, 30))), device))
    ids = tensors["cu_seqlens_q"], tensors["seq_lens"]
    shorter = AttentionPlan(*ids, max_seqlen_q=8, max_seqlen_k=40)
    other = AttentionPlan(ids[0][:2], ids[1][:1], max_seqlen_q=9, max_seqlen_k=40)
    assert_refuses(
        partial(paged_attention, **tensors, max_seqlen_q=9),
        {"plan": AttentionPlan(*ids, max_seqlen_q=9, max_seqlen_k=40)},
        ("plan", shorter, "plan: made for max_seqlen_q 8, expected at least 9"),
        ("plan", other, "plan: made for other cu_seqlens_q"),
    )


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 24, 48, 71])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_query_lengths_lead_to_every_tile(arch: str, group: int) -> None:
    def tile_of(query: int) -> tuple[object, bool]:
        rows = query * group
        return decode_tile(128, 128, 2, arch, rows=rows), rows > DECODE_MAX_ROWS

    lengths = query_lengths(group)
    assert {tile_of(query) for query in range(1, 200)} == {tile_of(query) for query in lengths}
    assert len(lengths) <= 4
