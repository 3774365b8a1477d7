"""Launching the Triton kernels of paged attention over a plan's work lists."""

from __future__ import annotations

from typing import Any

import torch

from paged.kernels.attention_call import NO_LIMIT, AttentionCall
from paged.kernels.attention_config import box_keys, padded_head_dim
from paged.kernels.attention_kernels import _attention_kernel, _merge_splits_kernel
from paged.kernels.attention_plan import AttentionPlan, AttentionSchedule, AttentionShape
from paged.kernels.checks import scale_stride
from paged.kernels.device import device_of
from paged.kernels.fp8 import as_kernel_argument, has_native_e4m3

# Rows of a merge program: its accumulator stays in registers at any head_dim.
_MERGE_M = 16


def run_attention(call: AttentionCall, plan: AttentionPlan) -> None:
    """Launch the plan's schedules: fills `call.out` and, where given, `call.lse`."""
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
    if not any(schedule.items.shape[0] for schedule in schedules):  # no sequence, or none with a query: all is padding
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    for index, schedule in enumerate(schedules):
        _launch_tiles(call, shape, plan, schedule, clear_padding=index == 0)
        if schedule.split_tiles.shape[0]:
            _launch_merge(call, shape, plan, schedule)


def _launch_tiles(
    call: AttentionCall, shape: AttentionShape, plan: AttentionPlan, schedule: AttentionSchedule, *, clear_padding: bool
) -> None:
    tile, q, out = schedule.tile, call.q, call.out
    width = padded_head_dim(shape.head_dim)
    k_cache, v_cache = as_kernel_argument(call.k_cache), as_kernel_argument(call.v_cache)
    mask = None if call.mask is None else plan.mask_words(call.mask)
    _attention_kernel[(shape.num_kv_heads, schedule.items.shape[0])](
        q_ptr=q,
        k_cache=_descriptor(k_cache, tile.block_n, width) if tile.by_tma else k_cache,
        v_cache=_descriptor(v_cache, tile.block_n, width) if tile.by_tma else v_cache,
        out_ptr=out,
        lse_ptr=call.lse,
        block_table_ptr=call.block_table,
        cu_seqlens_q_ptr=plan.cu_seqlens_q,
        seq_lens_ptr=plan.seq_lens,
        items_ptr=schedule.items,
        counts_ptr=schedule.counts,
        partial_out_ptr=schedule.partial_out,
        partial_lse_ptr=schedule.partial_lse,
        is_causal_ptr=call.is_causal,
        sinks_ptr=call.sinks,
        alibi_slopes_ptr=call.alibi_slopes,
        k_scale_ptr=call.k_scale,
        v_scale_ptr=call.v_scale,
        mask_ptr=mask,
        num_tokens=shape.num_tokens,
        num_seqs=plan.seq_lens.shape[0],
        scale=call.softmax_scale,
        softcap=call.softcap,
        window_left=call.window[0],
        window_right=call.window[1],
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0),
        stride_v_slot=v_cache.stride(1),
        stride_v_head=v_cache.stride(2),
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        stride_lse_head=shape.num_tokens,
        stride_table_seq=call.block_table.stride(0),
        stride_k_scale_head=scale_stride(call.k_scale),
        stride_v_scale_head=scale_stride(call.v_scale),
        stride_mask_token=0 if mask is None else mask.stride(0),
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=width,
        KV_BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HAS_WINDOW=call.window[0] < NO_LIMIT,
        HAS_SOFTCAP=call.softcap > 0,
        USE_TMA=tile.by_tma,
        SAME_STRIDES=k_cache.stride() == v_cache.stride(),
        FP8=k_cache.dtype == torch.uint8,
        NATIVE_FP8=has_native_e4m3(q.device),
        CLEAR_PADDING=clear_padding,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_merge(call: AttentionCall, shape: AttentionShape, plan: AttentionPlan, schedule: AttentionSchedule) -> None:
    block_m = schedule.tile.block_m
    _merge_splits_kernel[(shape.num_kv_heads, schedule.split_tiles.shape[0], block_m // _MERGE_M)](
        out_ptr=call.out,
        lse_ptr=call.lse,
        cu_seqlens_q_ptr=plan.cu_seqlens_q,
        split_tiles_ptr=schedule.split_tiles,
        counts_ptr=schedule.counts,
        partial_out_ptr=schedule.partial_out,
        partial_lse_ptr=schedule.partial_lse,
        sinks_ptr=call.sinks,
        stride_out_token=call.out.stride(0),
        stride_out_head=call.out.stride(1),
        stride_lse_head=shape.num_tokens,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=padded_head_dim(shape.head_dim),
        BLOCK_M=block_m,
        MERGE_M=_MERGE_M,
        num_warps=4,
    )


def _descriptor(cache: torch.Tensor, block_n: int, width: int) -> Any:
    """The whole cache with boxes of `block_n` keys of one head; the copy engine fills with 0 what exceeds head_dim."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, block_n, 1, width])
