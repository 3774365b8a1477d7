"""The kernel that plans a step's attention: a single program reads the lengths and writes the list of work items.

A tile is BLOCK_M query rows of one sequence. Its work is the blocks of BLOCK_N keys that its rows see. An item is a
tile, or a split: one of several equal ranges of a tile's key blocks, whose partial results are merged afterwards.

1. Count each sequence's tiles of this kind (decode or prefill). `tile_starts` holds the tiles before each sequence.
2. Stage 0 adds up all work. An even share is the work divided by the programs that the device runs at once.
3. Stage 1 tries _SHARES bounds of a split's length around the even share, and takes the bound with which the last
program ends soonest. If there are tiles for whole waves of programs, tiles of the first waves stay whole unless they
are longer than an even share.
4. Stage 2 writes the items. The last tiles of the batch come first: they are a prompt's longest, and the short ones
then fill the end evenly.

limits.md has an example. `plan.py` chooses the bounds and launches this kernel; `tile_kernels.py` runs the items.
"""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import wait_for_inputs
from .keys import Window, visible_range

# Upper bounds of a split's length that the plan tries: no split, and 15 lengths from 1.4 down to 0.12 of an even share.
# limits.md compares numbers of bounds.
_SHARES = tl.constexpr(16)
# Lanes and warps of the planning program. A lane plans one tile in a pass. More lanes would spill registers, see
# limits.md.
PLAN_LANES, PLAN_WARPS = 512, 16
ITEM_SIZE = tl.constexpr(5)  # sequence, tile within it, first and last key block, slot of the partial result or -1
SPLIT_TILE_SIZE = tl.constexpr(4)  # sequence, tile within it, first slot, number of slots


# Scalars that change from step to step. Triton must not specialise on them, because compiling variants for 1 and for
# multiples of 16 would stall serving.
_BOUNDS = (
    *("num_seqs", "search_steps", "min_rows", "max_rows", "most_rows", "num_kv_heads", "num_programs", "max_slots"),
    *("min_split_blocks", "split_overhead", "max_splits", "window_left", "window_right"),
)


@triton.jit
def _tile_key_blocks(seq_len, q_len, tile, window, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First and one past the last block of BLOCK_N keys that any row of the tile sees; equal if no row sees a key."""
    first_position = seq_len - q_len + tile * BLOCK_M // GROUP
    last_position = seq_len - q_len + tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, q_len - 1)
    begin, _ = visible_range(first_position, seq_len, window)
    _, end = visible_range(last_position, seq_len, window)
    end_block = tl.maximum((end + BLOCK_N - 1) // BLOCK_N, 0)
    return tl.minimum(tl.maximum(begin, 0) // BLOCK_N, end_block), end_block


@triton.jit(do_not_specialize=_BOUNDS)
def _plan_kernel(
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    is_causal_ptr,  # [num_seqs], or None
    tile_starts_ptr,  # [num_seqs + 1], scratch: tiles before each sequence
    items_ptr,  # [max_items, ITEM_SIZE]
    split_tiles_ptr,  # [max_split_tiles, SPLIT_TILE_SIZE]
    counts_ptr,  # [2]: items, split tiles
    first_padding_ptr,  # [1]: the row after the last row with a tile of any kind
    num_seqs,
    search_steps,  # halvings that narrow num_seqs + 1 offsets to one
    min_rows,
    max_rows,  # sequences with rows (query tokens * GROUP) in [min_rows, max_rows] belong to this kind
    most_rows,  # a sequence with more rows, and all sequences after it, have no tiles
    num_kv_heads,
    num_programs,  # programs that the device runs at once
    max_slots,
    min_split_blocks,
    split_overhead,  # cost of a split besides its keys, in blocks
    max_splits,  # most splits of one tile
    window_left,
    window_right,
    GROUP: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,  # keys of a chunk of local attention, 0 without
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    DETERMINISTIC: tl.constexpr,  # a tile's number of splits depends on its own work alone
):
    """Plan one kind of tile in one program; see the module."""
    wait_for_inputs()
    lanes = tl.arange(0, LANES)
    num_tiles = 0
    num_covered = num_seqs
    for base in range(0, num_seqs, LANES):
        seq = base + lanes
        in_range = seq < num_seqs
        q_len = tl.load(cu_seqlens_q_ptr + seq + 1, mask=in_range, other=0) - tl.load(
            cu_seqlens_q_ptr + seq, mask=in_range, other=0
        )
        rows = q_len * GROUP
        num_covered = tl.minimum(num_covered, tl.min(tl.where(in_range & (rows > most_rows), seq, num_seqs), 0))
        rows = tl.where(seq < num_covered, rows, 0)
        tiles = tl.where((rows >= min_rows) & (rows <= max_rows), (rows + BLOCK_M - 1) // BLOCK_M, 0)
        tl.store(tile_starts_ptr + seq, num_tiles + tl.cumsum(tiles, 0) - tiles, mask=in_range)
        num_tiles += tl.sum(tiles, 0)
    tl.store(tile_starts_ptr + num_seqs, num_tiles)
    tl.store(first_padding_ptr, tl.load(cu_seqlens_q_ptr + num_covered))
    tl.debug_barrier()  # other threads read these offsets

    offs_share = tl.arange(0, _SHARES)
    shares = tl.full([_SHARES], 1, tl.int32)
    shared_items = tl.zeros([_SHARES], tl.int32)
    shared_slots = tl.zeros([_SHARES], tl.int32)
    longest = tl.zeros([_SHARES], tl.float32)
    share = min_split_blocks
    even = 0.0
    first_waves = num_tiles * num_kv_heads // num_programs * num_programs // num_kv_heads
    num_whole = 0
    longest_whole = 0
    num_items = 0
    num_slots = 0
    num_split_tiles = 0
    total_blocks = 0  # int32 is enough for 131,072 tokens of 8-row groups with 16M keys each
    FIRST_STAGE: tl.constexpr = 2 if DETERMINISTIC else 0
    for stage in tl.static_range(FIRST_STAGE, 3):
        for base in range(0, num_tiles, LANES):
            position = base + lanes
            index = num_tiles - 1 - position
            in_range = index >= 0
            seq = lanes * 0  # becomes the last sequence whose first tile is at or before `index`
            above = seq + num_seqs
            for _ in range(search_steps):
                middle = (seq + above) // 2
                start = tl.load(tile_starts_ptr + middle, mask=in_range, other=0)
                seq = tl.where(start <= index, middle, seq)
                above = tl.where(start <= index, above, middle)
            tile = index - tl.load(tile_starts_ptr + seq, mask=in_range, other=0)
            q_len = tl.load(cu_seqlens_q_ptr + seq + 1, mask=in_range, other=0) - tl.load(
                cu_seqlens_q_ptr + seq, mask=in_range, other=0
            )
            seq_len = tl.load(seq_lens_ptr + seq, mask=in_range, other=0)
            right = window_right
            if is_causal_ptr is not None:
                is_causal = tl.load(is_causal_ptr + seq, mask=in_range, other=0)
                right = tl.where(is_causal != 0, 0, window_right)
            window = Window(left=window_left, right=right, chunk_size=CHUNK_SIZE if CHUNK_SIZE > 0 else None)
            begin, end = _tile_key_blocks(seq_len, q_len, tile, window, GROUP, BLOCK_M, BLOCK_N)
            blocks = tl.where(in_range, end - begin, 0)
            is_whole = in_range & (position < first_waves) & (blocks <= even)
            if stage == 0:
                total_blocks += tl.sum(blocks, 0)
            elif stage == 1:
                num_whole += tl.sum(is_whole.to(tl.int32), 0)
                longest_whole = tl.maximum(longest_whole, tl.max(tl.where(is_whole, blocks, 0), 0))
                rest = tl.where(is_whole, 0, blocks)[:, None]
                tried = tl.maximum((rest + shares[None, :] - 1) // shares[None, :], 1)
                shared_items += tl.sum(tl.where((in_range & ~is_whole)[:, None], tried, 0), 0)
                shared_slots += tl.sum(tl.where(tried > 1, tried, 0), 0)
                longest = tl.maximum(longest, tl.max(rest.to(tl.float32) / tried.to(tl.float32), 0))
            else:
                splits = tl.minimum(tl.maximum((blocks + share - 1) // share, 1), max_splits)
                splits = tl.where(in_range, tl.where(is_whole, 1, splits), 0)
                is_split = splits > 1
                slots = tl.where(is_split, splits, 0)
                first_item = num_items + tl.cumsum(splits, 0) - splits
                first_slot = num_slots + tl.cumsum(slots, 0) - slots
                split_tile = num_split_tiles + tl.cumsum(is_split.to(tl.int32), 0) - is_split.to(tl.int32)
                split_ptrs = split_tiles_ptr + split_tile * SPLIT_TILE_SIZE
                tl.store(split_ptrs, seq, mask=is_split)
                tl.store(split_ptrs + 1, tile, mask=is_split)
                tl.store(split_ptrs + 2, first_slot, mask=is_split)
                tl.store(split_ptrs + 3, splits, mask=is_split)
                for split in range(tl.max(splits, 0)):
                    mask = split < splits
                    item_ptrs = items_ptr + (first_item + split) * ITEM_SIZE
                    divisor = tl.maximum(splits, 1)
                    tl.store(item_ptrs, seq, mask=mask)
                    tl.store(item_ptrs + 1, tile, mask=mask)
                    tl.store(item_ptrs + 2, begin + blocks * split // divisor, mask=mask)
                    tl.store(item_ptrs + 3, begin + blocks * (split + 1) // divisor, mask=mask)
                    tl.store(item_ptrs + 4, tl.where(is_split, first_slot + split, -1), mask=mask)
                num_items += tl.sum(splits, 0)
                num_slots += tl.sum(slots, 0)
                num_split_tiles += tl.sum(is_split.to(tl.int32), 0)
        if stage == 0:
            even = total_blocks * 1.0 * num_kv_heads / num_programs
            factor = 1.4 * tl.exp2((1 - offs_share) * (3.544 / (_SHARES - 2)))  # log2(1.4 / 0.12) = 3.544
            shares = tl.ceil(tl.minimum(even * factor, 2.0**30)).to(tl.int32)
            shares = tl.where(offs_share == 0, 2**30, tl.maximum(shares, min_split_blocks))
        elif stage == 1:
            whole_waves = (num_whole * num_kv_heads + num_programs - 1) // num_programs
            waves = (shared_items * num_kv_heads + num_programs - 1) // num_programs
            all_waves = ((num_whole + shared_items) * num_kv_heads + num_programs - 1) // num_programs
            # Two upper bounds of the end of the last split: split tiles run after unsplit tiles, or both run mixed.
            cost = whole_waves * (longest_whole + split_overhead) + waves * (longest + split_overhead)
            cost = tl.minimum(cost, all_waves * (tl.maximum(longest, longest_whole) + split_overhead))
            cost = tl.where(shared_slots <= max_slots, cost, float("inf"))
            share = tl.sum(tl.where(offs_share == tl.argmin(cost, 0), shares, 0), 0)
    tl.store(counts_ptr, num_items)
    tl.store(counts_ptr + 1, num_split_tiles)
