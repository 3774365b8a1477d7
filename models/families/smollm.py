"""SmolLM3 (Hugging Face, 2025): Llama in which every fourth layer rotates nothing."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, layer_windows, rotating_layers
from paged.models.layers.rope_config import rope_config
from paged.models.loading.hf_config import HfConfig


class SmolLM3(Llama):
    """Layers without rotation are those that may have a window."""

    model_type = "smollm3"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        rotates, rope = rotating_layers(hf), rope_config(hf, theta=2e6)
        hf.value("sliding_window")
        window = hf.optional_integer("sliding_window") if hf.flag("use_sliding_window") else None
        return decoder_config(
            hf,
            rope=tuple(rope if one else None for one in rotates),
            window=layer_windows(hf, window, lambda layer: window is not None and not rotates[layer]),
            mlp_bias=hf.flag("mlp_bias"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        )
