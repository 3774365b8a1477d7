"""Llama (Touvron et al., 2023; Dubey et al., 2024). Most families share its layers."""

from __future__ import annotations

from paged.models.families.network import Network
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config
from paged.models.loading.hf_config import HfConfig


class Llama(Network):
    model_type = "llama"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, mlp_bias=hf.flag("mlp_bias"))
