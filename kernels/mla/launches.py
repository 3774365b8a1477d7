"""Launching the Triton kernels of latent attention over a plan's work lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..common.attention.keys import NO_LIMIT
from ..common.attention.latent_cache import latent_kind, latent_parts
from ..common.attention.merge_splits import merge_launch, shared_arguments
from ..common.attention.plan import AttentionPlan, AttentionSchedule, padded_head_dim
from ..common.fp8 import as_kernel_argument, has_native_e4m3
from ..common.id_checks import Sequences, check_sequences, checks_on_device
from ..common.launch import Launch, strides
from .config import ONE_LOOP_ROWS, MlaCall, MlaShape
from .tile_kernel import _mla_attention_kernel


def bind(call: MlaCall, plan: AttentionPlan | None) -> Callable[[MlaCall], None]:
    """Return a function that fills `out`, and `lse` if given, of calls like this one in the same step."""
    numbers = len(call.q), *call.kv_cache.shape[:2], call.max_seqlen_q, NO_LIMIT, 1
    check_sequences(Sequences(call.block_table, call.cu_seqlens_q, call.seq_lens, *numbers))
    if plan is None:
        max_seqlen_k = call.block_table.shape[1] * call.kv_cache.shape[1]
        lengths = {"max_seqlen_q": call.max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        plan = AttentionPlan(call.cu_seqlens_q, call.seq_lens, **lengths)
    token_keys = None
    if call.indices is not None and len(call.seq_lens):
        plan, token_keys = _plan_of_tokens(plan, call, call.indices.shape[1])
    window_right = NO_LIMIT
    if call.causal and call.indices is None:
        window_right = 0
    shape = MlaShape(
        num_tokens=len(call.q),
        num_kv_heads=1,
        group=call.q.shape[1],
        head_dim=call.q.shape[2],
        v_head_dim=call.v_head_dim,
        element_size=call.q.element_size(),
        window=(NO_LIMIT, window_right),
        kind=latent_kind(call.kv_cache),
        chosen=token_keys is not None,
        deterministic=call.deterministic,
    )
    launches: list[Launch] = []
    schedules = plan.schedules(shape)
    for index, schedule in enumerate(schedules):
        launches.append(_tiles(call, shape, plan, schedule, token_keys, clear_padding=index == 0))
        if schedule.split_tiles.shape[0]:
            launches.append(merge_launch(call.out, shape, plan, schedule))
    has_work = len(call.seq_lens) > 0 and any(schedule.items.shape[0] for schedule in schedules)
    checks = call.q.is_cuda and checks_on_device()  # in every replay of a graph, too

    def compute(call: MlaCall) -> None:
        if checks:
            check_sequences(Sequences(call.block_table, call.cu_seqlens_q, call.seq_lens, *numbers))
        out, lse, sinks = call.out, call.lse, call.sinks
        if not has_work:  # all is padding
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
            return
        if sinks is not None:
            sinks = sinks.contiguous()
        latent, rope, scales = latent_parts(call.kv_cache, call.v_head_dim)
        if rope.shape[2] == 0:  # nothing is read there, but a pointer must be one
            rope = latent
        arguments = {
            "q_ptr": call.q,
            "latent_ptr": as_kernel_argument(latent),
            "rope_ptr": as_kernel_argument(rope),
            "scales_ptr": scales,
            "out_ptr": out,
            "lse_ptr": lse,
            "block_table_ptr": call.block_table,
            "sinks_ptr": sinks,
            "k_scale_ptr": call.k_scale,
            "indices_ptr": call.indices,
        }
        for launch in launches:
            launch(arguments)

    return compute


def _plan_of_tokens(plan: AttentionPlan, call: MlaCall, num_indices: int) -> tuple[AttentionPlan, torch.Tensor]:
    """Return a plan in which each token is a sequence of one query and `num_indices` keys, made once a step.

    Beside it int32 [2, num_tokens]: each token's sequence, and one past the last position that it sees.
    """
    token_plans: dict[Any, tuple[AttentionPlan, torch.Tensor]] = plan.runs.setdefault("tokens with chosen keys", {})
    key = len(call.q), num_indices, call.causal
    if key not in token_plans:
        offsets, lengths = plan.cu_seqlens_q, plan.seq_lens
        tokens = torch.arange(len(call.q) + 1, dtype=torch.int32, device=offsets.device)
        seqs = torch.searchsorted(offsets[1:], tokens[:-1], right=True).clamp_(max=len(lengths) - 1)
        ends = lengths[seqs]
        if call.causal:
            ends = ends.minimum(ends - offsets[seqs + 1] + tokens[:-1] + 1)
        token_plan = AttentionPlan(
            tokens.minimum(offsets[-1]),  # padding rows have no query
            torch.full_like(tokens[:-1], num_indices),
            max_seqlen_q=1,
            max_seqlen_k=num_indices,
        )
        token_plans[key] = token_plan, torch.stack([seqs.to(torch.int32), ends])
    return token_plans[key]


def _tiles(
    call: MlaCall,
    shape: MlaShape,
    plan: AttentionPlan,
    schedule: AttentionSchedule,
    token_keys: torch.Tensor | None,
    *,
    clear_padding: bool,
) -> Launch:
    tile = schedule.tile
    latent, rope, scales = latent_parts(call.kv_cache, call.v_head_dim)
    rope_dim = shape.head_dim - shape.v_head_dim
    num_indices = 0
    if call.indices is not None:
        num_indices = call.indices.shape[1]
    return Launch(
        _mla_attention_kernel,
        (1, schedule.items.shape[0]),
        {
            **shared_arguments(call.out, shape, plan, schedule),
            "seq_lens_ptr": plan.seq_lens,
            "items_ptr": schedule.items,
            "first_padding_ptr": schedule.first_padding,
            "token_keys_ptr": token_keys,
            "num_tokens": shape.num_tokens,
            "num_indices": num_indices,
            "scale": call.softmax_scale,
            **strides("token head", q=call.q),
            **strides("block slot", latent=latent, rope=rope, scales=scales),
            **strides("seq", table=call.block_table),
            **strides("token", indices=call.indices),
            "ROPE_DIM": rope_dim,
            "ROPE_DIM_PADDED": padded_head_dim(rope_dim),
            "KV_BLOCK_SIZE": call.kv_cache.shape[1],
            "BLOCK_N": tile.block_n,
            "CAUSAL": call.causal,
            "ONE_LOOP": token_keys is not None or tile.block_m > ONE_LOOP_ROWS,
            "KIND": shape.kind,
            "NATIVE_FP8": has_native_e4m3(call.q.device),
            "CLEAR_PADDING": clear_padding,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
