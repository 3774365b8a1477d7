"""Launching the Triton kernels of both attention operations over a plan's work lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..cache.latent_cache import latent_parts
from ..core.checks import scale_strides
from ..core.dtypes import as_kernel_argument, has_native_e4m3, kv_kind, scale_argument
from ..core.ids import Sequences, check_sequences, checks_on_device
from ..core.launch import Box, Launch, strides
from ..core.operation import Run
from .call import AttentionCall, CompressedCall, MlaCall
from .chosen_kernel import _chosen_attention_kernel
from .keys import NO_LIMIT
from .latent_kernel import _mla_attention_kernel
from .merge_splits import merge_launch, shared_arguments
from .plan import (
    AttentionPlan,
    AttentionSchedule,
    PlanShape,
    outputs,
    padded_head_dim,
    plan_of_bundles,
    plan_of_tokens,
    reference_to,
)
from .tile_kernels import _attention_kernel
from .tiles import MAX_KEYS_AT_ONCE, ONE_LOOP_ROWS
from .union_kernel import UNION_TENSORS, union_launch

ScheduleArguments = Callable[[AttentionSchedule], tuple[dict[str, Any], Mapping[str, Box]]]
"""Returns the kernel's arguments that depend on the schedule, and the tensors that it takes as boxes."""


def bind(call: AttentionCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that computes calls of `paged_attention` like this one in the plan's step."""
    ids = checked_ids(
        call,
        call.k_cache,
        window_left=call.window[0],
        keys_at_once=MAX_KEYS_AT_ONCE,
        chunk_size=call.chunk_size or NO_LIMIT,
    )
    bound_plan, return_lse, v_head_dim = reference_to(plan), call.return_lse, call.v_head_dim
    launches = _attention_launches(call, plan or own_plan(call, call.k_cache))

    def run(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_table_scale: torch.Tensor | None = None,
        v_table_scale: torch.Tensor | None = None,
        chosen_blocks: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        out: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        assert plan is bound_plan()
        if ids is not None:
            check_sequences(ids._replace(block_table=block_table))
        out, lse = outputs(q, v_head_dim, out, return_lse=return_lse)
        arguments = {
            "q_ptr": q,
            "k_cache": as_kernel_argument(k_cache),
            "v_cache": as_kernel_argument(v_cache),
            "out_ptr": out,
            "lse_ptr": lse,
            "block_table_ptr": block_table,
            "sinks_ptr": None if sinks is None else sinks.contiguous(),
            "alibi_slopes_ptr": None if alibi_slopes is None else alibi_slopes.contiguous(),
            "k_scale_ptr": scale_argument(k_scale),
            "v_scale_ptr": scale_argument(v_scale),
            "k_table_scale_ptr": k_table_scale,
            "v_table_scale_ptr": v_table_scale,
            "chosen_ptr": chosen_blocks,
        }
        for launch in launches:
            launch(arguments)
        if not launches:
            clear(out, lse)
        if lse is None:
            return out
        return out, lse

    return run


def bind_latent(call: MlaCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that computes calls of `paged_mla_attention` like this one in the plan's step."""
    ids = checked_ids(call, call.kv_cache, window_left=call.window[0], keys_at_once=1)
    bound_plan, return_lse, v_head_dim = reference_to(plan), call.return_lse, call.v_head_dim
    launches = _latent_launches(call, plan or own_plan(call, call.kv_cache))

    def run(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        out: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        assert plan is bound_plan()
        if ids is not None:
            check_sequences(ids._replace(block_table=block_table))
        out, lse = outputs(q, v_head_dim, out, return_lse=return_lse)
        latent, rope, scales = latent_parts(kv_cache, v_head_dim)
        if rope.shape[2] == 0:  # the kernel reads no rotated part then, but needs a valid pointer
            rope = latent
        arguments = {
            "q_ptr": q,
            "latent_ptr": as_kernel_argument(latent),
            "rope_ptr": as_kernel_argument(rope),
            "scales_ptr": scales,
            "out_ptr": out,
            "lse_ptr": lse,
            "block_table_ptr": block_table,
            "sinks_ptr": None if sinks is None else sinks.contiguous(),
            "k_scale_ptr": k_scale,
            "indices_ptr": indices,
        }
        for launch in launches:
            launch(arguments)
        if not launches:
            clear(out, lse)
        if lse is None:
            return out
        return out, lse

    return run


def own_plan(call: AttentionCall | MlaCall | CompressedCall, cache: torch.Tensor) -> AttentionPlan:
    """Return a plan for this call alone."""
    max_seqlen_k = call.block_table.shape[1] * cache.shape[1]
    return AttentionPlan(call.cu_seqlens_q, call.seq_lens, max_seqlen_q=call.max_seqlen_q, max_seqlen_k=max_seqlen_k)


def checked_ids(
    call: AttentionCall | MlaCall | CompressedCall,
    cache: torch.Tensor,
    *,
    window_left: int,
    keys_at_once: int,
    chunk_size: int = NO_LIMIT,
) -> Sequences | None:
    """Check the ids of a step; return them if every call, also in a replay of a graph, checks them again."""
    num_blocks, block_size = cache.shape[:2]
    ids = Sequences(
        call.block_table,
        call.cu_seqlens_q,
        call.seq_lens,
        num_tokens=len(call.q),
        num_blocks=num_blocks,
        block_size=block_size,
        max_seqlen_q=call.max_seqlen_q,
        window_left=window_left,
        keys_at_once=keys_at_once,
        chunk_size=chunk_size,
    )
    check_sequences(ids)
    if call.q.is_cuda and checks_on_device():
        return ids
    return None


def clear(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Fill the results of calls whose rows are all padding."""
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


def _attention_launches(call: AttentionCall, plan: AttentionPlan) -> list[Launch]:
    shape, k_cache, v_cache = call.shape, call.k_cache, call.v_cache
    width, v_width = padded_head_dim(shape.head_dim), padded_head_dim(shape.v_head_dim)
    mask = None
    if call.mask is not None:
        mask = plan.mask_words(call.mask)
    arguments: dict[str, Any] = {
        "is_causal_ptr": call.is_causal,
        "mask_ptr": mask,
        "softcap": call.softcap,
        "window_left": call.window[0],
        "window_right": call.window[1],
        **strides("block slot head", k=k_cache, v=v_cache),
        **strides("token", mask=mask),
        **scale_strides(k_scale=call.k_scale, v_scale=call.v_scale),
        "HEAD_DIM": shape.head_dim,
        "HEAD_DIM_PADDED": width,
        "KV_BLOCK_SIZE": k_cache.shape[1],
        "HAS_WINDOW": call.window[0] < NO_LIMIT or call.chunk_size > 0,
        "CHUNK_SIZE": call.chunk_size,
        "HAS_SOFTCAP": call.softcap > 0,
        "K_KIND": kv_kind(k_cache.dtype).name,
        "V_KIND": kv_kind(v_cache.dtype).name,
        "FITS_FLOAT16": kv_kind(k_cache.dtype).fits_float16 and kv_kind(v_cache.dtype).fits_float16,
    }
    if call.chosen_blocks is not None:
        return _chosen_launches(call, plan, arguments)
    arguments |= {
        **_lengths(plan),
        "SAME_STRIDES": k_cache.stride() == v_cache.stride(),
        # Take values from the loaded keys only if both have the same padded width. With wider keys, the product of
        # weights and values would be wider, too, so values are loaded again.
        # Values with two numbers a byte are also loaded again, because their scales may be others.
        "SHARED_KV": call.shares_cache and width == v_width and kv_kind(k_cache.dtype).numbers_per_element == 1,
    }

    def by_schedule(schedule: AttentionSchedule) -> tuple[dict[str, Any], Mapping[str, Box]]:
        tile, boxes = schedule.tile, {}
        if tile.by_tma:
            for name, cache, size in (("k_cache", k_cache, width), ("v_cache", v_cache, v_width)):
                boxes[name] = Box(cache.shape, cache.stride(), (1, tile.block_n, 1, size))
        return {"USE_TMA": tile.by_tma, "EDGE_STAGES": tile.edge_stages}, boxes

    return launches_of_tiles(_attention_kernel, call, shape, plan, arguments, by_schedule, call.is_causal)


def _chosen_launches(call: AttentionCall, plan: AttentionPlan, arguments: Mapping[str, Any]) -> list[Launch]:
    """Return the launches over chosen blocks. arguments: those that both kernels of `paged_attention` take."""
    chosen, size = call.chosen_blocks, call.chosen_block_size
    assert chosen is not None
    if not len(call.seq_lens):
        return []
    shape, num_chosen = call.shape, chosen.shape[2]
    # Neighbours choose mostly the same blocks, so plan a bundle's keys as those of one token.
    bundle_plan, bundle_seqs = plan_of_bundles(plan, len(chosen), num_chosen * size, shape.bundle_tokens)
    lists = {
        "step_offsets_ptr": plan.cu_seqlens_q,
        "step_lengths_ptr": plan.seq_lens,
        "bundle_offsets_ptr": bundle_plan.cu_seqlens_q,
        "bundle_seqs_ptr": bundle_seqs,
        "num_chosen": num_chosen,
        **strides("token head", chosen=chosen),
        "CHOSEN_SIZE": size,
    }
    launches: list[Launch] = []
    union: dict[str, Any] = {}
    if shape.bundle_tokens > 1:
        names = "is_causal_ptr", "window_left", "window_right", "CHUNK_SIZE"
        rules = {name: arguments[name] for name in names}
        launch, union = union_launch(chosen, len(bundle_seqs), shape.bundle_tokens, {**lists, **rules})
        launches.append(launch)

    def by_schedule(schedule: AttentionSchedule) -> tuple[dict[str, Any], Mapping[str, Box]]:
        if schedule.phase == "prefill":
            return union, {}
        return {**dict.fromkeys(UNION_TENSORS), "max_entries": 0}, {}

    arguments = {**arguments, **lists}
    return launches + launches_of_tiles(_chosen_attention_kernel, call, shape, bundle_plan, arguments, by_schedule)


def _latent_launches(call: MlaCall, plan: AttentionPlan) -> list[Launch]:
    token_keys, num_indices = None, 0
    if call.indices is not None:
        num_indices = call.indices.shape[1]
        if len(call.seq_lens):
            plan, token_keys = plan_of_tokens(plan, len(call.q), num_indices, causal=call.causal)
    shape = call.shape
    latent, rope, scales = latent_parts(call.kv_cache, call.v_head_dim)
    rope_dim = shape.head_dim - shape.v_head_dim
    has_window = call.window[0] < NO_LIMIT
    arguments = {
        **_lengths(plan),
        "token_keys_ptr": token_keys,
        "num_indices": num_indices,
        **strides("block slot", latent=latent, rope=rope, scales=scales),
        **strides("token", indices=call.indices),
        "ROPE_DIM": rope_dim,
        "ROPE_DIM_PADDED": padded_head_dim(rope_dim),
        "KV_BLOCK_SIZE": call.kv_cache.shape[1],
        "window_left": call.window[0],
        "window_right": call.window[1],
        "HAS_WINDOW": has_window,
        "KIND": shape.kind,
    }

    def by_schedule(schedule: AttentionSchedule) -> tuple[dict[str, Any], Mapping[str, Box]]:
        return {"ONE_LOOP": shape.chosen or has_window or schedule.tile.block_m > ONE_LOOP_ROWS}, {}

    return launches_of_tiles(_mla_attention_kernel, call, shape, plan, arguments, by_schedule)


def _lengths(plan: AttentionPlan) -> dict[str, torch.Tensor]:
    """Return a plan's lengths by the names of the kernels' arguments."""
    return {"cu_seqlens_q_ptr": plan.cu_seqlens_q, "seq_lens_ptr": plan.seq_lens}


def launches_of_tiles(
    kernel: Any,
    call: AttentionCall | MlaCall | CompressedCall,
    shape: PlanShape,
    plan: AttentionPlan,
    arguments: Mapping[str, Any],
    by_schedule: ScheduleArguments,
    is_causal: torch.Tensor | None = None,
) -> list[Launch]:
    """Return the launches of a kernel over the plan's tiles, each before the merge of its splits.

    There are none if the step has no query.
    """
    schedules = plan.schedules(shape, is_causal)
    if not any(schedule.items.shape[0] for schedule in schedules):
        return []
    launches = []
    for index, schedule in enumerate(schedules):
        tile = schedule.tile
        shared = shared_arguments(call.out_strides, shape, schedule)
        schedule_arguments, boxes = by_schedule(schedule)
        launches.append(
            Launch(
                kernel,
                (shape.num_kv_heads, schedule.items.shape[0]),
                {
                    **shared,
                    **arguments,
                    **schedule_arguments,
                    **strides("token head", q=call.q),
                    **strides("seq", table=call.block_table),
                    "items_ptr": schedule.items,
                    "first_padding_ptr": schedule.first_padding,
                    "num_tokens": shape.num_tokens,
                    "scale": call.softmax_scale,
                    "BLOCK_N": tile.block_n,
                    "NATIVE_FP8": has_native_e4m3(call.q.device),
                    "CLEAR_PADDING": index == 0,
                },
                boxes=boxes,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        )
        if schedule.split_tiles.shape[0]:
            offsets = {"cu_seqlens_q_ptr": plan.cu_seqlens_q}
            launches.append(merge_launch(call.q.device, {**shared, **offsets}, shape, schedule))
    return launches
