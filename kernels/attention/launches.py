"""Launching the Triton kernels of paged attention over a plan's work lists."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..common.attention.keys import NO_LIMIT
from ..common.attention.merge_splits import merge_launch, shared_arguments
from ..common.attention.plan import AttentionPlan, AttentionSchedule, padded_head_dim
from ..common.cache_kinds import cache_kind
from ..common.checks import scale_strides
from ..common.device import device_of
from ..common.fp8 import FP8_DTYPES, has_native_e4m3
from ..common.id_checks import Sequences, check_sequences, checks_on_device
from ..common.launch import Box, Launch, strides
from .config import MAX_KEYS_AT_ONCE, AttentionCall, AttentionShape, box_keys
from .tile_kernels import _attention_kernel


def bind(call: AttentionCall, plan: AttentionPlan | None) -> Callable[[AttentionCall], None]:
    """Return a function that fills `out`, and `lse` if given, of calls like this one in the same step.

    It runs the plan's work lists.
    """
    numbers = (
        len(call.q), *call.k_cache.shape[:2], call.max_seqlen_q, call.window[0], MAX_KEYS_AT_ONCE,
        call.chunk_size or NO_LIMIT,
    )  # fmt: skip
    check_sequences(Sequences(call.block_table, call.cu_seqlens_q, call.seq_lens, *numbers))
    checks = call.q.is_cuda and checks_on_device()  # in every replay of a graph, too
    is_fp8 = call.k_cache.dtype in FP8_DTYPES
    if plan is None:
        max_seqlen_k = call.block_table.shape[1] * call.k_cache.shape[1]
        lengths = {"max_seqlen_q": call.max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        plan = AttentionPlan(call.cu_seqlens_q, call.seq_lens, **lengths)
    num_tokens, num_q_heads, head_dim = call.q.shape
    num_kv_heads = call.k_cache.shape[2]
    arch = device_of(call.q.device).arch
    shape = AttentionShape(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        v_head_dim=call.v_cache.shape[3],
        element_size=call.q.element_size(),
        window=call.window,
        chunk_size=call.chunk_size,
        box=min(box_keys(call.k_cache, arch), box_keys(call.v_cache, arch)),
        more_scores=call.softcap > 0 or call.alibi_slopes is not None or call.mask is not None,
        kind=cache_kind(call.k_cache.dtype),
        deterministic=call.deterministic,
    )
    schedules = plan.schedules(shape, call.is_causal)
    launches: list[Launch] = []
    for index, schedule in enumerate(schedules):
        launches.append(_tiles(call, shape, plan, schedule, clear_padding=index == 0))
        if schedule.split_tiles.shape[0]:
            launches.append(merge_launch(call.out, shape, plan, schedule))
    has_work = any(schedule.items.shape[0] for schedule in schedules)

    def compute(call: AttentionCall) -> None:
        if checks:
            check_sequences(Sequences(call.block_table, call.cu_seqlens_q, call.seq_lens, *numbers))
        out, lse, sinks, slopes = call.out, call.lse, call.sinks, call.alibi_slopes
        k_cache, v_cache = call.k_cache, call.v_cache
        if not has_work:  # all is padding
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
            return
        if is_fp8:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        if sinks is not None:
            sinks = sinks.contiguous()
        if slopes is not None:
            slopes = slopes.contiguous()
        arguments = {
            "q_ptr": call.q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "out_ptr": out,
            "lse_ptr": lse,
            "block_table_ptr": call.block_table,
            "sinks_ptr": sinks,
            "alibi_slopes_ptr": slopes,
            "k_scale_ptr": call.k_scale,
            "v_scale_ptr": call.v_scale,
        }
        for launch in launches:
            launch(arguments)

    return compute


def _tiles(
    call: AttentionCall, shape: AttentionShape, plan: AttentionPlan, schedule: AttentionSchedule, *, clear_padding: bool
) -> Launch:
    tile, q, k_cache, v_cache = schedule.tile, call.q, call.k_cache, call.v_cache
    mask = None
    if call.mask is not None:
        mask = plan.mask_words(call.mask)
    width, v_width = padded_head_dim(shape.head_dim), padded_head_dim(shape.v_head_dim)
    boxes = {}
    if tile.by_tma:
        for name, cache, size in (("k_cache", k_cache, width), ("v_cache", v_cache, v_width)):
            boxes[name] = Box(cache.shape, cache.stride(), (1, tile.block_n, 1, size))
    return Launch(
        _attention_kernel,
        (shape.num_kv_heads, schedule.items.shape[0]),
        {
            **shared_arguments(call.out, shape, plan, schedule),
            "seq_lens_ptr": plan.seq_lens,
            "items_ptr": schedule.items,
            "first_padding_ptr": schedule.first_padding,
            "is_causal_ptr": call.is_causal,
            "mask_ptr": mask,
            "num_tokens": shape.num_tokens,
            "scale": call.softmax_scale,
            "softcap": call.softcap,
            "window_left": call.window[0],
            "window_right": call.window[1],
            **strides("token head", q=q),
            **strides("block slot head", k=k_cache, v=v_cache),
            **strides("seq", table=call.block_table),
            **strides("token", mask=mask),
            **scale_strides(k_scale=call.k_scale, v_scale=call.v_scale),
            "HEAD_DIM": shape.head_dim,
            "HEAD_DIM_PADDED": width,
            "KV_BLOCK_SIZE": k_cache.shape[1],
            "BLOCK_N": tile.block_n,
            "HAS_WINDOW": call.window[0] < NO_LIMIT or call.chunk_size > 0,
            "CHUNK_SIZE": call.chunk_size,
            "HAS_SOFTCAP": call.softcap > 0,
            "USE_TMA": tile.by_tma,
            "SAME_STRIDES": k_cache.stride() == v_cache.stride(),
            # Wider keys than values would make the products of values wider: those are loaded, from a cache.
            "SHARED_KV": call.shares_cache and width == v_width,
            "KIND": shape.kind,
            "NATIVE_FP8": has_native_e4m3(q.device),
            "CLEAR_PADDING": clear_padding,
            "EDGE_STAGES": tile.edge_stages,
        },
        boxes=boxes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
