"""Qwen3-MoE (Yang et al., 2025): Qwen3 with a mixture of experts in place of most layers' MLP."""

from __future__ import annotations

from paged.models.decoder_config import DecoderConfig, MoeConfig, decoder_config
from paged.models.hf_config import HfConfig
from paged.models.llama import Llama


class Qwen3Moe(Llama):
    """Every decoder_sparse_step-th layer has experts but for mlp_only_layers; all layers share one window."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        num_layers, step = hf.integer("num_hidden_layers"), hf.integer("decoder_sparse_step", 1)
        dense = hf.items("mlp_only_layers", int)
        moe = MoeConfig(
            # Published configs say num_experts, transformers 5 writes num_local_experts.
            num_experts=hf.integer("num_local_experts" if "num_local_experts" in hf.values else "num_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            intermediate_size=hf.integer("moe_intermediate_size"),
            renormalize=hf.flag("norm_topk_prob"),
        )
        layers = tuple(moe if i not in dense and (i + 1) % step == 0 else None for i in range(num_layers))
        window = hf.integer("sliding_window", 4096) if hf.flag("use_sliding_window") else None
        return decoder_config(hf, windows=(window,) * num_layers, qk_norm=True, moe=layers)
