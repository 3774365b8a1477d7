"""Sizes and options that all decoders share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paged.errors import UnsupportedError
from paged.kernels.cache.latent_cache import INDEX_SCALE_BYTES, RECORD_BYTES
from paged.models.layers.recurrent_config import EngramConfig, NgramConfig, RecurrentConfig
from paged.models.layers.rope import RopeConfig
from paged.models.quantization.layouts import Quantization


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
class StreamsConfig:
    """Several residual streams, see `HyperConnection`.

    Attributes:
        count: number of streams.
        eps: added to shares of streams and to their sums.
        num_iterations: number of Sinkhorn's iterations; 0 if streams do not mix.
        magnitude: limit of the factor for a part's output.
        has_head: whether the final norm reads a weighted sum of the streams, not their mean.
        single_pass: whether a part reads the streams with weights of the part before; the first one reads stream 0.
    """

    count: int
    eps: float
    num_iterations: int = 0
    magnitude: float = 2.0
    has_head: bool = False
    single_pass: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedStreamsConfig:
    """Several residual streams, see `GatedResidual`.

    Attributes:
        count: number of streams.
        rank: inner size of the projections that make the streams' gates.
    """

    count: int
    rank: int


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


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Norms on the residual stream.

    Attributes:
        eps: added to the mean square.
        zero_centred: whether weights are stored minus 1.
        factor: the weights are multiplied by it.
        subtracts_mean: whether it is a layer norm, which first subtracts the mean.
        gate_rank: rank of the gates of `GatedNormLayer`; 0 for norms without gates.
        bias: whether a layer norm has a bias.
        before_attention, after_attention, before_mlp, after_mlp: names of a layer's norms in a checkpoint; None for no
            norm.
    """

    eps: float
    zero_centred: bool = False
    factor: float = 1.0
    subtracts_mean: bool = False
    gate_rank: int = 0
    bias: bool = False
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token takes top_k of num_experts MLPs.

    Attributes:
        intermediate_size: intermediate size of one expert.
        latent_size: input and output size of experts, between projections from and to the hidden size; None for
            experts of the hidden size, without projections.
        latent_eps: eps of a norm of the experts' sum before it is projected; None for no norm.
        activation: activation of the experts; None for the decoder's, which the shared MLP has.
        renormalize, scoring, num_expert_groups, topk_groups, routed_scaling_factor: as in `route_tokens`.
        mixer_margin: margin of `choose_by_mixer`, which then chooses experts; None for `route_tokens`.
        token_table: name in a checkpoint of a table with the top_k experts of each token id; None for experts by score.
            Their weights are by score either way.
        sums_two_best: whether a group's score is the sum of its two best experts' scores even without a correction
            bias.
        correction_bias: name of the correction bias in a checkpoint; None for no such bias.
        correction_in_row: whether the correction bias is [1, num_experts], not [num_experts].
        expert_scale: name in a checkpoint of a tensor with a factor for each expert's routing weight; None for no
            factors.
        float32_router: whether the router multiplies in float32.
        weighs_inputs: whether routing weights multiply the input of experts, not their output; only with top_k 1.
        shared_size: intermediate size of the shared MLP, which every token takes; 0 for no shared MLP.
        shared_gate: name of a projection whose sigmoid is the weight of the shared MLP; None for weight 1.
        bias: whether router and experts have biases.
        interleaved: whether gate and up rows alternate.
        stacked: whether a checkpoint stores each projection of all experts as one tensor.
        transposed: whether rows and columns of stacked tensors are swapped; None if their shapes decide.
        is_mxfp4: whether stacked tensors are MXFP4; they stay packed.
        held: first expert and number of experts of this rank; None for all.
        shared_name, router_name, gate_name, up_name, down_name: names of the weights in a checkpoint.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    scoring: str = "softmax"
    num_expert_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    mixer_margin: float | None = None
    token_table: str | None = None
    sums_two_best: bool = False
    latent_size: int | None = None
    latent_eps: float | None = None
    activation: str | None = None
    correction_bias: str | None = None
    correction_in_row: bool = False
    expert_scale: str | None = None
    float32_router: bool = False
    weighs_inputs: bool = False
    shared_size: int = 0
    shared_gate: str | None = None
    bias: bool = False
    interleaved: bool = False
    stacked: bool = False
    transposed: bool | None = False
    is_mxfp4: bool = False
    held: tuple[int, int] | None = None
    shared_name: str = "shared_experts"
    router_name: str = "gate"
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"

    @property
    def experts(self) -> range:
        """Experts of this rank."""
        first, count = self.held or (0, self.num_experts)
        return range(first, first + count)


@dataclass(frozen=True, kw_only=True)
class BlockDrafterConfig:
    """Layers that draft a block of tokens in one forward (DSpark), see `BlockDraftHead`.

    Attributes:
        num_layers: number of the layers, whose attention is `mtp_attention`.
        block_size: tokens of a block, each of which predicts the next one.
        noise_token_id: input of a block behind its first token.
        taps: layers of the target whose inputs the drafter reads, as in `DraftHead`.
        markov_rank: size of the embedding of the token before, which adds to the logits.
        moe: experts of each layer.
    """

    num_layers: int
    block_size: int
    noise_token_id: int
    taps: tuple[int, ...]
    markov_rank: int
    moe: MoeConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-like decoder: norms, rotary grouped-query attention, MLPs or mixtures of experts.

    Attributes:
        model_type: name of the family in transformers.
        intermediate_size: intermediate size of each layer's plain MLP. A layer without an MLP has 0, and no experts.
        max_position_embeddings: longest sequence in tokens.
        attention: attention of each layer.
        moe: mixture of experts of each layer; None for a plain MLP.
        recurrent: recurrent part of each layer; None for no recurrent part.
        attends: whether each layer uses its `attention`.
        mlp_name: name of MLPs and experts in a checkpoint.
        recurrent_name: name of recurrent parts in a checkpoint.
        fused_mlp: whether a checkpoint stores gate and up as one tensor, `gate_up_proj`; None if the stored names
            decide.
        activation: activation of the gate, by its name in `silu_and_mul` and `fused_moe`. MLPs without a gate take an
            activation of `PlainMlp`.
        gated: whether MLPs and experts have a gate.
        mlp_factors: factors for the gate before its activation, and for the output of gated MLPs without experts.
        embedding_scale, residual_scale, logits_scale: factors for embeddings, for everything added to the residual
            stream, and for logits.
        snapshot_period: number of layers from one snapshot of the residual stream to the next, see `SnapshotLayer`; 0
            for a plain residual stream.
        streams: several residual streams; None for one.
        ngrams: features of the last tokens that each layer adds to the streams; None for a layer without.
        logits_softcap: logits become softcap * tanh(logit / softcap); 0 for no cap.
        head_bias: whether the head has a bias.
        tie_word_embeddings: whether the head's weights are the embedding.
        dtype: dtype of the weights as published.
        quantization: format of packed weights; None for plain weights.
        num_mtp_layers: extra layers at the end that predict tokens further ahead; they are not loaded.
        mtp_attention: attention of the extra layers; None for that of the last layer.
        block_drafter: the extra layers, if they draft blocks of tokens; None for others.
        layer_input_size: size of a token's separate input to each layer; 0 for no such input.
        layer_input_vocab_size: rows of the embedding of the separate input.
        placeholder_ids: token ids whose embeddings an image, audio or video replaces. A step without media embeds them
            as the token `placeholder_padding`.
        unknown_keys: keys of config.json that nothing reads and that may have an effect.
        wrapper: name of the multimodal architecture that contains this text model; empty for a plain text model.
    """

    model_type: str
    hidden_size: int
    intermediate_size: tuple[int, ...]
    vocab_size: int
    max_position_embeddings: int
    attention: tuple[AttentionConfig, ...]
    norms: NormConfig
    moe: tuple[MoeConfig | None, ...]
    recurrent: tuple[RecurrentConfig | None, ...]
    attends: tuple[bool, ...]
    mlp_name: str = "mlp"
    recurrent_name: str = "linear_attn"
    mlp_bias: bool = False
    fused_mlp: bool | None = False
    activation: str
    gated: bool = True
    mlp_factors: tuple[float, float] = (1.0, 1.0)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    snapshot_period: int = 0
    streams: StreamsConfig | GatedStreamsConfig | None = None
    ngrams: tuple[NgramConfig | EngramConfig | None, ...] = ()
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    head_bias: bool = False
    tie_word_embeddings: bool
    dtype: torch.dtype
    quantization: Quantization | None
    num_mtp_layers: int = 0
    mtp_attention: AttentionConfig | None = None
    block_drafter: BlockDrafterConfig | None = None
    layer_input_size: int = 0
    layer_input_vocab_size: int = 0
    placeholder_ids: tuple[int, ...] = ()
    placeholder_padding: int = 0
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)
    wrapper: str = field(default="", compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the first layer; most models have the same number in all layers.

        `num_kv_heads` and `head_dim` are the first layer's too.
        """
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention[0].head_dim

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it reads: itself, or its `shares_kv_with`."""
        sources = list(range(len(self.attention)))
        for index, layer in enumerate(self.attention):
            if layer.shares_kv_with is not None:
                sources[index] = layer.shares_kv_with
        return tuple(sources)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer, see `AttentionConfig`."""
        return tuple(layer.window for layer in self.attention)
