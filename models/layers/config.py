"""The sizes and options that all decoders here share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.models.layers.rope import RopeConfig


@dataclass(frozen=True)
class AttentionConfig:
    """A layer's attention: grouped queries over a KV cache.

    v_head_dim: of the values, where they are not of the size of the keys.
    rope: the rotation of queries and keys; None for none.
    window: how many tokens are seen, the own one included; None for all.
    shares_kv_with: the layer whose keys and values are read in place of own ones.
    softmax_scale: what products of queries and keys are multiplied by.
    softcap: scores become softcap * tanh(score / softcap); 0 for none.
    qkv_bias, o_bias: of the projections before and after attention.
    qk_norm: RMS norm of queries and keys before they are rotated, of every "head" or over their whole "width".
    sinks: every query head has one more score that takes its share of the softmax and adds nothing.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope: RopeConfig | None
    window: int | None
    shares_kv_with: int | None
    softmax_scale: float
    softcap: float
    qkv_bias: bool
    o_bias: bool
    qk_norm: str | None
    sinks: bool


@dataclass(frozen=True)
class NormConfig:
    """The norms on the residual stream.

    eps: added to the mean square. zero_centred: weights are stored less 1. The others are the names of a layer's norms
    in a checkpoint; None where there is none.
    """

    eps: float
    zero_centred: bool
    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token takes top_k of num_experts gated MLPs.

    renormalize: the weights of the top_k sum to 1. bias: router and experts have biases. interleaved: gate and up rows
    alternate. stacked: a projection of all experts is one tensor in a checkpoint; is_mxfp4: and that in MXFP4. The
    names are those of the weights in a checkpoint.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    bias: bool = False
    interleaved: bool = False
    stacked: bool = False
    is_mxfp4: bool = False
    block_name: str = "mlp"
    router_name: str = "gate"
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-like decoder: norms, rotary grouped-query attention, gated MLP or a mixture of them.

    attention: of each layer.
    moe: each layer's mixture of experts; None for a plain MLP.
    activation: of the gate, as `silu_and_mul` and `fused_moe` name it.
    dtype: of the weights as published.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    attention: tuple[AttentionConfig, ...]
    norms: NormConfig
    moe: tuple[MoeConfig | None, ...]
    mlp_bias: bool
    activation: str
    tie_word_embeddings: bool
    dtype: torch.dtype

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
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, see `AttentionConfig`."""
        return tuple(layer.window for layer in self.attention)
