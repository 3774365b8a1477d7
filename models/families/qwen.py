"""Qwen2 and Qwen2.5 (Yang et al., 2024) and Qwen3 (Yang et al., 2025), dense and with experts."""

from __future__ import annotations

from typing import Any

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.decoder_config import count_layers, decoder_config, layer_windows, moe_config
from paged.models.loading.hf_config import HfConfig


class Qwen2(Llama):
    """Llama with biases before attention whatever config.json says, and windows in some layers."""

    model_type = "qwen2"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.value("attention_bias")
        return decoder_config(hf, window=_windows(hf), qkv_bias=True, o_bias=False)


class Qwen2Moe(Llama):
    """Beside the experts stands an MLP for all tokens, behind a gate; windows are in every second of first layers."""

    model_type = "qwen2_moe"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        window, most = _window(hf), hf.integer("max_window_layers", 28, least=0)
        return decoder_config(
            hf,
            window=layer_windows(hf, window, lambda layer: window is not None and layer % 2 == 0 and layer < most),
            qkv_bias=hf.flag("qkv_bias", True),
            o_bias=False,
            moe=_experts(
                hf,
                shared_size=hf.integer("shared_expert_intermediate_size", 5632),
                shared_name="shared_expert",
                shared_gate="shared_expert_gate",
            ),
        )


class Qwen3(Llama):
    """Llama with a norm of every query and key head, and the windows of Qwen2."""

    model_type = "qwen3"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, window=_windows(hf), qk_norm="head")


class Qwen3Moe(Llama):
    """Qwen3 with experts in place of most layers' MLP; all layers share one window."""

    model_type = "qwen3_moe"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, window=_window(hf), qk_norm="head", moe=_experts(hf))


def _experts(hf: HfConfig, **fields: Any) -> tuple[MoeConfig | None, ...]:
    """In every decoder_sparse_step-th layer but mlp_only_layers."""
    step, dense = hf.integer("decoder_sparse_step", 1), set(hf.items("mlp_only_layers", int))
    moe = moe_config(hf, size_key="moe_intermediate_size", renormalize=hf.flag("norm_topk_prob"), **fields)
    layers = range(count_layers(hf))
    return tuple(moe if layer not in dense and (layer + 1) % step == 0 else None for layer in layers)


def _windows(hf: HfConfig) -> tuple[int | None, ...]:
    """`layer_types` or `max_window_layers` say which layers have a window, if `use_sliding_window` lets any."""
    window = _window(hf)
    first = 0 if window is None else hf.integer("max_window_layers", 28, least=0)
    return layer_windows(hf, window, lambda layer: window is not None and layer >= first)


def _window(hf: HfConfig) -> int | None:
    """`sliding_window`, which means nothing unless `use_sliding_window` is true."""
    hf.value("sliding_window")
    return hf.optional_integer("sliding_window", 4096) if hf.flag("use_sliding_window") else None
