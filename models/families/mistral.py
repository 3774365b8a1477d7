"""Mistral (Jiang et al., 2023), Mixtral (Jiang et al., 2024) and Ministral 3 (Mistral AI, 2025): Llama with windows,
experts, and queries that grow."""

from __future__ import annotations

from types import MappingProxyType

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig, QueryGrowth
from paged.models.layers.decoder_config import decoder_config, layer_windows, moe_config
from paged.models.layers.rope_config import rope_config
from paged.models.loading.hf_config import HfConfig


class Mistral(Llama):
    """All layers see the last `sliding_window` tokens; null there means all of them."""

    model_type = "mistral"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        # transformers takes an absent key for 4096, as the first Mistral published it.
        return decoder_config(hf, window=hf.optional_integer("sliding_window", 4096), qkv_bias=False, o_bias=False)


class Ministral(Llama):
    """Mistral whose layers have a window or none."""

    model_type = "ministral"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        window = hf.optional_integer("sliding_window", 4096)
        windows = layer_windows(hf, window, lambda layer: window is not None)
        return decoder_config(hf, window=windows, qkv_bias=False, o_bias=False)


class Ministral3(Llama):
    """Mistral whose queries grow with the logarithm of their position, once it is beyond the first training's."""

    model_type = "ministral3"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        rope = hf.section("rope_parameters") or HfConfig(_YARN, hf.source)
        growth = QueryGrowth(
            rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings"), offset=0
        )
        return decoder_config(
            hf,
            window=hf.optional_integer("sliding_window"),
            qkv_bias=False,
            o_bias=False,
            rope=rope_config(hf, default=_YARN),
            query_growth=growth,
        )


# Where config.json says nothing about the rotation, as in transformers.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Mixtral(Llama):
    """Mistral with experts in every layer, whose weights sum to 1 for each token, and by default no window."""

    model_type = "mixtral"
    renames = MappingProxyType({r"\.block_sparse_moe\.": ".mlp."})

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.choice("norm_topk_prob", True)
        return decoder_config(
            hf,
            window=hf.optional_integer("sliding_window"),
            moe=moe_config(hf, renormalize=True, gate_name="w1", up_name="w3", down_name="w2"),
            rope=rope_config(hf, theta=1e6),
            qkv_bias=False,
            o_bias=False,
        )
