"""Sizes and options that all decoders share: norms, streams, experts, and the decoder itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.recurrent_config import EngramConfig, NgramConfig, RecurrentConfig
from paged.models.quantization.layouts import Quantization


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
