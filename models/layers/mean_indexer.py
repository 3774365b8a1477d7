"""An indexer whose keys are means of pools of tokens, for grouped-query attention to the best pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged.kernels.attention.choose_blocks import choose_blocks
from paged.kernels.core.operation import Bound
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.layers.config import AttentionConfig, BlockIndexConfig, DecoderConfig
from paged.models.layers.decoder import Linear, RmsNorm
from paged.models.layers.indexer import PooledKeys
from paged.models.loading.weights import Destinations, join_destinations

if TYPE_CHECKING:
    from paged.step.metadata import AttentionMetadata, OutputRows


class MeanIndexer(PooledKeys):
    """The indexer of Qwen4-Exp (Qwen, 2026): all heads choose the same pools of consecutive tokens.

    A pool's key is the mean of its tokens' keys, normalised, and rotated at the pool's first position. It is written
    with the pool's last token. The score of a pool is sum_h max(q_h key, 0). A query attends to all
    tokens of the best pools, and to its own pool as far as that is open. A token's row is its key before the norm.
    """

    def __init__(self, config: DecoderConfig, layer: AttentionConfig, index: BlockIndexConfig) -> None:
        super().__init__(index.head_dim)
        assert index.num_heads is not None
        self.config, self.num_heads, self.num_kv_heads = index, index.num_heads, layer.num_kv_heads
        self.sizes = [index.num_heads * index.head_dim, index.head_dim]
        self.qk_proj = Linear(config.hidden_size, {"index_qk_proj": sum(self.sizes)})
        self.q_norm, self.k_norm = RmsNorm(index.head_dim, config.norms), RmsNorm(index.head_dim, config.norms)
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.rotate, self.choose_blocks = Bound(rotary_embedding, by=1), Bound(choose_blocks, step="plan")

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor | None:
        """Write the rows of all tokens and the keys of pools that close; return the pools of each row.

        The pools are int32 [R, Hkv, top_k + 1], the same for all KV heads, or None if no sequence of the step can have
        more than top_k.
        """
        config = self.config
        block_table, _ = metadata.table(self.table)
        q, keys = self.qk_proj(hidden, metadata.lora).split_with_sizes(self.sizes, -1)
        self.write_rows(
            keys,
            metadata,
            config.pool_size,
            norm_weight=self.k_norm.weight,
            eps=self.k_norm.eps,
            positions=positions,
            cos_sin_cache=self.cos_sin_cache,
            interleaved=self.interleaved,
        )
        if block_table.shape[1] * self.key_cache.shape[1] <= config.top_k:
            return None
        queries: AttentionMetadata | OutputRows = metadata
        if outputs is not None:
            queries, q, positions = outputs, q[outputs.rows], positions[outputs.rows]
        q, _ = self.q_norm(q.unflatten(-1, (self.num_heads, config.head_dim)))  # [R, H, head_dim]
        self.rotate(positions, q, None, self.cos_sin_cache, interleaved=self.interleaved)
        pools = self.choose_blocks(
            q,
            self.key_cache,
            weights=torch.ones(q.shape[:2], device=q.device),
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            top_k=config.top_k,
            chosen_block_size=config.block_size,
            pool_size=config.pool_size,
            local_blocks=config.local_blocks,
            plan=queries.plan,
        )  # [R, 1, top_k + 1]
        return pools.expand(-1, self.num_kv_heads, -1)

    def destinations(self, prefix: str) -> Destinations:
        return join_destinations(prefix, self.qk_proj, q_layernorm=self.q_norm, k_layernorm=self.k_norm)
