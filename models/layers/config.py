"""The sizes and options that all decoders here share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.models.layers.rope import RopeConfig
from paged.models.quantization.layouts import Quantization


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + weight * ln(1 + floor((p + offset) / period))."""

    weight: float
    period: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A layer's attention: grouped queries over a KV cache.

    v_head_dim: of the values, where they are not of the size of the keys.
    rope: the rotation of queries and keys; None for none.
    window: how many tokens are seen, the own one included; None for all.
    shares_kv_with: an earlier layer, whose keys and values are read in place of own ones.
    softmax_scale: what products of queries and keys are multiplied by.
    softcap: scores become softcap * tanh(score / softcap); 0 for none.
    qkv_bias, o_bias: of the projections before and after attention.
    qk_norm: RMS norm of queries and keys before they are rotated, of every "head" or over their whole "width"; "unit"
        for one of every head without weights.
    v_norm: RMS norm of every value head, without weights. k_eq_v: values are the keys before their norm and rotation.
    query_growth: makes queries longer with their position; None for none.
    chunk_size: tokens of the own chunk of this many alone are seen; None for no chunks.
    fused: projections of query, key and value are one tensor in a checkpoint, `qkv_proj`.
    sinks: every query head has one more score that takes its share of the softmax and adds nothing.
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
    v_norm: bool = False
    k_eq_v: bool = False
    query_growth: QueryGrowth | None = None
    chunk_size: int | None = None
    fused: bool = False
    sinks: bool = False

    @property
    def cache_kind(self) -> tuple[int, int, int, int | None]:
        """What layers have in common that share a cache group, in the order of CacheGroup's fields."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim, self.window


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The norms on the residual stream.

    eps: added to the mean square. zero_centred: weights are stored less 1. subtracts_mean: before it is squared, in a
    layer norm. The others are the names of a layer's norms in a checkpoint; None where there is none.
    """

    eps: float
    zero_centred: bool = False
    subtracts_mean: bool = False
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token takes top_k of num_experts gated MLPs.

    renormalize, scoring, num_expert_groups, topk_groups, routed_scaling_factor: as in `route_tokens`.
    correction_bias: the name of its tensor in a checkpoint; None for none. expert_scale: likewise, of factors that
        multiply the weights of each expert.
    float32_router: the router multiplies in float32.
    weighs_inputs: the weights multiply what experts get, not what they give; with top_k of 1 alone.
    shared_size: intermediate size of an MLP that every token takes; 0 for none. shared_gate: its weight is the sigmoid
        of a projection of this name; None for 1.
    bias: router and experts have biases. interleaved: gate and up rows alternate.
    stacked: a projection of all experts is one tensor in a checkpoint; transposed: with rows and columns exchanged;
        is_mxfp4: and that in MXFP4, as which it stays.
    held: the first expert here, and how many; None for all, where other ranks hold none.
    The names are those of the weights in a checkpoint.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    scoring: str = "softmax"
    num_expert_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    correction_bias: str | None = None
    expert_scale: str | None = None
    float32_router: bool = False
    weighs_inputs: bool = False
    shared_size: int = 0
    shared_gate: str | None = None
    bias: bool = False
    interleaved: bool = False
    stacked: bool = False
    transposed: bool = False
    is_mxfp4: bool = False
    held: tuple[int, int] | None = None
    shared_name: str = "shared_experts"
    router_name: str = "gate"
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"

    @property
    def experts(self) -> range:
        """Those that are here."""
        first, count = self.held or (0, self.num_experts)
        return range(first, first + count)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-like decoder: norms, rotary grouped-query attention, gated MLP or a mixture of them.

    attention: of each layer. intermediate_size: of each layer's plain MLP.
    moe: each layer's mixture of experts; None for a plain MLP.
    mlp_name: of MLPs and experts in a checkpoint. fused_mlp: gate and up are one tensor there, `gate_up_proj`.
    activation: of the gate, as `silu_and_mul` and `fused_moe` name it.
    embedding_scale, residual_scale, logits_scale: what embeddings, all that is added to them, and logits are multiplied
        by.
    logits_softcap: logits become softcap * tanh(logit / softcap); 0 for none.
    dtype: of the weights as published. quantization: which of them are packed; None for none.
    num_mtp_layers: behind the others, for tokens further ahead; they are not loaded.
    layer_input_size: of what every layer gets of a token beside the residual stream; 0 for none.
    layer_input_vocab_size: of the embedding that this is looked up in.
    """

    model_type: str
    hidden_size: int
    intermediate_size: tuple[int, ...]
    vocab_size: int
    max_position_embeddings: int
    attention: tuple[AttentionConfig, ...]
    norms: NormConfig
    moe: tuple[MoeConfig | None, ...]
    mlp_name: str = "mlp"
    mlp_bias: bool = False
    fused_mlp: bool = False
    activation: str
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    tie_word_embeddings: bool
    dtype: torch.dtype
    quantization: Quantization | None
    num_mtp_layers: int = 0
    layer_input_size: int = 0
    layer_input_vocab_size: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_attention_heads(self) -> int:
        """Of the first layer, as of every layer of most models; likewise `num_kv_heads` and `head_dim`."""
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention[0].head_dim

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Of each layer the one whose keys and values it reads: itself, or that of `shares_kv_with`."""
        return tuple(
            index if layer.shares_kv_with is None else layer.shares_kv_with
            for index, layer in enumerate(self.attention)
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, see `AttentionConfig`."""
        return tuple(layer.window for layer in self.attention)
