"""The indexer of sparse attention: it chooses the keys that each query attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.common.attention.latent_cache import write_index_keys
from paged.kernels.common.operation import Bound
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.kernels.mla.choose_keys import choose_keys
from paged.models.layers.config import IndexConfig, NormConfig
from paged.models.layers.decoder import LayerNorm, Linear, empty_parameter
from paged.models.loading.weights import WeightSlots

if TYPE_CHECKING:
    from paged.metadata import AttentionMetadata, OutputRows


class Indexer(nn.Module):
    """The lightning indexer (DeepSeek-AI, "DeepSeek-V3.2", 2025): small heads that score every key of a query.

    Its keys, one a token, have a cache group of their own. The published one multiplies queries and keys by a Hadamard
    matrix before it rounds both to e4m3. That changes no product but their rounding; here only cached keys are rounded.
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

    def bind(self, k_cache: torch.Tensor, table: int, cos_sin_cache: torch.Tensor) -> None:
        """Give it the cache of its keys, the index of their block table, and the layer's rotary table."""
        keys = k_cache.squeeze(2)
        is_plain = keys.shape[2] == self.config.head_dim
        self.key_cache, self.table, self.cos_sin_cache = (
            keys if is_plain else keys.view(torch.uint8),
            table,
            cos_sin_cache,
        )

    def write(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Write the keys of all tokens to the cache."""
        keys = self.k_norm(self.wk(hidden))[0].unsqueeze(1)
        self.rotate(positions, keys, None, self.cos_sin_cache, interleaved=self.config.interleaved)
        write_index_keys(keys.squeeze(1), self.key_cache, metadata.table(self.table)[1])

    def choose(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        queries: AttentionMetadata | OutputRows,
    ) -> torch.Tensor | None:
        """Return the keys of each row, int32 [num_rows, top_k]; None if no sequence of the step can have more.

        hidden, q_latent, positions: of the rows of `queries`. q_latent: the queries' latent after its norm.
        """
        config, block_table = self.config, metadata.table(self.table)[0]
        if block_table.shape[1] * self.key_cache.shape[1] <= config.top_k:
            return None
        q = self.wq_b(q_latent).unflatten(-1, (config.num_heads, config.head_dim))
        self.rotate(positions, q, None, self.cos_sin_cache, interleaved=config.interleaved)
        weights = functional.linear(hidden, self.weights_proj).float() * (config.num_heads * config.head_dim) ** -0.5
        return self.choose_keys(
            q,
            weights,
            self.key_cache,
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            top_k=config.top_k,
            plan=queries.plan,
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = (
            self.wq_b.weight_slots(prefix) | self.wk.weight_slots(prefix) | self.k_norm.weight_slots(f"{prefix}.k_norm")
        )
        return slots | {f"{prefix}.weights_proj.weight": self.weights_proj}
