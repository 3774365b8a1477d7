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
from paged.kernels.attention_mask import pack_mask
from paged.kernels.compat import tl, triton
from paged.kernels.device import device_of

# Programs a schedule aims at for each SM. More would even out the last wave, but every split adds a partial result to
# write, read and merge.
_PROGRAMS_PER_SM = {"decode": 4, "prefill": 2}
# A piece shorter than this costs more in its partial result (write, read, merge) than it saves: 256 keys of K and V in
# bf16 at head_dim 128 are 128 KB against 8 KB of partial result for 16 rows, and 4 times as many keys for 128 rows.
_MIN_SPLIT_KEYS = {"decode": 256, "prefill": 1024}
# Pieces of a tile at the most where they depend on its own length alone: prefill tiles are many already, and their
# partial results would take gigabytes; 256 decodes of 8 heads of 128 take 134 MB.
_DETERMINISTIC_PIECES = 8
# Lanes and warps of the planning program: one pass over 1,024 tiles. Of six shapes compiled by Triton 3.6.0 and 3.7.1
# for sm_80, sm_90 and sm_100 the only one that never spills (105 to 123 registers).
PLAN_LANES, PLAN_WARPS = 1024, 8
ITEM_SIZE = tl.constexpr(5)  # sequence, tile within it, first and last key block, slot of the partial result or -1
SPLIT_TILE_SIZE = tl.constexpr(4)  # sequence, tile within it, first slot, number of slots


# Scalars that change from step to step: compiling a variant for 1 and one for multiples of 16 would stall serving.
_BOUNDS = (
    *("num_seqs", "search_steps", "min_rows", "max_rows", "target_items", "min_split_blocks", "max_pieces"),
    *("window_left", "window_right"),
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
    num_seqs,
    search_steps,  # halvings that narrow num_seqs + 1 offsets to one
    min_rows,
    max_rows,  # sequences with rows (query tokens * GROUP) in [min_rows, max_rows] belong to this kind
    target_items,
    min_split_blocks,
    max_pieces,  # of one tile
    window_left,
    window_right,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    DETERMINISTIC: tl.constexpr,  # a tile's pieces depend on its own work alone
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
            right = window_right
            if is_causal_ptr is not None:
                is_causal = tl.load(is_causal_ptr + seq, mask=in_range, other=0)
                right = tl.where(is_causal != 0, 0, window_right)
            begin, end = _tile_key_blocks(seq_len, q_len, tile, window_left, right, GROUP, BLOCK_M, BLOCK_N)
            blocks = tl.where(in_range, end - begin, 0)
            if writing == 0:
                total_blocks += tl.sum(blocks, 0)
            else:
                pieces = tl.where(in_range, tl.minimum(tl.maximum((blocks + share - 1) // share, 1), max_pieces), 0)
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
        if writing == 0 and not DETERMINISTIC:
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
    """What a schedule depends on besides the lengths.

    element_size: of the queries, in bytes. window: positions seen left and right, see `AttentionCall`. box,
    more_scores: see `attention_config`. deterministic: a sequence is cut up by its own length alone, so that its
    results have the same bits whatever else is in the batch.
    """

    num_tokens: int
    num_kv_heads: int
    group: int
    head_dim: int
    element_size: int
    window: tuple[int, int]
    box: int = 0
    more_scores: bool = False
    deterministic: bool = False


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
        # Flags and masks are kept with what was made of them, so that no other tensor can take their identity.
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._schedules: dict[tuple[AttentionShape, int], tuple[list[AttentionSchedule], torch.Tensor | None]] = {}

    def schedules(self, shape: AttentionShape, is_causal: torch.Tensor | None = None) -> list[AttentionSchedule]:
        """The schedules that cover the batch: of short sequences, and of long ones where there may be any.

        is_causal: bool [num_seqs]; where set, nothing right of a query's own position is seen.
        """
        key = shape, id(is_causal)
        if key not in self._schedules:
            sizes = shape.head_dim, shape.element_size, device_of(self.seq_lens.device).arch, shape.box
            tiles = {"decode": decode_tile(*sizes, more_scores=shape.more_scores)}
            if self.max_seqlen_q * shape.group > DECODE_MAX_ROWS:
                tiles["prefill"] = prefill_tile(*sizes, more_scores=shape.more_scores)
            schedules = [self._schedule(kind, tile, shape, is_causal) for kind, tile in tiles.items()]
            self._schedules[key] = schedules, is_causal
        return self._schedules[key][0]

    def mask_words(self, mask: torch.Tensor) -> torch.Tensor:
        """`pack_mask` of a mask over the new keys, done once a step."""
        if id(mask) not in self._masks:
            self._masks[id(mask)] = pack_mask(mask, self.cu_seqlens_q, self.seq_lens, self.max_seqlen_q), mask
        return self._masks[id(mask)][0]

    def _schedule(
        self, kind: str, tile: AttentionTile, shape: AttentionShape, is_causal: torch.Tensor | None
    ) -> AttentionSchedule:
        device, num_seqs = self.seq_lens.device, self.seq_lens.shape[0]
        longest = self.max_seqlen_q * shape.group
        min_rows, max_rows = (1, min(longest, DECODE_MAX_ROWS)) if kind == "decode" else (DECODE_MAX_ROWS + 1, longest)
        target_items = triton.cdiv(device_of(device).num_sms * _PROGRAMS_PER_SM[kind], shape.num_kv_heads)
        min_split_blocks = triton.cdiv(_MIN_SPLIT_KEYS[kind], tile.block_n)
        # A sequence's last tile may be partly filled, so there is at most one more tile a sequence than full ones.
        full_tiles = shape.num_tokens * shape.group // tile.block_m
        max_tiles = min(num_seqs * triton.cdiv(max_rows, tile.block_m), num_seqs + full_tiles)
        most_pieces = triton.cdiv(self.max_seqlen_k, min_split_blocks * tile.block_n)
        if most_pieces <= 1 or (shape.deterministic and kind == "prefill"):
            most_pieces, max_items, max_slots, max_split_tiles = 1, max_tiles, 0, 0
        elif shape.deterministic:
            most_pieces = min(most_pieces, _DETERMINISTIC_PIECES)
            max_items = max_slots = max_tiles * most_pieces
            max_split_tiles = max_tiles
        else:
            # Pieces beyond a tile's first take a whole share of the work each, and shares are at most target_items; a
            # split tile has at least one share, so its pieces are at most twice its shares.
            max_items, max_slots, max_split_tiles = max_tiles + target_items, 2 * target_items, target_items

        def int32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def float32(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        schedule = AttentionSchedule(
            tile=tile,
            items=int32(max_items if max_tiles else 0, ITEM_SIZE.value),
            split_tiles=int32(max_split_tiles, SPLIT_TILE_SIZE.value),
            counts=int32(2),
            partial_out=float32(max_slots, shape.num_kv_heads, tile.block_m, shape.head_dim),
            partial_lse=float32(max_slots, shape.num_kv_heads, tile.block_m),
        )
        _plan_kernel[(1,)](
            cu_seqlens_q_ptr=self.cu_seqlens_q,
            seq_lens_ptr=self.seq_lens,
            is_causal_ptr=is_causal,
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
            max_pieces=most_pieces,
            window_left=shape.window[0],
            window_right=shape.window[1],
            GROUP=shape.group,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            LANES=PLAN_LANES,
            DETERMINISTIC=shape.deterministic,
            num_warps=PLAN_WARPS,
        )
        return schedule
