"""Launching the Triton kernels of paged attention over a plan's work lists."""

from __future__ import annotations

import torch

from paged.kernels.attention.call import NO_LIMIT, AttentionCall
from paged.kernels.attention.config import box_keys, padded_head_dim
from paged.kernels.attention.plan import AttentionPlan, AttentionSchedule, AttentionShape
from paged.kernels.attention.tile_kernels import _attention_kernel, _merge_splits_kernel
from paged.kernels.common.checks import scale_stride
from paged.kernels.common.device import device_of
from paged.kernels.common.fp8 import as_kernel_argument, has_native_e4m3
from paged.kernels.common.launch import Launch

# Rows of a merge program: its accumulator stays in registers at any head_dim.
_MERGE_M = 16


def prepare(call: AttentionCall, plan: AttentionPlan) -> list[Launch]:
    """The launches that fill `call.out` and, where given, `call.lse` over the plan's work lists; none where there is no
    sequence, or none with a query.
    """
    num_tokens, num_q_heads, head_dim = call.q.shape
    num_kv_heads = call.k_cache.shape[2]
    arch = device_of(call.q.device).arch
    shape = AttentionShape(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        element_size=call.q.element_size(),
        window=call.window,
        box=min(box_keys(call.k_cache, arch), box_keys(call.v_cache, arch)),
        more_scores=call.softcap > 0 or call.alibi_slopes is not None or call.mask is not None,
        fp8=call.k_cache.dtype == torch.float8_e4m3fn,
        deterministic=call.deterministic,
    )
    schedules = plan.schedules(shape, call.is_causal)
    launches: list[Launch] = []
    if not any(schedule.items.shape[0] for schedule in schedules):
        return launches
    for index, schedule in enumerate(schedules):
        launches.append(_tiles(call, shape, plan, schedule, clear_padding=index == 0))
        if schedule.split_tiles.shape[0]:
            launches.append(_merge(call, shape, plan, schedule))
    return launches


def launch(
    launches: list[Launch],
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Run what was prepared for tensors of these shapes, strides, dtypes and alignments: fills out and lse."""
    if not launches:  # all is padding
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    tensors = {
        "q_ptr": q,
        "k_cache": as_kernel_argument(k_cache),
        "v_cache": as_kernel_argument(v_cache),
        "out_ptr": out,
        "lse_ptr": lse,
        "block_table_ptr": block_table,
        "sinks_ptr": None if sinks is None else sinks.contiguous(),
        "alibi_slopes_ptr": None if alibi_slopes is None else alibi_slopes.contiguous(),
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
    }
    for each in launches:
        each(tensors)


def _tiles(
    call: AttentionCall, shape: AttentionShape, plan: AttentionPlan, schedule: AttentionSchedule, *, clear_padding: bool
) -> Launch:
    tile, q, k_cache, v_cache, out = schedule.tile, call.q, call.k_cache, call.v_cache, call.out
    mask = None if call.mask is None else plan.mask_words(call.mask)
    width = padded_head_dim(shape.head_dim)
    return Launch(
        _attention_kernel,
        (shape.num_kv_heads, schedule.items.shape[0]),
        {
            "cu_seqlens_q_ptr": plan.cu_seqlens_q,
            "seq_lens_ptr": plan.seq_lens,
            "items_ptr": schedule.items,
            "counts_ptr": schedule.counts,
            "first_padding_ptr": schedule.first_padding,
            "partial_out_ptr": schedule.partial_out,
            "partial_lse_ptr": schedule.partial_lse,
            "is_causal_ptr": call.is_causal,
            "mask_ptr": mask,
            "num_tokens": shape.num_tokens,
            "scale": call.softmax_scale,
            "softcap": call.softcap,
            "window_left": call.window[0],
            "window_right": call.window[1],
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_k_block": k_cache.stride(0),
            "stride_k_slot": k_cache.stride(1),
            "stride_k_head": k_cache.stride(2),
            "stride_v_block": v_cache.stride(0),
            "stride_v_slot": v_cache.stride(1),
            "stride_v_head": v_cache.stride(2),
            "stride_out_token": out.stride(0),
            "stride_out_head": out.stride(1),
            "stride_lse_head": shape.num_tokens,
            "stride_table_seq": call.block_table.stride(0),
            "stride_k_scale_head": scale_stride(call.k_scale),
            "stride_v_scale_head": scale_stride(call.v_scale),
            "stride_mask_token": 0 if mask is None else mask.stride(0),
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "HEAD_DIM_PADDED": width,
            "KV_BLOCK_SIZE": k_cache.shape[1],
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "HAS_WINDOW": call.window[0] < NO_LIMIT,
            "HAS_SOFTCAP": call.softcap > 0,
            "USE_TMA": tile.by_tma,
            "SAME_STRIDES": k_cache.stride() == v_cache.stride(),
            "FP8": shape.fp8,
            "NATIVE_FP8": has_native_e4m3(q.device),
            "CLEAR_PADDING": clear_padding,
        },
        boxes={"k_cache": (1, tile.block_n, 1, width), "v_cache": (1, tile.block_n, 1, width)} if tile.by_tma else {},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _merge(call: AttentionCall, shape: AttentionShape, plan: AttentionPlan, schedule: AttentionSchedule) -> Launch:
    block_m = schedule.tile.block_m
    return Launch(
        _merge_splits_kernel,
        (shape.num_kv_heads, schedule.split_tiles.shape[0], block_m // _MERGE_M),
        {
            "cu_seqlens_q_ptr": plan.cu_seqlens_q,
            "split_tiles_ptr": schedule.split_tiles,
            "counts_ptr": schedule.counts,
            "partial_out_ptr": schedule.partial_out,
            "partial_lse_ptr": schedule.partial_lse,
            "stride_out_token": call.out.stride(0),
            "stride_out_head": call.out.stride(1),
            "stride_lse_head": shape.num_tokens,
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "HEAD_DIM_PADDED": padded_head_dim(shape.head_dim),
            "BLOCK_M": block_m,
            "MERGE_M": _MERGE_M,
        },
        num_warps=4,
    )
