"""Gemma 2 and 3 (Gemma Team, 2024 and 2025), text alone: norms on both sides of attention and MLP, and windows."""

from __future__ import annotations

from typing import Any

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, known_activation, layer_windows
from paged.models.layers.rope_config import ropes_by_kind
from paged.models.loading.hf_config import HfConfig


class Gemma2(Llama):
    """Scores and logits stay within soft caps; beginning with the first, every second layer has a window."""

    model_type = "gemma2"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        window = hf.optional_integer("sliding_window", 4096)
        return decoder_config(
            hf,
            **gemma_fields(hf, logits_softcap=30.0),
            softcap=hf.optional_number("attn_logit_softcapping", 50.0) or 0.0,
            window=layer_windows(hf, window, lambda layer: layer % 2 == 0),
        )


class Gemma3(Llama):
    """Most layers have a window and one rotation, every sixth sees everything and has another."""

    model_type = "gemma3_text"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        period = hf.integer("sliding_window_pattern", 6)
        windows = layer_windows(
            hf, hf.optional_integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0
        )
        whole, local = ropes_by_kind(hf, hf.number("rope_theta", 1e6), hf.number("rope_local_base_freq", 1e4))
        return decoder_config(
            hf,
            **gemma_fields(hf),
            window=windows,
            rope=tuple(whole if window is None else local for window in windows),
            qk_norm="head",
        )


def gemma_fields(hf: HfConfig, logits_softcap: float = 0.0) -> dict[str, Any]:
    """What Gemma 2 and 3 have; the soft cap is that of a config.json that says nothing of it."""
    return {
        "logits_softcap": hf.optional_number("final_logit_softcapping", logits_softcap) or 0.0,
        "softmax_scale": hf.number("query_pre_attn_scalar", 256) ** -0.5,
        "activation": known_activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": hf.integer("hidden_size") ** 0.5,
        "tie_word_embeddings": hf.flag("tie_word_embeddings", True),
        "zero_centred": True,
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
