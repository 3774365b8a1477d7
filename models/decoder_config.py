"""The sizes and options that all decoders here share, as read from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models.hf_config import HfConfig
from paged.models.rope import RopeConfig, rope_config

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Names of gated activations in config.json -> those of `silu_and_mul` and `fused_moe`.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token takes top_k of num_experts gated MLPs.

    renormalize: the weights of the top_k sum to 1. bias: router and experts have biases. interleaved: gate and up rows
    alternate. is_mxfp4: experts are stored in MXFP4. The names are those of the weights in a checkpoint.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    bias: bool = False
    interleaved: bool = False
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


def decoder_config(hf: HfConfig, *, quant_method: str | None = None, **fields: Any) -> DecoderConfig:
    """What config.json says; fields of DecoderConfig that the family reads in its own way are given.

    quant_method: a way to pack weights that the family unpacks.

    Raises:
        CheckpointError: a value is missing or malformed.
        UnsupportedError: the activation, the dtype or the rope type is not known here, or the weights are quantised.
    """
    quantization = hf.section("quantization_config")
    if not _is_unquantised(quantization) and not (quant_method and is_packed(hf, quant_method)):
        raise UnsupportedError(f"{hf.source}: quantised weights (quantization_config), known are plain floating point")
    hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    num_kv_heads, num_layers = hf.integer("num_key_value_heads", num_heads), hf.integer("num_hidden_layers")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{hf.source}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = hf.integer("head_dim", hidden_size // num_heads)
    if "ropes" not in fields:
        fields["ropes"] = (rope_config(hf),) * num_layers
    if "activation" not in fields:
        fields["activation"] = known_activation(hf, "hidden_act", "silu")
    read = {
        "model_type": hf.text("model_type"),
        "hidden_size": hidden_size,
        "intermediate_size": hf.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": hf.integer("vocab_size"),
        "max_position_embeddings": hf.integer("max_position_embeddings"),
        "rms_norm_eps": hf.number("rms_norm_eps"),
        "windows": (None,) * num_layers,
        "softmax_scale": head_dim**-0.5,
        "qkv_bias": hf.flag("attention_bias"),
        "o_bias": hf.flag("attention_bias"),
        "mlp_bias": hf.flag("mlp_bias"),
        "tie_word_embeddings": hf.flag("tie_word_embeddings"),
        "dtype": weights_dtype(hf),
        "moe": (None,) * num_layers,
    }
    return DecoderConfig(**(read | fields))


def weights_dtype(hf: HfConfig, default: str = "float32") -> torch.dtype:
    """Of the weights as published.

    Raises:
        UnsupportedError: it is not known here.
    """
    dtype = hf.text("dtype", hf.text("torch_dtype", default))
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{hf.source}: dtype {dtype!r}, known are {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def known_activation(hf: HfConfig, key: str, default: str) -> str:
    """The gated activation that a key names, as `silu_and_mul` names it.

    Raises:
        UnsupportedError: it is not known here.
    """
    activation = hf.text(key, default)
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"{hf.source}: activation {activation!r}, known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def layer_windows(hf: HfConfig, window: int | None, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Each layer's window: `layer_types` say which layers have it, and where there are none, is_sliding does.

    Raises:
        CheckpointError: there are more or fewer layer_types than layers.
        UnsupportedError: a layer is of a type that is not known here.
    """
    num_layers, kinds = hf.integer("num_hidden_layers"), hf.items("layer_types", str)
    if not kinds:
        return tuple(window if is_sliding(layer) else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise CheckpointError(f"{hf.source}: {len(kinds)} layer_types for {num_layers} layers")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(f"{hf.source}: layer type {min(unknown)!r}, known are full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def is_packed(hf: HfConfig, quant_method: str) -> bool:
    """Whether the weights are quantised in this way."""
    quantization = hf.section("quantization_config")
    return quantization is not None and quantization.text("quant_method", "") == quant_method


def _is_unquantised(quantization: HfConfig | None) -> bool:
    """Whether weights are plain: compressed-tensors may describe the KV cache alone, in 8-bit floats."""
    if quantization is None:
        return True
    scheme = quantization.section("kv_cache_scheme")
    if scheme is None or quantization.values.get("config_groups"):
        return False
    return quantization.text("quant_method", "") == "compressed-tensors" and scheme.text("type", "") == "float"
