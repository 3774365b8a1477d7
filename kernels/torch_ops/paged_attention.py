"""Paged attention in PyTorch: gathered keys, and one product for all sequences of similar shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paged.kernels.attention_call import AttentionCall
from paged.kernels.torch_ops.attention_batches import SequenceBatch, sequence_batches

if TYPE_CHECKING:
    from paged.kernels.attention_plan import AttentionPlan


def paged_attention(call: AttentionCall, plan: AttentionPlan | None) -> None:
    """Twin of `kernels.paged_attention.paged_attention`: fills `call.out` and, where given, `call.lse`."""
    q, out, lse = call.q, call.out, call.lse
    num_q_heads, num_kv_heads = q.shape[1], call.k_cache.shape[2]
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
        if call.sinks is not None:
            lse[:, : int(call.cu_seqlens_q[-1])] = call.sinks.float()[:, None]
    # Scores that nobody asks for, PyTorch's fused attention never writes: a third of the time for a long chunk.
    is_fused = lse is None and call.sinks is None and call.alibi_slopes is None and call.softcap == 0
    for batch in sequence_batches(call, plan, scores_per_pair=1 if is_fused else num_q_heads):
        num_seqs, _, num_queries, _ = batch.visible.shape
        keys, values = (_gather(cache, batch) for cache in (call.k_cache, call.v_cache))
        queries = q.index_select(0, batch.rows).float()
        if call.k_scale is not None:
            queries = (queries.unflatten(1, (num_kv_heads, -1)) * call.k_scale.reshape(-1, 1, 1)).flatten(1, 2)
        queries = queries.view(num_seqs, num_queries, *q.shape[1:]).transpose(1, 2)  # [n, Hq, Q, D]
        if is_fused:
            attended = _fused(call, batch, queries, keys, values)
        else:
            attended, row_lse = _with_scores(call, batch, queries, keys, values)
            if lse is not None:
                lse[:, batch.rows] = row_lse.transpose(0, 1).flatten(1)
        rows = attended.transpose(1, 2).reshape(-1, *q.shape[1:])  # [n * Q, Hq, D]
        if call.v_scale is not None:
            rows = (rows.unflatten(1, (num_kv_heads, -1)) * call.v_scale.reshape(-1, 1, 1)).flatten(1, 2)
        out.index_copy_(0, batch.rows, rows.to(out.dtype))
        if batch.blind_rows is not None:
            out.index_fill_(0, batch.blind_rows, 0.0)


def _gather(cache: torch.Tensor, batch: SequenceBatch) -> torch.Tensor:
    """float32 [n, Hkv, L, D]."""
    slots, block_size = batch.slots, cache.shape[1]
    # Whole rows of a contiguous cache copy seven times as fast as those that are found by two indices.
    is_flat = cache.is_contiguous()
    rows = cache.flatten(0, 1).index_select(0, slots) if is_flat else cache[slots // block_size, slots % block_size]
    return rows.view(batch.visible.shape[0], -1, *cache.shape[2:]).transpose(1, 2).float()


def _fused(
    call: AttentionCall, batch: SequenceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """[n, Hq, Q, D]; NaN or anything where a row sees no key."""
    if queries.shape[2] == 1:  # the heads of a group as queries of one head: 15 % faster for decodes
        grouped = queries.view(len(queries), keys.shape[1], -1, queries.shape[3])
        attended = torch.nn.functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=batch.bias, scale=call.softmax_scale
        )
        return attended.view(queries.shape)
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=batch.bias, scale=call.softmax_scale, enable_gqa=True
    )


def _with_scores(
    call: AttentionCall, batch: SequenceBatch, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, Hq, Q, D] and the log-sum-exp [n, Hq, Q]."""
    num_kv_heads, num_queries = keys.shape[1], queries.shape[2]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [n, Hkv, G * Q, D]
    scores = (grouped @ keys.transpose(-1, -2)).mul_(call.softmax_scale)
    scores = scores.unflatten(2, (-1, num_queries)).flatten(1, 2)  # [n, Hq, Q, L]
    if call.softcap > 0:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.alibi_slopes is not None:
        scores -= call.alibi_slopes.float()[:, None, None] * batch.distance()
    scores.masked_fill_(~batch.visible, -math.inf)
    row_lse = torch.logsumexp(scores, -1, keepdim=True)
    if call.sinks is not None:
        row_lse = torch.logaddexp(row_lse, call.sinks.float()[:, None, None])
    weights = scores.sub_(row_lse.clamp(min=torch.finfo(torch.float32).min)).exp_()
    attended = weights.unflatten(1, (num_kv_heads, -1)).flatten(2, 3) @ values
    return attended.unflatten(2, (-1, num_queries)).flatten(1, 2), row_lse.squeeze(-1)
