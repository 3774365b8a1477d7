"""Attention over a cache whose positions vLLM deals out to the ranks of a group (decode context parallelism).

Each rank attends with the queries of all ranks to the positions that it holds, and their results are joined by their
log-sum-exps; the step's own keys, which every rank is given whole, are joined to that. All ranks have the same KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from paged.kernels.attention.merge_attn_states import merge_attn_states
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.attention.plan import AttentionPlan


@dataclass(frozen=True)
class ContextShard:
    """What one rank makes of a step, for the layers of a group.

    context: the plan over what it holds of the positions before the step. own: the plan over the step's own keys, in
    blocks of one; own_table: int32 [num_seqs, longest query], where they lie among the step's rows.
    """

    context: AttentionPlan
    own: AttentionPlan
    own_table: torch.Tensor

    @classmethod
    def of(cls, common: Any, world_size: int, rank: int, interleave_size: int) -> ContextShard:
        """common: vLLM's metadata of the step. interleave_size: so many positions in a row are one rank's."""
        offsets, longest = common.query_start_loc, common.max_query_len
        query_lens = offsets.diff()
        context_lens = get_dcp_local_seq_lens(common.seq_lens - query_lens, world_size, rank, interleave_size)
        return cls(
            AttentionPlan(offsets, context_lens, max_seqlen_q=longest, max_seqlen_k=common.max_seq_len),
            AttentionPlan(offsets, query_lens, max_seqlen_q=longest, max_seqlen_k=longest),
            offsets[:-1, None] + torch.arange(longest, dtype=torch.int32, device=offsets.device),
        )


def attend(
    shard: ContextShard,
    query: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    *,
    causal: bool | torch.Tensor,
    sinks: torch.Tensor | None,
    scales: dict[str, Any],
    **options: Any,
) -> torch.Tensor:
    """Attention of this rank's heads, float32 [num_tokens, num_q_heads, v_head_dim]; every rank of the group calls it.

    Args:
        query: [num_tokens, num_q_heads, head_dim], of this rank's heads.
        new: the step's keys [num_tokens, num_kv_heads, head_dim] and values.
        caches: as `paged_attention` takes them; block_table: of them.
        scales: k_scale and v_scale, of the caches alone. options: of both attentions.
    """
    group, num_heads = get_dcp_group(), query.shape[1]

    def over(plan: AttentionPlan, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> Any:
        return paged_attention(
            rows, k, v, cu_seqlens_q=plan.cu_seqlens_q, seq_lens=plan.seq_lens, max_seqlen_q=plan.max_seqlen_q,
            plan=plan, return_lse=True, **named, **options,
        )  # fmt: skip

    queries = group.all_gather(query.contiguous(), dim=1)
    out, lse = over(shard.context, queries, *caches, block_table=block_table, causal=False, **scales)
    lses = group.all_gather(lse, dim=0).unflatten(0, (group.world_size, -1))
    total = lses.logsumexp(0)
    weight = (lse - total).exp().nan_to_num()  # of a row that no rank has a key for, 0
    out = group.reduce_scatter(out.float() * weight.T.unsqueeze(-1), dim=1)
    mine = slice(group.rank_in_group * num_heads, (group.rank_in_group + 1) * num_heads)
    key, value = (x.unsqueeze(1) for x in new)
    own, own_lse = over(shard.own, query, key, value, block_table=shard.own_table, causal=causal, sinks=sinks)
    return merge_attn_states(out, total[mine].contiguous(), own.float(), own_lse)[0]
