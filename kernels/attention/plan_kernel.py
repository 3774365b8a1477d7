"""The kernel that plans one kind of tile of a step's attention: one small program, from the lengths on the device."""

from __future__ import annotations

from paged.kernels.common.compat import tl, triton

# Shares that are tried: none, and 15 from 1.4 to 0.12 of a perfectly even one. Simulated for 132 SMs and 32 query heads
# on 8 KV heads (`bench.attention.schedule`), the worst of five mixed batches ends 8 % after perfect balance, with 8
# shares 13 %.
_SHARES = tl.constexpr(16)
# Lanes and warps of the planning program: one pass over 512 tiles. Of 256, 512 and 1,024 lanes compiled by Triton 3.6.0
# and 3.7.1 for sm_80, sm_90 and sm_100, the most that do not spill (95 to 101 registers).
PLAN_LANES, PLAN_WARPS = 512, 16
ITEM_SIZE = tl.constexpr(5)  # sequence, tile within it, first and last key block, slot of the partial result or -1
SPLIT_TILE_SIZE = tl.constexpr(4)  # sequence, tile within it, first slot, number of slots


# Scalars that change from step to step: compiling a variant for 1 and one for multiples of 16 would stall serving.
_BOUNDS = (
    *("num_seqs", "search_steps", "min_rows", "max_rows", "most_rows", "num_kv_heads", "places", "max_slots"),
    *("min_split_blocks", "piece_blocks", "max_pieces", "window_left", "window_right"),
)


@triton.jit
def _tile_key_blocks(
    seq_len,
    q_len,
    tile,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """First and one past the last block of BLOCK_N keys that any row of the tile sees; equal where none does."""
    first_position = seq_len - q_len + tile * BLOCK_M // GROUP
    last_position = seq_len - q_len + tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, q_len - 1)
    begin = tl.maximum(first_position - window_left, 0)
    end = tl.minimum(seq_len, last_position + window_right + 1)
    end_block = tl.maximum((end + BLOCK_N - 1) // BLOCK_N, 0)
    return tl.minimum(begin // BLOCK_N, end_block), end_block


@triton.jit(do_not_specialize=_BOUNDS)
def _plan_kernel(
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    is_causal_ptr,  # [num_seqs], or None
    tile_starts_ptr,  # [num_seqs + 1], scratch: tiles before each sequence
    items_ptr,  # [max_items, ITEM_SIZE]
    split_tiles_ptr,  # [max_split_tiles, SPLIT_TILE_SIZE]
    counts_ptr,  # [2]: items, split tiles
    first_padding_ptr,  # [1]: the row behind the last one with a tile of any kind
    num_seqs,
    search_steps,  # halvings that narrow num_seqs + 1 offsets to one
    min_rows,
    max_rows,  # sequences with rows (query tokens * GROUP) in [min_rows, max_rows] belong to this kind
    most_rows,  # of any kind; from the first sequence on that has more, none has tiles
    num_kv_heads,
    places,  # programs that the device runs at once
    max_slots,
    min_split_blocks,
    piece_blocks,
    max_pieces,  # of one tile
    window_left,
    window_right,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    DETERMINISTIC: tl.constexpr,  # a tile's pieces depend on its own work alone
):
    """One program plans one kind: count the tiles, add up their work, try shares, then write the pieces.

    The last tiles come first: of a prompt's they are the longest, and the short ones then even out the end. Where there
    are tiles for whole waves, those of the first waves stay whole unless longer than an even share. All others are cut
    into equal pieces of at most one share, the one by which the waves end soonest.
    """
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
    tl.debug_barrier()  # the offsets just written are read by other threads

    offs_share = tl.arange(0, _SHARES)
    shares = tl.full([_SHARES], 1, tl.int32)
    shared_items = tl.zeros([_SHARES], tl.int32)
    shared_slots = tl.zeros([_SHARES], tl.int32)
    longest = tl.zeros([_SHARES], tl.float32)
    share = min_split_blocks
    even = 0.0
    first_waves = num_tiles * num_kv_heads // places * places // num_kv_heads
    num_whole = 0
    longest_whole = 0
    num_items = 0
    num_slots = 0
    num_split_tiles = 0
    total_blocks = 0  # int32 holds 131,072 tokens of 8-row groups against 16M keys each
    FIRST_STAGE: tl.constexpr = 2 if DETERMINISTIC else 0
    for stage in tl.static_range(FIRST_STAGE, 3):
        for base in range(0, num_tiles, LANES):
            place = base + lanes
            index = num_tiles - 1 - place
            in_range = index >= 0
            seq = lanes * 0  # the last sequence whose first tile is not beyond this one
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
            begin, end = _tile_key_blocks(seq_len, q_len, tile, window_left, right, GROUP, BLOCK_M, BLOCK_N)
            blocks = tl.where(in_range, end - begin, 0)
            is_whole = in_range & (place < first_waves) & (blocks <= even)
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
                pieces = tl.minimum(tl.maximum((blocks + share - 1) // share, 1), max_pieces)
                pieces = tl.where(in_range, tl.where(is_whole, 1, pieces), 0)
                is_split = pieces > 1
                slots = tl.where(is_split, pieces, 0)
                first_item = num_items + tl.cumsum(pieces, 0) - pieces
                first_slot = num_slots + tl.cumsum(slots, 0) - slots
                split_tile = num_split_tiles + tl.cumsum(is_split.to(tl.int32), 0) - is_split.to(tl.int32)
                split_ptrs = split_tiles_ptr + split_tile * SPLIT_TILE_SIZE
                tl.store(split_ptrs, seq, mask=is_split)
                tl.store(split_ptrs + 1, tile, mask=is_split)
                tl.store(split_ptrs + 2, first_slot, mask=is_split)
                tl.store(split_ptrs + 3, pieces, mask=is_split)
                for piece in range(tl.max(pieces, 0)):
                    mask = piece < pieces
                    item_ptrs = items_ptr + (first_item + piece) * ITEM_SIZE
                    divisor = tl.maximum(pieces, 1)
                    tl.store(item_ptrs, seq, mask=mask)
                    tl.store(item_ptrs + 1, tile, mask=mask)
                    tl.store(item_ptrs + 2, begin + blocks * piece // divisor, mask=mask)
                    tl.store(item_ptrs + 3, begin + blocks * (piece + 1) // divisor, mask=mask)
                    tl.store(item_ptrs + 4, tl.where(is_split, first_slot + piece, -1), mask=mask)
                num_items += tl.sum(pieces, 0)
                num_slots += tl.sum(slots, 0)
                num_split_tiles += tl.sum(is_split.to(tl.int32), 0)
        if stage == 0:
            even = total_blocks * 1.0 * num_kv_heads / places
            factor = 1.4 * tl.exp2((1 - offs_share) * (3.544 / (_SHARES - 2)))  # log2(1.4 / 0.12) = 3.544
            shares = tl.ceil(tl.minimum(even * factor, 2.0**30)).to(tl.int32)
            shares = tl.where(offs_share == 0, 2**30, tl.maximum(shares, min_split_blocks))
        elif stage == 1:
            whole_waves = (num_whole * num_kv_heads + places - 1) // places
            waves = (shared_items * num_kv_heads + places - 1) // places
            all_waves = ((num_whole + shared_items) * num_kv_heads + places - 1) // places
            # Two upper bounds of when the last piece ends: the cut tiles after the whole ones, or all of them mixed.
            cost = whole_waves * (longest_whole + piece_blocks) + waves * (longest + piece_blocks)
            cost = tl.minimum(cost, all_waves * (tl.maximum(longest, longest_whole) + piece_blocks))
            cost = tl.where(shared_slots <= max_slots, cost, float("inf"))
            share = tl.sum(tl.where(offs_share == tl.argmin(cost, 0), shares, 0), 0)
    tl.store(counts_ptr, num_items)
    tl.store(counts_ptr + 1, num_split_tiles)
