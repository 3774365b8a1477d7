"""How one step's attention is cut into equal pieces of work, on the device, without the host knowing the lengths.

A tile is BLOCK_M query rows of one sequence; its work is the keys it sees, counted in blocks of BLOCK_N. Short
sequences (decode, verify) and long ones (prefill) are two kinds with tiles of their own size and a schedule each.
Within a kind tiles are split along their keys so that all pieces fill whole waves of the programs the device runs at
once, whatever else is in the batch; merging the partial results is the only extra work. Sizes depend on host-known
upper bounds alone, so a captured step can be replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.attention_config import DECODE_MAX_ROWS, AttentionTile, decode_tile, prefill_tile
from paged.kernels.compat import tl, triton
from paged.kernels.device import device_of

# Shares that are tried: none, and 15 from 1.4 to 0.12 of a perfectly even one. Simulated for 132 SMs and 32 query heads
# on 8 KV heads (`bench.schedule`), the worst of five mixed batches ends 8 % after perfect balance, with 8 shares 13 %.
_SHARES = tl.constexpr(16)
# What a piece costs besides its blocks, in blocks: 2 us to start and, where it is partial, its write, against 3 us a
# block of 64 keys for each of three decode programs on an SM, and 0.7 us for the one prefill program.
_PIECE_BLOCKS = {"decode": 1, "prefill": 4}
# Partial results there is room for, for every program that the device runs at once. 1 x 128k + 31 x 4k needs 5 (16 MB
# on an H200 at head_dim 128); a partial result of a prefill tile is 8 times as large, and more than 2 gain nothing.
_SLOTS_PER_PLACE = {"decode": 5, "prefill": 2}
# A piece shorter than this costs more in its partial result (write, read, merge) than it saves: 256 keys of K and V in
# bf16 at head_dim 128 are 128 KB against 8 KB of partial result for 16 rows, and 4 times as many keys for 128 rows.
_MIN_SPLIT_KEYS = {"decode": 256, "prefill": 1024}
# Lanes and warps of the planning program: one pass over 512 tiles. Of 256, 512 and 1,024 lanes compiled by Triton 3.6.0
# and 3.7.1 for sm_80, sm_90 and sm_100, the most that do not spill (95 to 101 registers).
PLAN_LANES, PLAN_WARPS = 512, 16
ITEM_SIZE = tl.constexpr(5)  # sequence, tile within it, first and last key block, slot of the partial result or -1
SPLIT_TILE_SIZE = tl.constexpr(4)  # sequence, tile within it, first slot, number of slots


@triton.jit
def _tile_key_blocks(
    seq_len,
    q_len,
    tile,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
):
    """First and one past the last block of BLOCK_N keys that any row of the tile sees; equal where none does."""
    first_position = seq_len - q_len + tile * BLOCK_M // GROUP
    last_position = seq_len - q_len + tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, q_len - 1)
    end = seq_len
    if CAUSAL:
        end = tl.minimum(end, last_position + 1)
    if WINDOW_RIGHT >= 0:
        end = tl.minimum(end, last_position + WINDOW_RIGHT + 1)
    begin = seq_len * 0
    if WINDOW_LEFT >= 0:
        begin = tl.maximum(first_position - WINDOW_LEFT, 0)
    end_block = tl.maximum((end + BLOCK_N - 1) // BLOCK_N, 0)
    return tl.minimum(begin // BLOCK_N, end_block), end_block


@triton.jit
def _plan_kernel(
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    tile_starts_ptr,  # [num_seqs + 1], scratch: tiles before each sequence
    items_ptr,  # [max_items, ITEM_SIZE]
    split_tiles_ptr,  # [max_split_tiles, SPLIT_TILE_SIZE]
    counts_ptr,  # [2]: items, split tiles
    num_seqs,
    search_steps,  # halvings that narrow num_seqs + 1 offsets to one
    min_rows,
    max_rows,  # sequences with rows (query tokens * GROUP) in [min_rows, max_rows] belong to this kind
    num_kv_heads,
    places,  # programs that the device runs at once
    max_slots,
    min_split_blocks,
    piece_blocks,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program plans one kind: count the tiles, add up their work, try shares, then write the pieces.

    The last tiles come first: of a prompt's they are the longest, and the short ones then even out the end. Where there
    are tiles for whole waves, those of the first waves stay whole unless longer than an even share. All others are cut
    into equal pieces of at most one share, the one by which the waves end soonest.
    """
    lanes = tl.arange(0, LANES)
    num_tiles = 0
    for base in range(0, num_seqs, LANES):
        seq = base + lanes
        in_range = seq < num_seqs
        q_len = tl.load(cu_seqlens_q_ptr + seq + 1, mask=in_range, other=0) - tl.load(
            cu_seqlens_q_ptr + seq, mask=in_range, other=0
        )
        rows = q_len * GROUP
        tiles = tl.where((rows >= min_rows) & (rows <= max_rows), (rows + BLOCK_M - 1) // BLOCK_M, 0)
        tl.store(tile_starts_ptr + seq, num_tiles + tl.cumsum(tiles, 0) - tiles, mask=in_range)
        num_tiles += tl.sum(tiles, 0)
    tl.store(tile_starts_ptr + num_seqs, num_tiles)
    tl.debug_barrier()  # the offsets just written are read by other threads

    offs_share = tl.arange(0, _SHARES)
    shares = tl.full([_SHARES], 1, tl.int32)
    shared_items = tl.zeros([_SHARES], tl.int32)
    shared_slots = tl.zeros([_SHARES], tl.int32)
    longest = tl.zeros([_SHARES], tl.float32)
    share = 1
    even = 0.0
    first_waves = num_tiles * num_kv_heads // places * places // num_kv_heads
    num_whole = 0
    longest_whole = 0
    num_items = 0
    num_slots = 0
    num_split_tiles = 0
    total_blocks = 0  # int32 holds 131,072 tokens of 8-row groups against 16M keys each
    for stage in tl.static_range(3):
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
            begin, end = _tile_key_blocks(
                seq_len, q_len, tile, GROUP, BLOCK_M, BLOCK_N, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT
            )
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
                pieces = tl.where(is_whole, 1, tl.maximum((blocks + share - 1) // share, 1))
                pieces = tl.where(in_range, pieces, 0)
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


@dataclass(frozen=True)
class AttentionSchedule:
    """One kind's work list on the device, and the upper bounds its launches use.

    items int32 [max_items, 5]: sequence, tile within it, first and one past the last block of BLOCK_N keys, slot of the
    partial result, -1 where the tile is not split. split_tiles int32 [max_split_tiles, 4]: sequence, tile, first slot,
    number of slots. counts int32 [2]: how many of each are filled. partial_out float32 [max_slots, num_kv_heads,
    BLOCK_M, head_dim] and partial_lse float32 [max_slots, num_kv_heads, BLOCK_M] (base 2) are workspace that layers
    share.
    """

    tile: AttentionTile
    items: torch.Tensor
    split_tiles: torch.Tensor
    counts: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor


@dataclass(frozen=True)
class AttentionShape:
    """What a schedule depends on besides the lengths. element_size is that of the queries and the cache, in bytes."""

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    element_size: int
    causal: bool
    window_size: tuple[int, int]


class AttentionPlan:
    """One step's schedules, made on first use and shared by all layers with the same heads and window."""

    def __init__(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, *, max_seqlen_q: int, max_seqlen_k: int
    ) -> None:
        """cu_seqlens_q int32 [num_seqs + 1], seq_lens int32 [num_seqs]; the two maxima are host-known upper bounds."""
        self.cu_seqlens_q = cu_seqlens_q
        self.seq_lens = seq_lens
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_k = max_seqlen_k
        self._schedules: dict[AttentionShape, list[AttentionSchedule]] = {}

    def schedules(self, shape: AttentionShape) -> list[AttentionSchedule]:
        """The schedules that cover the batch: of short sequences, and of long ones where there may be any."""
        if shape not in self._schedules:
            arch = device_of(self.seq_lens.device).arch
            tiles = {"decode": decode_tile(shape.head_dim, shape.element_size, arch)}
            if self.max_seqlen_q * shape.group > DECODE_MAX_ROWS:
                tiles["prefill"] = prefill_tile(shape.head_dim, shape.element_size, arch)
            self._schedules[shape] = [self._schedule(kind, tile, shape) for kind, tile in tiles.items()]
        return self._schedules[shape]

    def _schedule(self, kind: str, tile: AttentionTile, shape: AttentionShape) -> AttentionSchedule:
        device, num_seqs = self.seq_lens.device, self.seq_lens.shape[0]
        longest = self.max_seqlen_q * shape.group
        min_rows, max_rows = (1, min(longest, DECODE_MAX_ROWS)) if kind == "decode" else (DECODE_MAX_ROWS + 1, longest)
        places = device_of(device).num_sms * tile.programs_per_sm
        min_split_blocks = triton.cdiv(_MIN_SPLIT_KEYS[kind], tile.block_n)
        # A sequence's last tile may be partly filled, so there is at most one more tile a sequence than full ones.
        full_tiles = shape.num_tokens * shape.group // tile.block_m
        max_tiles = min(num_seqs * triton.cdiv(max_rows, tile.block_m), num_seqs + full_tiles)
        can_split = self.max_seqlen_k > min_split_blocks * tile.block_n
        max_pieces = triton.cdiv(self.max_seqlen_k, min_split_blocks * tile.block_n)
        max_slots = min(triton.cdiv(places * _SLOTS_PER_PLACE[kind], shape.num_kv_heads), max_tiles * max_pieces)
        max_slots = max_slots if can_split else 0

        def int32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def float32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        schedule = AttentionSchedule(
            tile=tile,
            items=int32(max_tiles + max_slots if max_tiles else 0, ITEM_SIZE.value),
            split_tiles=int32(max_slots // 2, SPLIT_TILE_SIZE.value),
            counts=int32(2),
            partial_out=float32(max_slots, shape.num_kv_heads, tile.block_m, shape.head_dim),
            partial_lse=float32(max_slots, shape.num_kv_heads, tile.block_m),
        )
        _plan_kernel[(1,)](
            cu_seqlens_q_ptr=self.cu_seqlens_q,
            seq_lens_ptr=self.seq_lens,
            tile_starts_ptr=int32(num_seqs + 1),
            items_ptr=schedule.items,
            split_tiles_ptr=schedule.split_tiles,
            counts_ptr=schedule.counts,
            num_seqs=num_seqs,
            search_steps=num_seqs.bit_length(),
            min_rows=min_rows,
            max_rows=max_rows,
            num_kv_heads=shape.num_kv_heads,
            places=places,
            max_slots=max_slots,
            min_split_blocks=min_split_blocks,
            piece_blocks=_PIECE_BLOCKS[kind],
            GROUP=shape.group,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            CAUSAL=shape.causal,
            WINDOW_LEFT=shape.window_size[0],
            WINDOW_RIGHT=shape.window_size[1],
            LANES=PLAN_LANES,
            num_warps=PLAN_WARPS,
        )
        return schedule
