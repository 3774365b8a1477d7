"""Launching the Triton kernel of attention over a window and compressed entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache.latent_cache import record_parts
from ..core.device import device_of
from ..core.ids import Ids, check_all_ids, check_sequences, checks_ids
from ..core.launch import Launch, strides
from ..core.operation import Run
from .call import CompressedCall
from .compressed_kernel import _compressed_attention_kernel
from .launches import checked_ids, clear, launches_of_tiles, own_plan
from .plan import AttentionPlan, outputs, plan_of_entries, reference_to


def bind(call: CompressedCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that computes calls of `paged_compressed_attention` like this one in the plan's step."""
    ids = checked_ids(call, call.kv_cache, window_left=call.sliding_window - 1, keys_at_once=1)
    entry_ids = None
    if checks_ids(call.q):
        entry_ids = call.entry_ids()
    if entry_ids is not None:
        check_sequences(entry_ids)
    if call.cos_sin_cache is not None:
        positions = Ids("seq_lens", call.seq_lens, 0, len(call.cos_sin_cache))
        check_all_ids("paged_compressed_attention", positions, by_triton=True)
    bound_plan, return_lse = reference_to(plan), call.return_lse
    launches = _launches(call, plan or own_plan(call, call.kv_cache))

    def run(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        entry_cache: torch.Tensor | None = None,
        *,
        block_table: torch.Tensor,
        entry_table: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        out: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        assert plan is bound_plan()
        if ids is not None:
            check_sequences(ids._replace(block_table=block_table))
            if entry_ids is not None and entry_table is not None:
                check_sequences(entry_ids._replace(block_table=entry_table))
        out, lse = outputs(q, q.shape[2], out, return_lse=return_lse)
        rows, entries = _parts(kv_cache), _parts(entry_cache)
        arguments = {
            "q_ptr": q,
            "latent_ptr": rows.codes,
            "rope_ptr": rows.rope,
            "scales_ptr": rows.scales,
            "entry_ptr": entries.codes,
            "entry_rope_ptr": entries.rope,
            "entry_scales_ptr": entries.scales,
            "out_ptr": out,
            "lse_ptr": lse,
            "block_table_ptr": block_table,
            "entry_table_ptr": entry_table,
            "sinks_ptr": None if sinks is None else sinks.contiguous(),
            "indices_ptr": indices,
            "cos_sin_ptr": cos_sin_cache,
        }
        for launch in launches:
            launch(arguments)
        if not launches:
            clear(out, lse)
        if lse is None:
            return out
        return out, lse

    return run


def _launches(call: CompressedCall, plan: AttentionPlan) -> list[Launch]:
    if not len(call.seq_lens):
        return []
    shape, entries = call.shape, call.entry_cache
    (tile,) = shape.tiles(device_of(call.q.device).arch, shape.group).values()
    rows, parts = _parts(call.kv_cache), _parts(entries)
    entry_block_size = pool_size = num_indices = rotary_dim = 0
    if entries is not None:
        entry_block_size, pool_size = entries.shape[1], call.pool_size
    if call.indices is not None:
        num_indices = call.indices.shape[1]
    if call.cos_sin_cache is not None:
        rotary_dim = call.cos_sin_cache.shape[1]
    token_plan, token_keys = plan_of_entries(
        plan,
        shape.num_tokens,
        sliding_window=call.sliding_window,
        block_n=tile.block_n,
        pool_size=pool_size,
        num_indices=num_indices,
    )
    arguments = {
        "token_keys_ptr": token_keys,
        "num_indices": num_indices,
        "sliding_window": call.sliding_window,
        **strides("block slot", latent=rows.codes, rope=rows.rope, scales=rows.scales),
        **strides("block slot", entry=parts.codes, entry_rope=parts.rope, entry_scales=parts.scales),
        **strides("seq", entry_table=call.entry_table),
        **strides("token", indices=call.indices),
        **strides("position", cos_sin=call.cos_sin_cache),
        "ROTARY_DIM": rotary_dim,
        "KV_BLOCK_SIZE": call.kv_cache.shape[1],
        "ENTRY_BLOCK_SIZE": entry_block_size,
        "POOL_SIZE": pool_size,
        "KIND": shape.kind,
    }
    return launches_of_tiles(_compressed_attention_kernel, call, shape, token_plan, arguments, lambda _: ({}, {}))


class _Parts(NamedTuple):
    """Views of a cache as the kernel takes them: its numbers, or codes, bfloat16 numbers and scales of records."""

    codes: torch.Tensor | None
    rope: torch.Tensor | None
    scales: torch.Tensor | None


def _parts(cache: torch.Tensor | None) -> _Parts:
    if cache is None or cache.dtype != torch.uint8:
        return _Parts(cache, None, None)
    return _Parts(*record_parts(cache))
