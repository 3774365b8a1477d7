"""Phi-3 (Abdin et al., 2024) and Phi-4: Llama that rotates a part of each head, with fused projections."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config
from paged.models.layers.rope_config import rope_config
from paged.models.loading.hf_config import HfConfig


class Phi3(Llama):
    """Query, key and value are one tensor in a checkpoint, as are gate and up; rotations may be long ones."""

    model_type = "phi3"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(
            hf,
            window=hf.optional_integer("sliding_window"),
            rope=rope_config(hf, fraction=1.0),
            qkv_bias=False,
            o_bias=False,
            fused=True,
            fused_mlp=True,
        )
