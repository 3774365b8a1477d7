"""The indexer of sparse attention: it chooses the keys that each query attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.attention.choose_keys import choose_keys
from paged.kernels.cache.latent_cache import write_index_keys
from paged.kernels.core.operation import Bound
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.layers.config import IndexConfig, NormConfig
from paged.models.layers.decoder import LayerNorm, Linear, empty_parameter
from paged.models.loading.weights import Destinations

if TYPE_CHECKING:
    from paged.step.metadata import AttentionMetadata, OutputRows


class Indexer(nn.Module):
    """The lightning indexer (DeepSeek-AI, "DeepSeek-V3.2", 2025): small heads that score every key of a query.

    Each token has one index key, in a cache group of the indexer alone. The published indexer multiplies queries and
    keys by a Hadamard matrix and rounds both to e4m3. The matrix changes only the rounding of the products, so this
    indexer omits it, and rounds cached keys alone.
    """

    key_cache: torch.Tensor
    table: int
    cos_sin_cache: torch.Tensor

    def __init__(self, hidden_size: int, q_rank: int, config: IndexConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = Linear(q_rank, {"wq_b": config.num_heads * config.head_dim})
        self.wk = Linear(hidden_size, {"wk": config.head_dim})
        self.k_norm = LayerNorm(config.head_dim, NormConfig(eps=1e-6, bias=True))
        self.weights_proj = empty_parameter(config.num_heads, hidden_size)  # never packed
        self.rotate, self.choose_keys = Bound(rotary_embedding, by=1), Bound(choose_keys, step="plan")

    def set_cache(self, k_cache: torch.Tensor, table: int, cos_sin_cache: torch.Tensor) -> None:
        """Give the indexer the cache of its keys, the index of their block table, and the layer's rotary table."""
        self.table, self.cos_sin_cache = table, cos_sin_cache
        self.key_cache = k_cache.squeeze(2)
        if self.key_cache.shape[2] != self.config.head_dim:  # the cache holds e4m3 keys and their scales
            self.key_cache = self.key_cache.view(torch.uint8)

    def forward(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor | None:
        """Write the keys of all tokens; return the keys that each row attends to, int32 [R, top_k].

        Return None if no sequence of the step can have more than top_k keys.

        q_latent: the queries' latent after its norm, [T, q_rank]. R is T, or the number of rows in `outputs`.
        """
        config = self.config
        block_table, slot_mapping = metadata.table(self.table)
        keys = self.k_norm(self.wk(hidden))[0]  # [T, head_dim]
        self.rotate(positions, keys.unsqueeze(1), None, self.cos_sin_cache, interleaved=config.interleaved)
        write_index_keys(keys, self.key_cache, slot_mapping)
        if block_table.shape[1] * self.key_cache.shape[1] <= config.top_k:
            return None
        queries: AttentionMetadata | OutputRows = metadata
        if outputs is not None:
            queries = outputs
            hidden, q_latent, positions = hidden[outputs.rows], q_latent[outputs.rows], positions[outputs.rows]
        q = self.wq_b(q_latent).unflatten(-1, (config.num_heads, config.head_dim))  # [R, H, head_dim]
        self.rotate(positions, q, None, self.cos_sin_cache, interleaved=config.interleaved)
        weights = functional.linear(hidden, self.weights_proj).float() * (config.num_heads * config.head_dim) ** -0.5
        return self.choose_keys(
            q,
            weights,  # [R, H]
            self.key_cache,
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            top_k=config.top_k,
            plan=queries.plan,
        )

    def destinations(self, prefix: str) -> Destinations:
        destinations = self.wq_b.destinations(prefix) | self.wk.destinations(prefix)
        destinations |= self.k_norm.destinations(f"{prefix}.k_norm")
        destinations[f"{prefix}.weights_proj.weight"] = self.weights_proj
        return destinations
