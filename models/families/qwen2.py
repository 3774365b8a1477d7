"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases before attention, and windows in some layers."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, layer_windows
from paged.models.loading.hf_config import HfConfig


class Qwen2(Llama):
    """Query, key and value have biases whatever config.json says; the output projection has none."""

    model_type = "qwen2"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.value("attention_bias")
        return decoder_config(hf, window=qwen_windows(hf), qkv_bias=True, o_bias=False)


def qwen_windows(hf: HfConfig) -> tuple[int | None, ...]:
    """`layer_types` or `max_window_layers` say which layers have a window, if `use_sliding_window` lets any."""
    window = qwen_window(hf)
    first = 0 if window is None else hf.integer("max_window_layers", 28, least=0)
    return layer_windows(hf, window, lambda layer: window is not None and layer >= first)


def qwen_window(hf: HfConfig) -> int | None:
    """`sliding_window`, which means nothing unless `use_sliding_window` is true."""
    hf.value("sliding_window")
    return hf.optional_integer("sliding_window", 4096) if hf.flag("use_sliding_window") else None
