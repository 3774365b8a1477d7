"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer, and by default no window."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, moe_config, require
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig


class Mixtral(Llama):
    """The weights of a token's experts always sum to 1."""

    model_type = "mixtral"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        require(hf, "norm_topk_prob", True)
        moe = moe_config(
            hf, renormalize=True, block_name="block_sparse_moe", gate_name="w1", up_name="w3", down_name="w2"
        )
        return decoder_config(
            hf,
            window=hf.optional_integer("sliding_window"),
            moe=moe,
            rope=rope_config(hf, theta=1e6),
            qkv_bias=False,
            o_bias=False,
        )
