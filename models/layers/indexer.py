"""Indexers of sparse attention: they choose the keys, or the blocks of keys, that each query attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.attention.choose_blocks import choose_blocks
from paged.kernels.attention.choose_keys import choose_keys
from paged.kernels.cache.latent_cache import write_index_keys
from paged.kernels.cache.write_pooled_entries import write_pooled_entries
from paged.kernels.core.operation import Bound
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.layers.attention_config import AttentionConfig, BlockIndexConfig, IndexConfig
from paged.models.layers.attention_options import LogPositionGrowth
from paged.models.layers.config import DecoderConfig, NormConfig
from paged.models.layers.modules import LayerNorm, Linear, RmsNorm, empty_parameter
from paged.models.loading.weights import Destinations, join_destinations

if TYPE_CHECKING:
    from paged.step.metadata import AttentionMetadata, OutputRows


class CachedKeys(nn.Module):
    """An indexer's keys: one for each token, in a cache group of the indexer alone."""

    key_cache: torch.Tensor
    table: int
    cos_sin_cache: torch.Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def set_cache(self, k_cache: torch.Tensor, table: int, cos_sin_cache: torch.Tensor) -> None:
        """Give the indexer the cache of its keys, the index of their block table, and the layer's rotary table."""
        self.key_cache, self.table, self.cos_sin_cache = self._as_keys(k_cache.squeeze(2)), table, cos_sin_cache

    def _as_keys(self, cache: torch.Tensor) -> torch.Tensor:
        """Return a cache [num_blocks, keys of a block, size] in the form of `choose_keys`."""
        if cache.shape[2] == self.head_dim:
            return cache
        return cache.view(torch.uint8)  # e4m3 keys and their scales


class PooledKeys(CachedKeys):
    """An indexer's keys: one for each pool of consecutive tokens, and rows of the tokens of open pools.

    key_cache: keys of pools, which lie beside the layer's keys or latents. row_cache: a row of each token,
    [num_blocks, block_size, elements], in a table of its own.
    """

    row_cache: torch.Tensor
    row_table: int

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim)
        self.write_pooled_entries = Bound(write_pooled_entries, by=2)

    def set_pools(
        self, entries: torch.Tensor, table: int, row_cache: torch.Tensor, row_table: int, cos_sin_cache: torch.Tensor
    ) -> None:
        """Give the indexer the caches of pools and of tokens, the indices of their tables, and the rotary table."""
        self.key_cache, self.table, self.row_table = self._as_keys(entries), table, row_table
        self.row_cache, self.cos_sin_cache = row_cache.squeeze(2), cos_sin_cache
        if self.row_cache.dtype.itemsize == 1:
            self.row_cache = self.row_cache.view(torch.bfloat16)

    def write_rows(self, rows: torch.Tensor, metadata: AttentionMetadata, pool_size: int, **finish: Any) -> None:
        """Write the rows of all tokens, then the keys of the pools that they close.

        rows: [T, elements]. finish: arguments of `write_pooled_entries`.
        """
        _, row_slots = metadata.table(self.row_table)
        _, entry_slots = metadata.table(self.table)
        write_index_keys(rows.to(self.row_cache.dtype), self.row_cache, row_slots)
        self.write_pooled_entries(self.row_cache, self.key_cache, row_slots, entry_slots, pool_size=pool_size, **finish)


class Indexer(CachedKeys):
    """The lightning indexer (DeepSeek-AI, "DeepSeek-V3.2", 2025): small heads that score every key of a query.

    The published indexer multiplies queries and keys by a Hadamard matrix and rounds both to e4m3. The matrix changes
    only the rounding of the products, so this indexer omits it, and rounds cached keys alone.
    """

    def __init__(self, hidden_size: int, q_rank: int, config: IndexConfig) -> None:
        super().__init__(config.head_dim)
        self.config = config
        self.wq_b = Linear(q_rank, {"wq_b": config.num_heads * config.head_dim})
        self.wk = Linear(hidden_size, {"wk": config.head_dim})
        self.k_norm = LayerNorm(config.head_dim, NormConfig(eps=config.eps, bias=True))
        self.weights_proj = empty_parameter(config.num_heads, hidden_size)  # never packed
        self.rotate, self.choose_keys = Bound(rotary_embedding, by=1), Bound(choose_keys)

    def forward(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor | None:
        """Write the keys of all tokens; return the keys that each row attends to, int32 [R, columns].

        Return None if no sequence of the step can have more than top_k keys.

        q_latent: the queries' latent after its norm, [T, q_rank]. R is T, or the number of rows in `outputs`.
        """
        config = self.config
        self._write(hidden, positions, metadata)
        block_table, _ = metadata.table(self.table)
        if block_table.shape[1] * self.key_cache.shape[1] * config.pool_size <= config.top_k:
            return None
        queries: AttentionMetadata | OutputRows = metadata
        if outputs is not None:
            queries = outputs
            hidden, q_latent, positions = hidden[outputs.rows], q_latent[outputs.rows], positions[outputs.rows]
        q = self._queries(q_latent, positions)
        weights = functional.linear(hidden, self.weights_proj).float() * (config.num_heads * config.head_dim) ** -0.5
        return self._choose(q, weights, block_table, metadata.seq_lens, queries)

    def _write(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Write the keys of all tokens. hidden: [T, hidden_size]."""
        keys = self.k_norm(self.wk(hidden))[0]  # [T, head_dim]
        self._rotate(keys.unsqueeze(1), positions)
        write_index_keys(keys, self.key_cache, metadata.table(self.table)[1])

    def _queries(self, q_latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rotated queries, [R, H, head_dim]."""
        q: torch.Tensor = self.wq_b(q_latent).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        self._rotate(q, positions)
        return q

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate heads in place. heads: [tokens, heads, head_dim]."""
        if self.config.rotates_last:
            heads = heads[..., self.head_dim - self.cos_sin_cache.shape[1] :]
        self.rotate(positions, heads, None, self.cos_sin_cache, interleaved=self.config.interleaved)

    def _choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        queries: AttentionMetadata | OutputRows,
    ) -> torch.Tensor:
        """Return the best keys of each row. q: [R, H, head_dim]. weights: float32 [R, H]."""
        return self.choose_keys(
            q,
            weights,
            self.key_cache,
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=seq_lens,
            top_k=self.config.top_k,
            plan=queries.plan,
        )

    def destinations(self, prefix: str) -> Destinations:
        weights = {"weights_proj.weight": self.weights_proj}
        return join_destinations(prefix, self.wq_b, self.wk, k_norm=self.k_norm, **weights)


class HiddenIndexer(Indexer):
    """The indexer of Mistral Large 4 (Mistral AI, 2026): queries come from a layer norm of the hidden state.

    They grow with the position, see `LogPositionGrowth`. The caller gives the hidden state for `q_latent`.
    """

    def __init__(self, hidden_size: int, q_rank: int, config: IndexConfig) -> None:
        super().__init__(hidden_size, q_rank, config)
        self.q_input_norm = LayerNorm(hidden_size, NormConfig(eps=1e-6, bias=True))
        self.growth = LogPositionGrowth(config.num_heads)

    def _queries(self, q_latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed, _ = self.q_input_norm(q_latent)  # [R, hidden_size]
        q: torch.Tensor = self.growth(super()._queries(normed, positions), positions)
        return q

    def destinations(self, prefix: str) -> Destinations:
        parts = join_destinations(prefix, q_input_norm=self.q_input_norm, softmax_scaling=self.growth)
        return super().destinations(prefix) | parts


class PooledIndexer(Indexer, PooledKeys):
    """The indexer of GLM-5.3 (Z.ai, 2026): it chooses pools of consecutive tokens, whose keys do not rotate.

    A pool's key is written when its last token is; see `write_pooled_entries` for the formula. A query attends to all
    tokens of the best pools and to its own pool as far as that is open.

    A token's row is its key and gate, 2 * head_dim elements.
    """

    def __init__(self, hidden_size: int, q_rank: int, config: IndexConfig) -> None:
        super().__init__(hidden_size, q_rank, config)
        self.gate = empty_parameter(config.head_dim, hidden_size)  # never packed
        self.position_bias = empty_parameter(config.pool_size, config.head_dim)
        self.choose_blocks = Bound(choose_blocks)

    def _write(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Write the rows of all tokens, then the keys of the pools that they close."""
        keys = self.k_norm(self.wk(hidden))[0]  # [T, head_dim]
        rows = torch.cat([keys, functional.linear(hidden, self.gate)], -1)  # [T, 2 * head_dim]
        self.write_rows(rows, metadata, self.config.pool_size, position_bias=self.position_bias)

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> None:
        """Leave heads as they are."""

    def _choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        queries: AttentionMetadata | OutputRows,
    ) -> torch.Tensor:
        """Return the tokens of the best pools and of the open pool, also those behind the query."""
        pool_size = self.config.pool_size
        pools = self.choose_blocks(
            q,
            self.key_cache,
            weights=weights,
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=seq_lens,
            top_k=self.config.top_k // pool_size,
            chosen_block_size=pool_size,
            pool_size=pool_size,
            local_blocks=0,
            plan=queries.plan,
        )  # [R, 1, pools]
        pools = pools.transpose(1, 2)  # [R, pools, 1]
        tokens = pools * pool_size + torch.arange(pool_size, dtype=torch.int32, device=pools.device)
        return torch.where(pools >= 0, tokens, -1).flatten(1)

    def destinations(self, prefix: str) -> Destinations:
        weights = {"index_kpool_compress_gate": self.gate, "index_kpool_compress_ape": self.position_bias}
        return super().destinations(prefix) | join_destinations(prefix, **weights)


class BlockIndexer(CachedKeys):
    """The indexer of MiniMax-M3 (MiniMax, 2026): each KV head chooses the blocks with the largest products q k."""

    norm_names = "q_norm", "k_norm"

    def __init__(self, config: DecoderConfig, layer: AttentionConfig, index: BlockIndexConfig) -> None:
        super().__init__(index.head_dim)
        self.config, self.num_heads, self.num_kv_heads = index, index.num_heads, layer.num_kv_heads
        if self.num_heads is None:
            self.num_heads = layer.num_kv_heads
        self.sizes = [self.num_heads * index.head_dim, index.head_dim]
        self.qk_proj = Linear(config.hidden_size, self._projected_sizes())
        self.q_norm, self.k_norm = RmsNorm(index.head_dim, config.norms), RmsNorm(index.head_dim, config.norms)
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.rotate, self.choose_blocks = Bound(rotary_embedding, by=1), Bound(choose_blocks)

    def _projected_sizes(self) -> dict[str, int]:
        """Return the output sizes of the projection by name."""
        return dict(zip(("q_proj", "k_proj"), self.sizes, strict=True))

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor | None:
        """Write the keys of all tokens; return the blocks of each row and KV head, int32 [R, Hkv, columns].

        Return None if no sequence of the step can have more than top_k blocks.
        """
        config = self.config
        block_table, _ = metadata.table(self.table)
        q, keys = self.qk_proj(hidden, metadata.lora).split_with_sizes(self.sizes, -1)
        self._write(keys, positions, metadata)
        if block_table.shape[1] * self.key_cache.shape[1] * config.pool_size <= config.top_k * config.block_size:
            return None
        queries: AttentionMetadata | OutputRows = metadata
        if outputs is not None:
            queries, q, positions = outputs, q[outputs.rows], positions[outputs.rows]
        q, _ = self.q_norm(q.unflatten(-1, (self.num_heads, config.head_dim)))  # [R, H, head_dim]
        self.rotate(positions, q, None, self.cos_sin_cache, interleaved=self.interleaved)
        blocks = self.choose_blocks(
            q,
            self.key_cache,
            weights=self._weights(q),
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            top_k=config.top_k,
            chosen_block_size=config.block_size,
            pool_size=config.pool_size,
            local_blocks=config.local_blocks,
            plan=queries.plan,
        )  # [R, lists, columns]
        return blocks.expand(-1, self.num_kv_heads, -1)

    def _write(self, keys: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Normalise, rotate and write the keys of all tokens, [T, head_dim]."""
        keys, _ = self.k_norm(keys)
        self.rotate(positions, keys.unsqueeze(1), None, self.cos_sin_cache, interleaved=self.interleaved)
        write_index_keys(keys, self.key_cache, metadata.table(self.table)[1])

    def _weights(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return the weights of heads that share one list, float32 [R, H]; None for a list of each head."""
        return None

    def destinations(self, prefix: str) -> Destinations:
        norms = dict(zip(self.norm_names, (self.q_norm, self.k_norm), strict=True))
        return join_destinations(prefix, self.qk_proj, **norms)


class MeanIndexer(BlockIndexer, PooledKeys):
    """The indexer of Qwen4-Exp (Qwen, 2026): all heads choose the same pools of consecutive tokens.

    A pool's key is the mean of its tokens' keys, normalised, and rotated at the pool's first position. It is written
    with the pool's last token. The score of a pool is sum_h max(q_h key, 0). A query attends to all
    tokens of the best pools, and to its own pool as far as that is open. A token's row is its key before the norm.
    """

    norm_names = "q_layernorm", "k_layernorm"

    def _projected_sizes(self) -> dict[str, int]:
        return {"index_qk_proj": sum(self.sizes)}

    def _write(self, keys: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Write the rows of all tokens and the keys of pools that close."""
        self.write_rows(
            keys,
            metadata,
            self.config.pool_size,
            norm_weight=self.k_norm.weight,
            eps=self.k_norm.eps,
            positions=positions,
            cos_sin_cache=self.cos_sin_cache,
            interleaved=self.interleaved,
        )

    def _weights(self, q: torch.Tensor) -> torch.Tensor:
        return torch.ones(q.shape[:2], device=q.device)
