"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer, and by default no window."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import (
    DecoderConfig,
    MoeConfig,
    count_experts,
    count_layers,
    decoder_config,
    require,
    top_k_of,
)
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig


class Mixtral(Llama):
    """The weights of a token's experts always sum to 1."""

    model_type = "mixtral"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        num_layers, num_experts = count_layers(hf), count_experts(hf)
        require(hf, "norm_topk_prob", True)
        moe = MoeConfig(
            num_experts=num_experts,
            top_k=top_k_of(hf, num_experts),
            intermediate_size=hf.integer("intermediate_size"),
            renormalize=True,
            block_name="block_sparse_moe",
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        window = hf.optional_integer("sliding_window")
        return decoder_config(
            hf,
            windows=(window,) * num_layers,
            moe=(moe,) * num_layers,
            ropes=(rope_config(hf, theta=1e6),) * num_layers,
            qkv_bias=False,
            o_bias=False,
        )
