"""OLMo 2 and 3 (OLMo Team, 2024 and 2025): norms behind attention and MLP alone, and over all query and key heads."""

from __future__ import annotations

from typing import Any

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, layer_windows
from paged.models.layers.rope_config import ropes_by_kind
from paged.models.loading.hf_config import HfConfig

_FIELDS: dict[str, Any] = {
    "before_attention": None,
    "after_attention": "post_attention_layernorm",
    "before_mlp": None,
    "after_mlp": "post_feedforward_layernorm",
    "qk_norm": "width",
}


class Olmo2(Llama):
    """Llama with norms in other places."""

    model_type = "olmo2"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, **_FIELDS)


class Olmo3(Llama):
    """OLMo 2 with windows in three of four layers, whose rotation is not scaled."""

    model_type = "olmo3"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        windows = layer_windows(hf, hf.optional_integer("sliding_window", 4096), lambda layer: (layer + 1) % 4 != 0)
        whole, local = ropes_by_kind(hf, hf.number("rope_theta", 5e5), 5e5)
        ropes = tuple(whole if window is None else local for window in windows)
        return decoder_config(hf, window=windows, rope=ropes, **_FIELDS)
