"""Rows of a tile (query heads packed with queries): where they are stored, and how partial results are merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.compat import cdiv, tl, triton
from ..core.device import device_of
from ..core.launch import Launch, wait_for_inputs
from .plan import AttentionSchedule, PlanShape, padded_head_dim
from .plan_kernel import SPLIT_TILE_SIZE

_LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# Output elements that a program merges at once. A thread then takes 64 registers on sm_90. With more elements a
# program, the launch would use fewer SMs, see limits.md.
_MERGED_NUMBERS = 2048
# Fetch three splits ahead, because each load waits for the L2 cache.
_STAGES = tl.constexpr(4)
# Most programs an SM. Only the device knows the number of split tiles, which is mostly far below its bound. So a
# program merges one tile after another.
_PROGRAMS_PER_SM = 2


@triton.jit
def finite(maximum):
    """A maximum that can be subtracted: 0 in place of -inf, because -inf - -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _locate_rows(tile, rows, first_token, q_len, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return for rows of a tile: query in the sequence (int32), token, query head (int64), whether the row exists."""
    row = tile * BLOCK_M + rows
    token = (first_token + row // GROUP).to(tl.int64)
    return row // GROUP, token, (kv_head * GROUP + row % GROUP).to(tl.int64), row < q_len * GROUP


class Output(NamedTuple):
    """Where to store rows of the output."""

    out_ptr: Any
    lse_ptr: Any  # log-sum-exps, or None
    stride_token: Any
    stride_head: Any
    stride_lse_head: Any


@triton.jit
def _clear_padding(
    output, first_row, num_tokens, kv_head, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """Set padding rows of GROUP heads to 0, and their log-sum-exp to -inf. The programs of a head share the rows."""
    offs_v = tl.arange(0, DIM_PADDED)
    for row in range(first_row, num_tokens, tl.num_programs(1)):
        first_head = kv_head.to(tl.int64) * GROUP
        for head in range(first_head, first_head + GROUP):
            out_row_ptr = output.out_ptr + row * output.stride_token + head * output.stride_head
            tl.store(out_row_ptr + offs_v, tl.zeros([DIM_PADDED], output.out_ptr.dtype.element_ty), offs_v < DIM)
            if output.lse_ptr is not None:
                tl.store(output.lse_ptr + head * output.stride_lse_head + row, float("-inf"))


@triton.jit
def _store_rows(acc, row_max, row_sum, output, sinks_ptr, token, head, offs_v, row_mask, mask):
    """Normalise a tile and store it, and the log-sum-exps of its rows to base e."""
    out, lse = normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask)
    out_ptrs = output.out_ptr + (token * output.stride_token + head * output.stride_head)[:, None] + offs_v[None, :]
    tl.store(out_ptrs, out.to(output.out_ptr.dtype.element_ty), mask=mask)
    if output.lse_ptr is not None:
        tl.store(output.lse_ptr + head * output.stride_lse_head + token, lse * _LN2, mask=row_mask)


@triton.jit
def normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask):
    """Return output rows and their log-sum-exp in base 2. A sink is the score of one more key, whose value is 0."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=float("-inf")).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        correction = tl.exp2(row_max - finite(new_max))
        row_sum = row_sum * correction + tl.exp2(sink - finite(new_max))
        acc = acc * correction[:, None]
        row_max = new_max
    has_keys = row_sum > 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    return acc / row_sum[:, None], tl.where(has_keys, row_max + tl.log2(row_sum), float("-inf"))


@triton.jit(do_not_specialize=["stride_lse_head"])
def _merge_splits_kernel(
    out_ptr,  # [num_tokens, num_q_heads, V_HEAD_DIM]
    lse_ptr,  # [num_q_heads, num_tokens], or None
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    split_tiles_ptr,  # [max_split_tiles, SPLIT_TILE_SIZE]
    counts_ptr,  # [2]
    partial_out_ptr,  # [max_slots, num_kv_heads, BLOCK_M, V_HEAD_DIM]
    partial_lse_ptr,  # [max_slots, num_kv_heads, BLOCK_M]
    sinks_ptr,  # [num_q_heads], or None
    stride_out_token,
    stride_out_head,
    stride_lse_head,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE_M: tl.constexpr,
):
    """Merge MERGE_M rows of split tiles of one KV head a program. Splits are added in order, so bits do not vary."""
    wait_for_inputs()
    kv_head = tl.program_id(0)
    offs_m = tl.program_id(2) * MERGE_M + tl.arange(0, MERGE_M)
    offs_v = tl.arange(0, V_HEAD_DIM_PADDED)
    # Store 4 numbers a thread. For 8 of them, Triton would also load 8, in two copies that fill half of every sector.
    stored_v = tl.max_contiguous(tl.arange(0, V_HEAD_DIM_PADDED), 4)
    output = Output(
        out_ptr=out_ptr,
        lse_ptr=lse_ptr,
        stride_token=stride_out_token,
        stride_head=stride_out_head,
        stride_lse_head=stride_lse_head,
    )
    for split_tile in range(tl.program_id(1), tl.load(counts_ptr + 1), tl.num_programs(1)):
        seq = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE)
        tile = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE + 1)
        first_slot = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE + 2).to(tl.int64)
        num_slots = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE + 3)
        first_token = tl.load(cu_seqlens_q_ptr + seq)
        q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
        _, token, head, row_mask = _locate_rows(tile, offs_m, first_token, q_len, kv_head, GROUP, BLOCK_M)
        mask = row_mask[:, None] & (offs_v < V_HEAD_DIM)[None, :]
        acc = tl.zeros([MERGE_M, V_HEAD_DIM_PADDED], tl.float32)
        row_max = tl.full([MERGE_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([MERGE_M], tl.float32)
        for split in tl.range(0, num_slots, num_stages=_STAGES):
            partial = ((first_slot + split) * tl.num_programs(0) + kv_head) * BLOCK_M + offs_m
            part_lse = tl.load(partial_lse_ptr + partial, mask=row_mask, other=float("-inf"))
            part_out = tl.load(partial_out_ptr + partial[:, None] * V_HEAD_DIM + offs_v[None, :], mask=mask, other=0.0)
            new_max = tl.maximum(row_max, part_lse)
            correction = tl.exp2(row_max - finite(new_max))
            weight = tl.exp2(part_lse - finite(new_max))
            row_sum = row_sum * correction + weight
            acc = acc * correction[:, None] + part_out * weight[:, None]
            row_max = new_max
        _store_rows(acc, row_max, row_sum, output, sinks_ptr, token, head, stored_v, row_mask, mask)


def shared_arguments(out_strides: tuple[int, int], shape: PlanShape, schedule: AttentionSchedule) -> dict[str, Any]:
    """Return the arguments that a kernel over a schedule's tiles and the merge take."""
    stride_token, stride_head = out_strides
    return {
        "counts_ptr": schedule.counts,
        "partial_out_ptr": schedule.partial_out,
        "partial_lse_ptr": schedule.partial_lse,
        "stride_out_token": stride_token,
        "stride_out_head": stride_head,
        "stride_lse_head": shape.num_tokens,
        "GROUP": shape.group,
        "V_HEAD_DIM": shape.v_head_dim,
        "V_HEAD_DIM_PADDED": padded_head_dim(shape.v_head_dim),
        "BLOCK_M": schedule.tile.block_m,
    }


def merge_launch(device: torch.device, shared: dict[str, Any], shape: PlanShape, schedule: AttentionSchedule) -> Launch:
    """Return the launch that merges a schedule's split tiles; shared: its `shared_arguments` and offsets."""
    block_m = schedule.tile.block_m
    merge_m = merged_rows(block_m, padded_head_dim(shape.v_head_dim))
    num_parts = shape.num_kv_heads * (block_m // merge_m)
    most_tiles = cdiv(_PROGRAMS_PER_SM * device_of(device).num_sms, num_parts)
    return Launch(
        _merge_splits_kernel,
        (shape.num_kv_heads, min(schedule.split_tiles.shape[0], most_tiles), block_m // merge_m),
        {
            **shared,
            "split_tiles_ptr": schedule.split_tiles,
            "MERGE_M": merge_m,
        },
        num_warps=4,
    )


def merged_rows(block_m: int, width: int) -> int:
    """Return the rows of a merge program: a power of two that divides the tile's."""
    return min(block_m, _MERGED_NUMBERS // width)
