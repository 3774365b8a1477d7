"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer, and by default no window."""

from __future__ import annotations

from paged.models.decoder_config import DecoderConfig, MoeConfig, decoder_config
from paged.models.hf_config import HfConfig
from paged.models.llama import Llama


class Mixtral(Llama):
    """The weights of a token's experts always sum to 1."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        num_layers = hf.integer("num_hidden_layers")
        moe = MoeConfig(
            num_experts=hf.integer("num_local_experts"),
            top_k=hf.integer("num_experts_per_tok"),
            intermediate_size=hf.integer("intermediate_size"),
            renormalize=True,
            block_name="block_sparse_moe",
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        window = hf.optional_integer("sliding_window")
        return decoder_config(hf, windows=(window,) * num_layers, moe=(moe,) * num_layers)
