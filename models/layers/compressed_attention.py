"""A decoder layer's attention to a window and to compressed entries of all earlier positions (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paged.cache.manager import PagedKvCacheManager
from paged.kernels.attention.choose_keys import choose_keys
from paged.kernels.attention.paged_compressed_attention import paged_compressed_attention
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.kernels.cache.write_pooled_entries import write_pooled_entries
from paged.kernels.core.operation import Bound
from paged.kernels.layers.rms_norm import rms_norm
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.layers.attention import HeldCaches
from paged.models.layers.attention_config import AttentionConfig, CompressedConfig
from paged.models.layers.compressed_cache import entries_layer, entries_source, entry_indices, open_layer
from paged.models.layers.config import DecoderConfig, NormConfig
from paged.models.layers.latent_attention import UpProjection
from paged.models.layers.modules import Linear, RmsNorm, empty_parameter
from paged.models.layers.open_rows import RowPlaces, SharedPlaces, keep_rows, rows_of_step
from paged.models.loading.weights import Destinations, join_destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class Pool(nn.Module):
    """Entries that each pool the positions of a closed pool, and the rows of open pools.

    A row has a token's values and gates. An entry is the sum of the pool's values, weighted for every channel by a
    softmax of gates and learned offsets, after an RMS norm and the rotation at the pool's first position. If pools
    overlap, values and gates have two halves: an entry takes the first half of the pool before, and its own second.
    """

    entry_cache: torch.Tensor  # [num_blocks, entries of a block, D] or a form of 8 bits
    cos_sin_cache: torch.Tensor

    def __init__(self, head_dim: int, sizes: CompressedConfig, norms: NormConfig) -> None:
        super().__init__()
        self.pool_size, self.overlaps = sizes.pool_size, sizes.overlaps
        self.width = 2 * head_dim if self.overlaps else head_dim
        self.position_bias = empty_parameter(sizes.pool_size, self.width)
        self.norm, self.eps = RmsNorm(head_dim, norms), norms.eps
        # By the shape of rows; each is bound once for a number of tokens.
        self._writes: dict[tuple[int, ...], Bound[..., None]] = {}

    def keep_float32(self) -> None:
        """Convert the offsets back to float32."""
        self.position_bias.data = self.position_bias.float()

    def write(
        self,
        rows: torch.Tensor,
        row_slots: torch.Tensor,
        entry_slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        row_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        in_rings: bool,
    ) -> None:
        """Write the entries of the pools that the step's tokens close.

        rows: float32 [blocks, rows of a block, 2 * width], values and gates of these tokens and of those before in
        their pools. The others are arguments of `write_pooled_entries`.
        """
        overlap: dict[str, torch.Tensor] = {}
        if self.overlaps:
            overlap = {"row_table": row_table, "cu_seqlens_q": cu_seqlens_q}
        write = self._writes.setdefault(rows.shape, Bound(write_pooled_entries, by=2))
        write(
            rows,
            self.entry_cache,
            row_slots,
            entry_slots,
            pool_size=self.pool_size,
            position_bias=self.position_bias,
            norm_weight=self.norm.weight,
            eps=self.eps,
            positions=positions,
            cos_sin_cache=self.cos_sin_cache,
            interleaved=True,
            rotates_last=True,
            in_rings=in_rings,
            **overlap,
        )

    def destinations(self, prefix: str) -> Destinations:
        return {f"{prefix}.ape": self.position_bias, **self.norm.destinations(f"{prefix}.norm")}


class EntryIndexer(nn.Module):
    """The lightning indexer over compressed keys: small heads that score every entry of a query.

    pool: the keys that the layer pools itself; None if they are projections of entries.

    Shapes: R rows, H heads of D numbers, as in `IndexConfig`.
    """

    key_cache: torch.Tensor  # [num_blocks, entries of a block, D], or its form of 8 bits
    cos_sin_cache: torch.Tensor

    def __init__(self, hidden_size: int, sizes: CompressedConfig, norms: NormConfig) -> None:
        super().__init__()
        assert sizes.index is not None
        self.config, self.rope_dim = sizes.index, sizes.rope_dim
        self.wq_b = Linear(sizes.q_rank, {"wq_b": self.config.num_heads * self.config.head_dim})
        self.weights_proj = empty_parameter(self.config.num_heads, hidden_size)  # never packed
        self.pool: Pool | None = None
        if sizes.overlaps:
            self.pool = Pool(self.config.head_dim, sizes, norms)
        sharing = sizes.sharing
        # Layers with and without candidates bind different calls.
        self.has_candidates = sharing is not None and sharing.candidates_of not in (None, sharing.choice_of)
        self.rotate, self.choose_keys = Bound(rotary_embedding, by=1), Bound(choose_keys)

    def set_cache(self, keys: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
        """Give the indexer the cache of its keys, and the rotary table."""
        self.key_cache, self.cos_sin_cache = keys, cos_sin_cache

    def sees_all(self, block_table: torch.Tensor) -> bool:
        """Return whether no sequence can have more than top_k entries. block_table: of the entries."""
        return block_table.shape[1] * self.key_cache.shape[1] <= self.config.top_k

    def queries(
        self, hidden: torch.Tensor, q_latent: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated heads of rows, [R, H, D], and their weights, float32 [R, H].

        hidden, q_latent: of the rows, [R, hidden_size] and [R, q_rank].
        """
        config = self.config
        q = self.wq_b(q_latent).unflatten(-1, (config.num_heads, config.head_dim))  # [R, H, D]
        rotated = q[..., config.head_dim - self.rope_dim :]
        self.rotate(positions, rotated, None, self.cos_sin_cache, interleaved=True)
        weights = functional.linear(hidden, self.weights_proj).float() * (config.num_heads * config.head_dim) ** -0.5
        return q, weights

    def choose(self, q: torch.Tensor, weights: torch.Tensor, **step: Any) -> torch.Tensor:
        """Return the entries that each row attends to, int32 [R, columns]. step: other arguments of `choose_keys`."""
        top_k, pool_size = self.config.top_k, self.config.pool_size
        chosen: torch.Tensor = self.choose_keys(q, weights, self.key_cache, top_k=top_k, pool_size=pool_size, **step)
        return chosen

    def destinations(self, prefix: str) -> Destinations:
        parts = {"compressor": self.pool, "weights_proj.weight": self.weights_proj}
        return join_destinations(prefix, self.wq_b, **parts)


class CompressedAttention(nn.Module):
    """Attention of DeepSeek-V4 (DeepSeek-AI, 2026): all heads share one row a token, which is key and value.

    A query attends to the rows of a window, and to entries that each pool the positions of a closed pool: to all of
    them, or to those that an indexer chooses. The last numbers of a row are rotated. As they are values too, those of
    the output are rotated back by the query's position. The output projection first takes each group of heads alone.

    Shapes: T tokens, R rows that are returned, H heads of D numbers, G groups of heads.
    """

    kv_cache: torch.Tensor
    table: int
    cos_sin_cache: torch.Tensor
    k_scale: torch.Tensor | None = None  # unused: rows of 8 bits have scales of their own
    v_scale: torch.Tensor | None = None
    entry_table: int
    open_rows: torch.Tensor
    copy_slots: BlockCopy
    borders: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    places: SharedPlaces
    finds_places: bool
    attend: Callable[..., Any]
    group_weights: torch.Tensor
    ones: torch.Tensor

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = layer = config.attention[index]
        assert layer.compressed is not None
        self.sizes = sizes = layer.compressed
        self.norms = NormConfig(eps=config.norms.eps)
        heads_size = layer.num_heads * layer.head_dim
        self.down_proj = Linear(config.hidden_size, {"wq_a": sizes.q_rank, "wkv": layer.head_dim})
        self.q_norm, self.kv_norm = RmsNorm(sizes.q_rank, self.norms), RmsNorm(layer.head_dim, self.norms)
        self.q_b_proj = Linear(sizes.q_rank, {"wq_b": heads_size})
        self.group_proj = UpProjection(heads_size // sizes.num_groups, {"wo_a": sizes.num_groups * sizes.group_rank})
        self.o_proj = Linear(sizes.num_groups * sizes.group_rank, {"wo_b": config.hidden_size})
        self.sinks = empty_parameter(layer.num_heads)
        self.pool: Pool | None = None
        self.indexer: EntryIndexer | None = None
        self.pools: list[Pool] = []
        self.is_source = sizes.sharing is None or sizes.sharing.entries_of == index
        if sizes.pool_size:
            self._add_pools(config)
        self.rms_norm, self.rotate = Bound(rms_norm), Bound(rotary_embedding, by=1)
        self.write, self.attend = Bound(write_pooled_entries), Bound(paged_compressed_attention)

    def _add_pools(self, config: DecoderConfig) -> None:
        """Add what writes and chooses entries."""
        sizes = self.sizes
        self.pool = Pool(self.config.head_dim, sizes, self.norms)
        self.pools = [self.pool]
        parts = {"compressor.wkv": self.pool.width, "compressor.wgate": self.pool.width}
        self._add_indexer(config)
        if self.indexer is not None:
            assert self.indexer.pool is not None
            self.pools.append(self.indexer.pool)
            for name in ("wkv", "wgate"):
                parts[f"indexer.compressor.{name}"] = self.indexer.pool.width
        self.row_proj = Linear(config.hidden_size, parts)

    def _add_indexer(self, config: DecoderConfig) -> None:
        if self.sizes.index is not None:
            self.indexer = EntryIndexer(config.hidden_size, self.sizes, self.norms)

    def keep_float32(self) -> None:
        """Convert the sinks back to float32."""
        self.sinks.data = self.sinks.float()

    def set_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor, table: int, cos_sin_cache: torch.Tensor) -> None:
        """Give the layer the cache of its rows, the index of its block table in the metadata, and its rotary table."""
        self.kv_cache, self.table, self.cos_sin_cache = as_rows(k_cache.squeeze(2)), table, cos_sin_cache
        self.ones = torch.ones(self.config.head_dim, device=k_cache.device)

    def set_entries(self, entries: Sequence[torch.Tensor], entry_table: int) -> None:
        """Give the layer its entries, then their index keys if there are any, and the index of their block table.

        entries: [num_blocks, entries of a block, size].
        """
        assert self.pool is not None
        self.entry_table = entry_table
        self.pool.entry_cache, self.pool.cos_sin_cache = as_rows(entries[0]), self.cos_sin_cache
        if self.indexer is not None and self.indexer.pool is not None:
            keys = as_keys(entries[1])
            self.indexer.set_cache(keys, self.cos_sin_cache)
            self.indexer.pool.entry_cache, self.indexer.pool.cos_sin_cache = keys, self.cos_sin_cache

    def set_open_rows(
        self, open_rows: torch.Tensor, borders: torch.Tensor | None, places: SharedPlaces, *, finds_places: bool
    ) -> None:
        """Give the layer its rows of open pools.

        Args:
            open_rows: float32 [num_slots + 1, kept rows, row_size].
            borders: [num_blocks, 1, size] for pools that overlap.
            places: where rows lie in a step; with finds_places, the layer finds them.
        """
        self.open_rows = open_rows
        self.copy_slots = BlockCopy([open_rows], [open_rows])
        self.places, self.finds_places = places, finds_places
        if borders is None:
            return
        self.borders = borders.squeeze(1).view(torch.float32).unflatten(-1, (self.sizes.pool_size, -1))
        # Of values and gates, a pool takes the first halves of the pool before.
        columns: list[int] = []
        start = 0
        for other in self.pools:
            for _ in ("values", "gates"):
                columns += range(start, start + other.width // 2)
                start += other.width
        self.columns = torch.tensor(columns, device=open_rows.device)

    def derive_from_weights(self) -> None:
        """Read the groups' projections as matrices; call it when weights are at their final addresses."""
        self.group_weights = self.group_proj.matrices(self.sizes.num_groups)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """Return [T, hidden_size], or the rows of `outputs`; write rows of all tokens to the cache."""
        layer, sizes = self.config, self.sizes
        assert layer.window is not None
        block_table, slot_mapping = metadata.table(self.table)
        plain_size = layer.head_dim - sizes.rope_dim

        # Project, norm, rotate and write.
        q_latent, row = self.down_proj(hidden).split((sizes.q_rank, layer.head_dim), -1)
        q_latent, _ = self.q_norm(q_latent)  # [T, q_rank]
        q = self.q_b_proj(q_latent).unflatten(-1, (layer.num_heads, layer.head_dim))
        if sizes.norms_queries:
            q = self.rms_norm(q, self.ones, self.norms.eps)  # [T, H, D]
        self.rotate(positions, q[..., plain_size:], None, self.cos_sin_cache, interleaved=True)
        self._write_rows(row, positions, slot_mapping)

        # Write entries, choose some, and attend.
        entries, entry_table = self._write_entries(hidden, positions, metadata)
        queries: AttentionMetadata | OutputRows = metadata
        if outputs is not None:
            queries, q, q_latent = outputs, q[outputs.rows], q_latent[outputs.rows]  # [R, H, D], [R, q_rank]
            hidden, positions = hidden[outputs.rows], positions[outputs.rows]
        indices: torch.Tensor | None = None
        if entry_table is not None:
            indices = self._choose(hidden, q_latent, positions, entry_table, metadata, outputs)
        out = self.attend(
            q,
            self.kv_cache,
            entries,
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            max_seqlen_q=queries.max_seqlen_q,
            softmax_scale=layer.softmax_scale,
            sliding_window=layer.window,
            entry_table=entry_table,
            pool_size=max(sizes.pool_size, 1),
            indices=indices,
            sinks=self.sinks,
            cos_sin_cache=self.cos_sin_cache,
            plan=queries.plan,
        )

        # Project each group of heads, then all together.
        size = layer.num_heads * layer.head_dim // sizes.num_groups
        groups = out.view(len(out), sizes.num_groups, size).transpose(0, 1)  # [G, R, H / G * D]
        grouped = torch.bmm(groups, self.group_weights.mT).transpose(0, 1)  # [R, G, group_rank]
        projected: torch.Tensor = self.o_proj(grouped.flatten(1))  # [R, hidden_size]
        return projected

    def _write_entries(
        self, hidden: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Write entries, and keep rows of open pools. Return the cache of entries and its block table, or None."""
        if self.pool is None:
            return None, None
        entry_table, entry_slots = metadata.table(self.entry_table)
        places = self._places(metadata)
        rows = self.row_proj(hidden).float()  # [T, row_size]
        # Rows of short steps are pooled where they are kept: few sequences close a pool of 128 in a decode step.
        longest = metadata.max_seqlen_q + self.sizes.num_earlier_rows
        in_rings = not self.sizes.overlaps and longest <= self.open_rows.shape[1]
        slots, memory = places.step_slots, self.open_rows
        if in_rings:
            slots = places.kept_slots
            keep_rows(rows, places, self.open_rows, self.copy_slots)
        else:
            memory = rows_of_step(rows, places, self.open_rows, self.copy_slots, self.borders, self.columns)
        start = 0
        for pool in self.pools:
            end = start + 2 * pool.width
            pool.write(
                memory[..., start:end],
                slots,
                entry_slots,
                positions,
                row_table=places.table,
                cu_seqlens_q=metadata.cu_seqlens_q,
                in_rings=in_rings,
            )
            start = end
        return self.pool.entry_cache, entry_table

    def _places(self, metadata: AttentionMetadata) -> RowPlaces:
        """Return where rows of open pools lie in a step."""
        if self.finds_places:
            self.places.find(
                self.sizes,
                metadata,
                num_kept=self.open_rows.shape[1],
                block_size=self.kv_cache.shape[1],
                window_table=self.table,
                entry_table=self.entry_table,
            )
        return self.places.places

    def _choose(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        entry_table: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor | None:
        """Return the entries that each row attends to, int32 [R, columns]; None for all.

        hidden, q_latent, positions: of the rows.
        """
        indexer, queries = self.indexer, outputs or metadata
        if indexer is None or indexer.sees_all(entry_table):
            return None
        return indexer.choose(
            *indexer.queries(hidden, q_latent, positions),
            block_table=entry_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            plan=queries.plan,
        )

    def _write_rows(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Normalise, rotate and write rows [T, D]: each is the entry of a pool of one position."""
        self.write(
            rows[:, None],
            self.kv_cache,
            torch.arange(len(rows), device=rows.device),
            slots,
            pool_size=1,
            norm_weight=self.kv_norm.weight,
            eps=self.norms.eps,
            positions=positions,
            cos_sin_cache=self.cos_sin_cache,
            interleaved=True,
            rotates_last=True,
        )

    def destinations(self, prefix: str) -> Destinations:
        beside = [self.down_proj, self.q_b_proj, self.group_proj, self.o_proj]
        if self.pool is not None:
            beside.append(self.row_proj)
        return join_destinations(
            prefix,
            *beside,
            attn_sink=self.sinks,
            q_norm=self.q_norm,
            kv_norm=self.kv_norm,
            compressor=self.pool,
            indexer=self.indexer,
        )


def as_rows(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of numbers, or of records in 8 bits, as operations take it."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def as_keys(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of index keys in float32 or in 8 bits as operations take it."""
    return cache if cache.dtype == torch.float32 else cache.view(torch.uint8)


class CompressedPools:
    """The caches of entries and of open rows that a model's layers share, see `compressed_groups`."""

    def __init__(self, kv_manager: PagedKvCacheManager, attention: Sequence[AttentionConfig], held: HeldCaches) -> None:
        self._manager, self._attention, self._held = kv_manager, attention, held
        self._indices = entry_indices(attention)
        self._places: dict[tuple[int, bool, int], SharedPlaces] = {}

    def give(self, attention: CompressedAttention, index: int) -> None:
        """Give layer `index` the entries that it reads, and the rows of its open pools. Layers come in their order."""
        source = entries_source(self._attention, index)
        if source is None:
            return
        manager, held, layer = self._manager, self._held, entries_layer(self._attention)
        entries: list[torch.Tensor] = []
        for number in self._indices[source]:
            entries.append(held.of(manager.entries(layer, number)))
        attention.set_entries(entries, manager.table_of(layer))
        sizes = attention.sizes
        if source != index or not sizes.num_earlier_rows:
            return
        borders: torch.Tensor | None = None
        if sizes.overlaps:
            borders = held.of(manager.entries(index))
        key = sizes.pool_size, sizes.overlaps, manager.table_of(index)
        finds_places = key not in self._places
        places = self._places.setdefault(key, SharedPlaces())
        open_rows = held.of(manager.open_rows(open_layer(self._attention, index)))
        attention.set_open_rows(open_rows, borders, places, finds_places=finds_places)
