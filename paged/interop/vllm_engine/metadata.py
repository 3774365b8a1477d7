"""Metadata of a step for vLLM's attention layers, also with decode context parallelism; imports vLLM.

With decode context parallelism, vLLM distributes the cache's positions over the ranks of a group. Each rank attends
with the queries of all ranks to its own positions. The results are merged by their log-sum-exps, then merged with
attention to the step's own keys, which every rank has. All ranks have the same KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from paged.errors import UnsupportedError
from paged.kernels.attention.merge_attn_states import merge_attn_states
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.core.device import is_capturing


@dataclass(frozen=True)
class PackedKeys:
    """Keys of several sequences in consecutive rows of one tensor, attended to as blocks of one token.

    table: int32 [num_seqs, most keys of a sequence], rows.
    """

    plan: AttentionPlan
    table: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens_q: torch.Tensor, max_q_len: int, cu_seqlens_k: torch.Tensor, max_k_len: int) -> PackedKeys:
        """Make them from int32 [num_seqs + 1] offsets of queries and keys."""
        plan = AttentionPlan(cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q=max_q_len, max_seqlen_k=max_k_len)
        positions = torch.arange(max_k_len, dtype=torch.int32, device=cu_seqlens_k.device)
        return cls(plan, cu_seqlens_k[:-1, None] + positions)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """Run `paged_attention`. k: [num_keys, num_kv_heads, head_dim]. v: [num_keys, num_kv_heads, v_head_dim]."""
        k_cache, v_cache = k.unsqueeze(1), v.unsqueeze(1)
        return attend_planned(self.plan, q, k_cache, v_cache, block_table=self.table, **options)


@dataclass(frozen=True)
class ContextShard:
    """One rank's part of a step, for the layers of a group.

    context: plan for the rank's positions before the step. new_keys: the step's own.
    """

    context: AttentionPlan
    new_keys: PackedKeys

    @classmethod
    def of(cls, common: Any, world_size: int, rank: int, interleave_size: int) -> ContextShard:
        """Make the part from vLLM's metadata. interleave_size: number of consecutive positions on one rank."""
        offsets, longest = common.query_start_loc, common.max_query_len
        query_lens = offsets.diff()
        context_lens = get_dcp_local_seq_lens(common.seq_lens - query_lens, world_size, rank, interleave_size)
        return cls(
            AttentionPlan(offsets, context_lens, max_seqlen_q=longest, max_seqlen_k=common.max_seq_len),
            PackedKeys.of(offsets, longest, offsets, longest),
        )


@dataclass
class PagedMetadata(AttentionMetadata):
    """Metadata of a step for the layers of one group. Field names follow vLLM's backends, because connectors read them.

    Attributes:
        query_start_loc: int32 [num_seqs + 1].
        seq_lens: int32 [num_seqs].
        block_table: int32 [num_seqs, max_blocks_per_seq].
        slot_mapping: int64 [num_tokens].
        num_actual_tokens, max_query_len, max_seq_len: upper bounds known to the host.
        causal: bool, or one flag for each sequence.
        shard: this rank's part if the cache is distributed over ranks, else None.
        plans: plan by whether a CUDA graph is being captured.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    shard: ContextShard | None = None
    plans: dict[bool, tuple[AttentionPlan, bool | torch.Tensor]] = field(default_factory=dict)

    def plan(self) -> tuple[AttentionPlan, bool | torch.Tensor]:
        """Return the step's plan and causality for `paged_attention`, shared by the layers of the step.

        A captured graph must split the batch again in every replay. Therefore its first layer makes a new plan, even if
        the same metadata served a warm-up.
        """
        capturing = is_capturing(self.seq_lens)
        if capturing not in self.plans:
            causal = self.causal
            if isinstance(causal, torch.Tensor):
                causal = causal.bool()
            lengths = {"max_seqlen_q": self.max_query_len, "max_seqlen_k": self.max_seq_len}
            self.plans[capturing] = AttentionPlan(self.query_start_loc, self.seq_lens, **lengths), causal
        return self.plans[capturing]


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Makes a step's metadata from vLLM's without a copy or launch."""

    # Always supported, because work lists are made on the device, and launch sizes are upper bounds for every replay.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update = True
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        ranks, rank = get_dcp_world_size_and_rank(getattr(kv_cache_spec, "dcp_sharded", True))
        self.sharding = (ranks, rank, vllm_config.parallel_config.cp_kv_cache_interleave_size) if ranks > 1 else None
        self.supports_draft_decode_metadata_update = self.sharding is None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return NEVER if the cache is distributed over ranks, because the host counts positions in every step."""
        is_whole = vllm_config.parallel_config.decode_context_parallel_size == 1
        return cls._cudagraph_support if is_whole else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Make the metadata from vLLM's arguments. common_prefix_len is always 0, and fast_build has no effect.

        Raises:
            UnsupportedError: tokens see later tokens (images of a prefix LM).
        """
        common = common_attn_metadata
        if common.mm_req_doc_ranges is not None:
            raise UnsupportedError("mm_req_doc_ranges: attention here takes only None")
        shard = None
        if self.sharding is not None:
            shard = ContextShard.of(common, *self.sharding)
        return PagedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor[: common.num_reqs],
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            shard=shard,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedMetadata:
        """Run `build` with lengths of 1, because a warm-up at the model's longest length takes long.

        The tensor of lengths belongs to vLLM, which fills it again before every replay.
        """
        metadata = self.build(0, common_attn_metadata)
        metadata.seq_lens.fill_(1)
        return metadata

    def update_block_table(
        self, metadata: PagedMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PagedMetadata:
        """Return the same batch with another group's blocks, sharing the plan."""
        return replace(metadata, block_table=blk_table[: metadata.block_table.shape[0]], slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: PagedMetadata) -> None:
        """Drop the plans after lengths changed in place. The next layer makes a new plan, also within a graph."""
        metadata.plans.clear()


def attend_shard(
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
    """Return attention of this rank's heads, float32 [num_tokens, num_q_heads, v_head_dim].

    All ranks of the group call it.

    Args:
        query: [num_tokens, num_q_heads, head_dim], this rank's heads.
        new: the step's keys [num_tokens, num_kv_heads, head_dim] and values.
        caches, block_table: arguments of `paged_attention`.
        scales: k_scale and v_scale of the caches.
        options: other arguments of both attention calls.
    """
    group, num_heads = get_dcp_group(), query.shape[1]
    options["return_lse"] = True
    queries = group.all_gather(query.contiguous(), dim=1)
    out, lse = attend_planned(
        shard.context, queries, *caches, block_table=block_table, causal=False, **scales, **options
    )
    lses = group.all_gather(lse, dim=0).unflatten(0, (group.world_size, -1))
    total = lses.logsumexp(0)
    weight = (lse - total).exp().nan_to_num()  # 0 if no rank has a key for the row
    out = group.reduce_scatter(out.float() * weight.T.unsqueeze(-1), dim=1)
    mine = slice(group.rank_in_group * num_heads, (group.rank_in_group + 1) * num_heads)
    new_out, new_lse = shard.new_keys.attend(query, *new, causal=causal, sinks=sinks, **options)
    return merge_attn_states(out, total[mine].contiguous(), new_out.float(), new_lse)[0]


def attend_planned(plan: AttentionPlan, q: torch.Tensor, *caches: torch.Tensor, **options: Any) -> Any:
    """Run `paged_attention` with the lengths of a plan."""
    return paged_attention(
        q,
        *caches,
        cu_seqlens_q=plan.cu_seqlens_q,
        seq_lens=plan.seq_lens,
        max_seqlen_q=plan.max_seqlen_q,
        plan=plan,
        **options,
    )
