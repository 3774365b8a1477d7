"""Qwen3 (Yang et al., 2025): Llama with an RMS norm on every query and key head, and windows in some layers."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.families.qwen2 import qwen_windows
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config
from paged.models.loading.hf_config import HfConfig


class Qwen3(Llama):
    """Llama with q/k norm and the windows of Qwen2."""

    model_type = "qwen3"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, window=qwen_windows(hf), qk_norm="head")
