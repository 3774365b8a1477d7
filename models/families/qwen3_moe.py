"""Qwen3-MoE (Yang et al., 2025): Qwen3 with a mixture of experts in place of most layers' MLP."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.families.qwen2 import qwen_window
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import count_layers, decoder_config, moe_config
from paged.models.loading.hf_config import HfConfig


class Qwen3Moe(Llama):
    """Every decoder_sparse_step-th layer has experts but for mlp_only_layers; all layers share one window."""

    model_type = "qwen3_moe"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        step, dense = hf.integer("decoder_sparse_step", 1), set(hf.items("mlp_only_layers", int))
        moe = moe_config(hf, size_key="moe_intermediate_size", renormalize=hf.flag("norm_topk_prob"))
        layers = range(count_layers(hf))
        return decoder_config(
            hf,
            window=qwen_window(hf),
            qk_norm="head",
            moe=tuple(moe if layer not in dense and (layer + 1) % step == 0 else None for layer in layers),
        )
