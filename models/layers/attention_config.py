"""Sizes and options of a layer's attention: over a KV cache, over latents, over compressed entries; indexers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.errors import UnsupportedError
from paged.kernels.cache.latent_cache import INDEX_SCALE_BYTES, RECORD_BYTES
from paged.models.layers.rope import RopeConfig


@dataclass(frozen=True)
class QueryGrowth:
    """Growth of queries with position p: the factor is 1 + weight * ln(1 + floor((p + offset) / period))."""

    weight: float
    period: int
    offset: int

    def factors(self, num_positions: int, device: torch.device) -> torch.Tensor:
        """Return the factors, float32 [num_positions, 1, 1]."""
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        periods = torch.floor((positions + self.offset) / self.period)
        return (1 + self.weight * torch.log1p(periods))[:, None, None]


@dataclass(frozen=True)
class IndexConfig:
    """An indexer of sparse attention.

    Attributes:
        top_k: number of keys that a query attends to, besides its open pool.
        interleaved: as in RopeConfig, for the heads of the indexer.
        rotates_last: whether the last elements of a head rotate, not the first.
        eps: eps of the keys' norm.
        pool_size: tokens that have a key together; 1 if each has its own. See `PooledIndexer`.
        reads_hidden: whether queries come from the hidden state, see `HiddenIndexer`; otherwise from their latent.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    rotates_last: bool = False
    eps: float = 1e-6
    pool_size: int = 1
    reads_hidden: bool = False

    def key_size(self, dtype: torch.dtype) -> int:
        """Return the elements of a key in a cache of `dtype`: float32 keys, or else e4m3 keys and a float32 scale.

        Raises:
            UnsupportedError: after keys of this size, the scales would not be aligned.
        """
        if dtype.itemsize == 4:
            return self.head_dim
        if self.head_dim % INDEX_SCALE_BYTES:
            raise UnsupportedError(
                f"index_head_dim {self.head_dim} with a KV cache of {dtype}, supported are multiples of "
                f"{INDEX_SCALE_BYTES}"
            )
        return (self.head_dim + INDEX_SCALE_BYTES) // dtype.itemsize

    def row_size(self, dtype: torch.dtype) -> int:
        """Return the elements of a token's key and gate in a cache of `dtype`; in a cache of 8 bits they have 16."""
        return 2 * self.head_dim * max(1, 2 // dtype.itemsize)


@dataclass(frozen=True)
class BlockIndexConfig:
    """An indexer of block-sparse attention.

    Attributes:
        top_k: number of blocks that a query and a KV head attend to.
        block_size: positions of a block.
        local_blocks: the last blocks of a query, its own and those before, are among the top_k.
        num_heads: heads that choose the same blocks for all KV heads; None for a head for each KV head.
        pool_size: as in IndexConfig: 1, or the positions of a block. See `MeanIndexer`.
    """

    head_dim: int
    top_k: int
    block_size: int
    local_blocks: int
    num_heads: int | None = None
    pool_size: int = 1

    def key_size(self, dtype: torch.dtype) -> int:
        """Return the elements of a key in a cache of `dtype`: plain keys, or in 8 bits e4m3 keys and a float32 scale.

        Raises:
            UnsupportedError: after keys of this size, the scales would not be aligned.
        """
        if dtype.itemsize > 1:
            return self.head_dim
        return IndexConfig(1, self.head_dim, 1, interleaved=False).key_size(dtype)

    def row_size(self, dtype: torch.dtype) -> int:
        """Return the elements of a token's key in a cache of `dtype`; in a cache of 8 bits it has 16."""
        return self.head_dim * max(1, 2 // dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention.

    Attributes:
        rank: size of a token's latent.
        q_rank: size of the queries' latent; None if one projection makes queries from the hidden state.
        nope_dim, rope_dim: sizes of the parts of a query head that do not rotate and that rotate.
        v_head_dim: size of a head's value.
        q_factor, kv_factor: factors for both latents, after their norms.
        norms_rope: whether the rotated part of a key has a norm too.
        eps: eps of these norms.
        reads_both: whether queries are made of their latent after its norm and before it, side by side.
        index: the layer's indexer, which chooses the keys of a query; None for no indexer.
        shares_choice: whether the layer attends to the keys that the nearest earlier indexer chose. A layer without an
            indexer and without a shared choice attends to all keys.
        learned_growth: whether queries grow by `LogPositionGrowth`.
    """

    rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    q_factor: float = 1.0
    kv_factor: float = 1.0
    norms_rope: bool = False
    eps: float = 1e-6
    reads_both: bool = False
    index: IndexConfig | None = None
    shares_choice: bool = False
    learned_growth: bool = False


@dataclass(frozen=True, kw_only=True)
class EntrySharing:
    """Layers that write and choose the entries of a layer of DeepSeek-V4.1, see `SharedEntriesAttention`.

    Attributes:
        entries_of: the layer that writes the entries, and index keys if it has an indexer.
        choice_of: the layer whose indexer chooses among them.
        candidates_of: for a layer with an indexer: the layer whose indexer publishes blocks of entries, itself or an
            earlier one, within which this indexer chooses; None for a choice among all entries.
        candidate_blocks: most blocks that are published for a query.
        candidate_block_size: entries of a block, 1 to 256.
    """

    entries_of: int
    choice_of: int
    candidates_of: int | None = None
    candidate_blocks: int = 0
    candidate_block_size: int = 0


@dataclass(frozen=True, kw_only=True)
class CompressedConfig:
    """Sizes of attention to a window and to compressed entries, see `CompressedAttention`.

    Attributes:
        q_rank: size of the queries' latent.
        rope_dim: elements at the end of a head that rotate.
        pool_size: positions of an entry; 0 for a layer with a window alone.
        index: the indexer, which chooses the entries of a query; None for attention to all entries, or to those that an
            earlier layer chose. Unless layers share entries, an entry of a layer with an indexer also depends on the
            positions of the pool before.
        num_groups, group_rank: groups of heads, and size of a group's output before the last projection.
        norms_queries: whether the queries of each head are divided by their root mean square.
        record_bytes: size of rows and entries in a cache of e4m3.
        sharing: which layers write and choose the entries that the layer reads; None if it does so itself.
    """

    q_rank: int
    rope_dim: int
    pool_size: int
    index: IndexConfig | None
    num_groups: int
    group_rank: int
    norms_queries: bool = True
    record_bytes: int = RECORD_BYTES
    sharing: EntrySharing | None = None

    @property
    def overlaps(self) -> bool:
        """Whether an entry also depends on the positions of the pool before."""
        return self.index is not None and self.sharing is None

    @property
    def num_earlier_rows(self) -> int:
        """Number of rows before a token that its pool may need."""
        return self.pool_size * (1 + self.overlaps) - 1

    def row_size(self, head_dim: int) -> int:
        """Return the numbers of a token's values and gates, for an entry and for its index key."""
        size = 2 * head_dim
        if self.overlaps:
            assert self.index is not None
            size = 2 * (size + 2 * self.index.head_dim)
        return size


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer: grouped queries over a KV cache.

    Attributes:
        head_dim, v_head_dim: head sizes of queries and keys, and of values, as the cache holds them.
        latent: sizes of latent attention, whose cache has one head: the latent and its rotated part. None for other
            attention.
        rope: rotation of queries and keys; None for no rotation.
        window: number of visible tokens, the token itself included; None for all.
        shares_kv_with: index of an earlier layer whose keys and values, or latents, the layer reads; None if it has its
            own.
        softmax_scale: factor for products of queries and keys.
        softcap: scores become softcap * tanh(score / softcap); 0 for no cap.
        qkv_bias, o_bias: whether the projections before and after attention have biases.
        qk_norm: norm of queries and keys before they are rotated. RMS norms: "head" for each head, "width" for all
            heads together, "unit" for each head without weights. "layer": a layer norm of each head, with weights for
            every head. None for no norm.
        value_scale: factor for values.
        v_norm: whether every value head has an RMS norm without weights.
        k_eq_v: whether values are the keys before their norm and rotation.
        norm_after_rope: whether the norms of heads follow the rotation.
        query_growth: growth of queries with their position; None for no growth.
        chunk_size: a token sees only its own chunk, of this many tokens; None for no chunks.
        fused: whether a checkpoint stores query, key and value as one tensor, `qkv_proj`.
        sinks: whether each query head has an extra score that takes part in the softmax and adds no value.
        output_gate: whether the query projection also gives a gate, after each head's query. Its sigmoid multiplies the
            head's output.
        head_gate: activation of a gate for each head's output, "softplus" or "sigmoid", from a projection `g_proj`;
            None for no such gate.
        head_gate_size: elements of a head's gate: 1, or as many as its output has.
        block_index: the layer's indexer, which chooses the blocks of positions of a query and KV head; None for no
            indexer, as in latent attention, see `LatentConfig`.
        compressed: sizes of attention to a window and to compressed entries, whose cache has one head: key and value
            are the same row. None for other attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope: RopeConfig | None
    window: int | None = None
    shares_kv_with: int | None = None
    softmax_scale: float
    softcap: float = 0.0
    qkv_bias: bool
    o_bias: bool
    qk_norm: str | None = None
    value_scale: float = 1.0
    v_norm: bool = False
    k_eq_v: bool = False
    norm_after_rope: bool = False
    query_growth: QueryGrowth | None = None
    chunk_size: int | None = None
    fused: bool = False
    sinks: bool = False
    latent: LatentConfig | None = None
    output_gate: bool = False
    head_gate: str | None = None
    head_gate_size: int = 1
    block_index: BlockIndexConfig | None = None
    compressed: CompressedConfig | None = None

    @property
    def indexer(self) -> IndexConfig | BlockIndexConfig | None:
        """The layer's indexer, of keys or of blocks."""
        if self.latent is not None:
            return self.latent.index
        return self.block_index

    @property
    def cache_kind(self) -> tuple[int, int, int, int | None, bool]:
        """Properties that all layers of a cache group share, in the order of CacheGroup's fields."""
        has_one_row = self.latent is not None or self.compressed is not None
        return self.num_kv_heads, self.head_dim, self.v_head_dim, self.window, has_one_row

    @property
    def window_size(self) -> tuple[int, int]:
        """Numbers of earlier and of later visible tokens, -1 for all; a window of W has W - 1 earlier tokens."""
        if self.window is None:
            return -1, -1
        return self.window - 1, -1

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a head that `rope` covers."""
        if self.compressed is not None:
            return self.compressed.rope_dim
        return self.head_dim if self.latent is None else self.latent.rope_dim
