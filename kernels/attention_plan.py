"""How one step's attention is cut into equal pieces of work, on the device, without the host knowing the lengths.

A tile is BLOCK_M query rows of one sequence; its work is the keys it sees, counted in blocks of BLOCK_N. Short
sequences (decode, verify) and long ones (prefill) are two kinds with tiles of their own size and a schedule each.
Within a kind a tile with more than its share of the work, (all blocks) / (programs the device runs at once), is split
along its keys, whatever else is in the batch; merging the partial results is the only extra work. Sizes depend on
host-known upper bounds alone, so a captured step can be replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.attention_config import DECODE_MAX_ROWS, AttentionTile, decode_tile, prefill_tile
from paged.kernels.compat import tl, triton
from paged.kernels.device import device_of

# Programs a schedule aims at for each SM. More would even out the last wave, but every split adds a partial result to
# write, read and merge.
_PROGRAMS_PER_SM = {"decode": 4, "prefill": 2}
# A piece shorter than this costs more in its partial result (write, read, merge) than it saves: 256 keys of K and V in
# bf16 at head_dim 128 are 128 KB against 8 KB of partial result for 16 rows, and 4 times as many keys for 128 rows.
_MIN_SPLIT_KEYS = {"decode": 256, "prefill": 1024}
# Lanes and warps of the planning program: one pass over 1,024 tiles. Of six shapes compiled by Triton 3.6.0 and 3.7.1
# for sm_80, sm_90 and sm_100 the only one that never spills (105 to 123 registers).
PLAN_LANES, PLAN_WARPS = 1024, 8
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
    target_items,
    min_split_blocks,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program plans one kind: count the tiles, add up their work, then write tiles and pieces of tiles in order."""
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

    share = min_split_blocks
    num_items = 0
    num_slots = 0
    num_split_tiles = 0
    for writing in tl.static_range(2):
        total_blocks = 0  # int32 holds 131,072 tokens of 8-row groups against 16M keys each
        for base in range(0, num_tiles, LANES):
            index = base + lanes
            in_range = index < num_tiles
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
            if writing == 0:
                total_blocks += tl.sum(blocks, 0)
            else:
                pieces = tl.where(in_range, tl.maximum((blocks + share - 1) // share, 1), 0)
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
        if writing == 0:
            share = tl.maximum(share, (total_blocks + target_items - 1) // target_items)
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
        target_items = triton.cdiv(device_of(device).num_sms * _PROGRAMS_PER_SM[kind], shape.num_kv_heads)
        min_split_blocks = triton.cdiv(_MIN_SPLIT_KEYS[kind], tile.block_n)
        # A sequence's last tile may be partly filled, so there is at most one more tile a sequence than full ones.
        full_tiles = shape.num_tokens * shape.group // tile.block_m
        max_tiles = min(num_seqs * triton.cdiv(max_rows, tile.block_m), num_seqs + full_tiles)
        # Pieces beyond a tile's first take a whole share of the work each, and shares are at most target_items; a split
        # tile has at least one share, so its pieces are at most twice its shares.
        can_split = self.max_seqlen_k > min_split_blocks * tile.block_n
        max_items = max_tiles + (target_items if can_split else 0)
        max_slots = 2 * target_items if can_split else 0

        def int32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def float32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        schedule = AttentionSchedule(
            tile=tile,
            items=int32(max_items if max_tiles else 0, ITEM_SIZE.value),
            split_tiles=int32(target_items if can_split else 0, SPLIT_TILE_SIZE.value),
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
            target_items=target_items,
            min_split_blocks=min_split_blocks,
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
