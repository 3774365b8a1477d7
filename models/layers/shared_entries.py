"""A decoder layer's attention to a window, and to entries and choices that layers share (DeepSeek-V4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paged.kernels.attention.choose_blocks import choose_blocks
from paged.kernels.cache.write_pooled_entries import write_pooled_entries
from paged.kernels.core.operation import Bound
from paged.models.layers.attention_config import CompressedConfig
from paged.models.layers.compressed_attention import CompressedAttention, as_keys, as_rows
from paged.models.layers.config import DecoderConfig, NormConfig
from paged.models.layers.modules import Linear, RmsNorm
from paged.models.layers.open_rows import rows_of_step
from paged.models.loading.weights import Destinations, join_destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class LatentPool(nn.Module):
    """The entries of one layer, and index keys that are projections of them; later layers read both.

    The latent of a pool is the sum of its tokens' values, weighted for every channel by a softmax of gates, after an
    RMS norm. A pool of one token has no gate. The entry is the latent, and its index key is a normalised projection of
    the latent; both rotate at the pool's first position.

    Shapes: T tokens, D numbers of an entry.
    """

    entry_cache: torch.Tensor  # [num_blocks, entries of a block, D], or records
    key_cache: torch.Tensor
    cos_sin_cache: torch.Tensor
    offsets: torch.Tensor | None = None  # zeros: gates without learned offsets

    def __init__(self, head_dim: int, hidden_size: int, sizes: CompressedConfig, norms: NormConfig) -> None:
        super().__init__()
        self.head_dim, self.pool_size, self.eps = head_dim, sizes.pool_size, norms.eps
        parts = {"compressor.wkv": head_dim}
        if sizes.pool_size > 1:
            parts["compressor.wgate"] = head_dim
        self.row_proj = Linear(hidden_size, parts)
        self.norm = RmsNorm(head_dim, norms)
        self.key_proj: Linear | None = None
        if sizes.index is not None:
            self.key_proj = Linear(head_dim, {"indexer.wk": sizes.index.head_dim})
            self.key_norm = RmsNorm(sizes.index.head_dim, norms)
        # By the shape of a step's memory, as in `Pool`.
        self._pools: dict[torch.Size, Bound[..., None]] = {}
        self.write_entries, self.write_keys = Bound(write_pooled_entries), Bound(write_pooled_entries)

    def set_cache(self, entries: torch.Tensor, keys: torch.Tensor | None, cos_sin_cache: torch.Tensor) -> None:
        """Give the pool the caches of its entries and index keys, and the rotary table."""
        self.entry_cache, self.cos_sin_cache = entries, cos_sin_cache
        if keys is not None:
            self.key_cache = keys
        if self.pool_size > 1:
            self.offsets = torch.zeros(self.pool_size, self.head_dim, device=entries.device)

    def write(
        self,
        rows: torch.Tensor,
        row_slots: torch.Tensor,
        entry_slots: torch.Tensor,
        positions: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Write the entries and index keys of the pools that the step's tokens close.

        Args:
            rows: float32 [blocks, rows of a block, D or 2 * D], values and gates of these tokens and of those before.
            row_slots: int64 [T], slots of tokens in rows; entry_slots: in the cache of entries.
            dtype: of latents, which are rounded before they rotate.
        """
        size = self.pool_size
        tokens = torch.arange(len(positions), device=positions.device)
        latents = torch.zeros(len(positions), 1, self.head_dim, dtype=dtype, device=rows.device)  # [T, 1, D]
        pool = self._pools.setdefault(rows.shape, Bound(write_pooled_entries, by=2))
        pool(
            rows,
            latents,
            row_slots,
            tokens * size + positions % size,
            pool_size=size,
            position_bias=self.offsets,
            norm_weight=self.norm.weight,
            eps=self.eps,
        )
        is_closing = (entry_slots >= 0) & (positions % size == size - 1)
        slots = torch.where(is_closing, entry_slots // size, -1)
        rotation: dict[str, Any] = {
            "pool_size": 1,
            "positions": positions - positions % size,
            "cos_sin_cache": self.cos_sin_cache,
            "interleaved": True,
            "rotates_last": True,
        }
        self.write_entries(latents, self.entry_cache, tokens, slots, **rotation)
        if self.key_proj is not None:
            keys = self.key_proj(latents)  # [T, 1, index head_dim]
            self.write_keys(
                keys, self.key_cache, tokens, slots, norm_weight=self.key_norm.weight, eps=self.eps, **rotation
            )

    def destinations(self, prefix: str) -> Destinations:
        parts = {"compressor.norm": self.norm}
        if self.key_proj is not None:
            parts["indexer.k_norm"] = self.key_norm
        return join_destinations(prefix, self.row_proj, self.key_proj, **parts)


class SharedEntriesAttention(CompressedAttention):
    """Attention of DeepSeek-V4.1 (DeepSeek-AI, 2026) to a window and to entries that an earlier layer wrote.

    `EntrySharing` says which layer writes the entries, and which one chooses among them. An indexer may choose within
    blocks of entries alone, those with the highest scores of an earlier indexer.
    """

    entry_cache: torch.Tensor

    def _add_pools(self, config: DecoderConfig) -> None:
        layer, sizes = self.config, self.sizes
        assert sizes.sharing is not None
        self.sharing = sizes.sharing
        self.latent_pool: LatentPool | None = None
        if self.is_source:
            self.latent_pool = LatentPool(layer.head_dim, config.hidden_size, sizes, self.norms)
        self._add_indexer(config)
        self.choose_blocks = Bound(choose_blocks)

    def set_entries(self, entries: Sequence[torch.Tensor], entry_table: int) -> None:
        """Give the layer the entries that it reads, then their index keys if there are any, and their block table."""
        self.entry_cache, self.entry_table = as_rows(entries[0]), entry_table
        keys: torch.Tensor | None = None
        if len(entries) > 1:
            keys = as_keys(entries[1])
        if self.indexer is not None:
            assert keys is not None
            self.indexer.set_cache(keys, self.cos_sin_cache)
        if self.latent_pool is not None:
            self.latent_pool.set_cache(self.entry_cache, keys, self.cos_sin_cache)

    def _write_entries(
        self, hidden: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Write the entries of other layers too, if the layer is their source. Return its entries and their table."""
        entry_table, entry_slots = metadata.table(self.entry_table)
        if self.latent_pool is not None:
            rows = self.latent_pool.row_proj(hidden).float()  # [T, D or 2 * D]
            memory, row_slots = rows[:, None], torch.arange(len(rows), device=rows.device)
            if self.sizes.pool_size > 1:
                places = self._places(metadata)
                memory = rows_of_step(rows, places, self.open_rows, self.copy_slots, None, None)
                row_slots = places.step_slots
            self.latent_pool.write(memory, row_slots, entry_slots, positions, hidden.dtype)
        return self.entry_cache, entry_table

    def _choose(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        entry_table: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor | None:
        choices: dict[int, torch.Tensor | None] = metadata.plan.runs.setdefault("chosen entries", {})
        blocks: dict[int, torch.Tensor] = metadata.plan.runs.setdefault("candidate blocks", {})
        sharing, indexer = self.sharing, self.indexer
        if indexer is None:
            return _of_rows(choices[sharing.choice_of], outputs)
        choices[sharing.choice_of] = None
        if indexer.sees_all(entry_table):
            return None
        queries: AttentionMetadata | OutputRows = outputs or metadata
        q, weights = indexer.queries(hidden, q_latent, positions)
        step: dict[str, Any] = {
            "block_table": entry_table,
            "cu_seqlens_q": queries.cu_seqlens_q,
            "seq_lens": metadata.seq_lens,
            "plan": queries.plan,
        }
        source, size = sharing.candidates_of, sharing.candidate_block_size
        candidates: dict[str, Any] = {}
        if source == sharing.choice_of:
            chosen = self.choose_blocks(
                q,
                indexer.key_cache,
                weights=weights,
                top_k=sharing.candidate_blocks,
                chosen_block_size=size * self.sizes.pool_size,
                pool_size=self.sizes.pool_size,
                **step,
            )  # [R, 1, columns]
            blocks[source] = chosen[:, 0]
        elif source is not None:
            candidates = {"candidates": _of_rows(blocks[source], outputs), "candidate_size": size}
        choices[sharing.choice_of] = indexer.choose(q, weights, **step, **candidates)
        return choices[sharing.choice_of]

    def destinations(self, prefix: str) -> Destinations:
        return super().destinations(prefix) | join_destinations(prefix, self.latent_pool)


def _of_rows(indices: torch.Tensor | None, outputs: OutputRows | None) -> torch.Tensor | None:
    """Return the rows of `outputs` of what an earlier layer chose for all tokens."""
    if indices is None or outputs is None:
        return indices
    return indices[outputs.rows]
