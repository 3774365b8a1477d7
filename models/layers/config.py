"""The sizes and options that all decoders here share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.models.layers.rope import RopeConfig


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
    """A Llama-like decoder: RMS norms, rotary grouped-query attention, gated MLP or a mixture of them.

    ropes: each layer's rotation.
    windows: how many tokens each layer's attention sees, itself included; None for all.
    softmax_scale: what products of queries and keys are multiplied by.
    qkv_bias, o_bias: of the projections before and after attention.
    qk_norm: RMS norm of every query and key head before it is rotated.
    sinks: every query head has one more score that takes its share of the softmax and adds nothing.
    zero_centred_norms: weights of norms are stored less 1.
    activation: of the gate, as `silu_and_mul` and `fused_moe` name it.
    dtype: of the weights as published.
    moe: each layer's mixture of experts; None for a plain MLP.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]
    windows: tuple[int | None, ...]
    softmax_scale: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str
    tie_word_embeddings: bool
    dtype: torch.dtype
    moe: tuple[MoeConfig | None, ...]
    qk_norm: bool = False
    sinks: bool = False
    zero_centred_norms: bool = False
