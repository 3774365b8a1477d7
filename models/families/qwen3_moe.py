"""Qwen3-MoE (Yang et al., 2025): Qwen3 with a mixture of experts in place of most layers' MLP."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.families.qwen2 import qwen_window
from paged.models.layers.config import (
    DecoderConfig,
    MoeConfig,
    count_experts,
    count_layers,
    decoder_config,
    top_k_of,
)
from paged.models.loading.hf_config import HfConfig


class Qwen3Moe(Llama):
    """Every decoder_sparse_step-th layer has experts but for mlp_only_layers; all layers share one window."""

    model_type = "qwen3_moe"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        num_layers, step = count_layers(hf), hf.integer("decoder_sparse_step", 1)
        dense = set(hf.items("mlp_only_layers", int))
        num_experts = count_experts(hf)
        moe = MoeConfig(
            num_experts=num_experts,
            top_k=top_k_of(hf, num_experts),
            intermediate_size=hf.integer("moe_intermediate_size"),
            renormalize=hf.flag("norm_topk_prob"),
        )
        layers = tuple(moe if i not in dense and (i + 1) % step == 0 else None for i in range(num_layers))
        return decoder_config(hf, windows=(qwen_window(hf),) * num_layers, qk_norm=True, moe=layers)
