"""The sizes and options that all decoders here share, as read from a checkpoint's config.json."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models.hf_config import HfConfig
from paged.models.rope import RopeConfig, rope_config

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token takes top_k of num_experts gated MLPs.

    renormalize: the weights of the top_k sum to 1. The names are those of the weights in a checkpoint.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    block_name: str = "mlp"
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-like decoder: RMS norms, rotary grouped-query attention, gated SiLU MLP or a mixture of them.

    windows: how many tokens each layer's attention sees, itself included; None for all.
    qk_norm: RMS norm of every query and key head before it is rotated.
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
    rope: RopeConfig
    windows: tuple[int | None, ...]
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: torch.dtype
    moe: tuple[MoeConfig | None, ...]


def decoder_config(
    hf: HfConfig,
    *,
    windows: tuple[int | None, ...] | None = None,
    qk_norm: bool = False,
    moe: tuple[MoeConfig | None, ...] | None = None,
) -> DecoderConfig:
    """What config.json says; windows, q/k norm and mixture of experts as the family reads them.

    Raises:
        CheckpointError: a value is missing or malformed.
        UnsupportedError: the activation, the dtype or the rope type is not known here, or the weights are quantised.
    """
    activation = hf.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"{hf.source}: activation {activation!r}, known are silu (swish)")
    if not _is_unquantised(hf.section("quantization_config")):
        raise UnsupportedError(f"{hf.source}: quantised weights (quantization_config), known are plain floating point")
    dtype = hf.text("dtype", hf.text("torch_dtype", "float32"))
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{hf.source}: dtype {dtype!r}, known are {', '.join(_DTYPES)}")
    hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    num_kv_heads, num_layers = hf.integer("num_key_value_heads", num_heads), hf.integer("num_hidden_layers")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{hf.source}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    return DecoderConfig(
        model_type=hf.text("model_type"),
        hidden_size=hidden_size,
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hf.integer("head_dim", hidden_size // num_heads),
        vocab_size=hf.integer("vocab_size"),
        max_position_embeddings=hf.integer("max_position_embeddings"),
        rms_norm_eps=hf.number("rms_norm_eps"),
        rope=rope_config(hf),
        windows=(None,) * num_layers if windows is None else windows,
        attention_bias=hf.flag("attention_bias"),
        mlp_bias=hf.flag("mlp_bias"),
        qk_norm=qk_norm,
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        dtype=_DTYPES[dtype],
        moe=(None,) * num_layers if moe is None else moe,
    )


def _is_unquantised(quantization: HfConfig | None) -> bool:
    """Whether weights are plain: compressed-tensors may describe the KV cache alone, in 8-bit floats."""
    if quantization is None:
        return True
    scheme = quantization.section("kv_cache_scheme")
    if scheme is None or quantization.values.get("config_groups"):
        return False
    return quantization.text("quant_method", "") == "compressed-tensors" and scheme.text("type", "") == "float"
