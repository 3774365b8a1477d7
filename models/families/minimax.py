"""MiniMax-M2 (MiniMax, 2025): experts by sigmoid and a bias, norms over all query and key heads, rotation of a part."""

from __future__ import annotations

from types import MappingProxyType

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, moe_config
from paged.models.layers.rope_config import rope_config
from paged.models.loading.hf_config import HfConfig

# What transformers has built in, and published configurations say.
_BUILT_IN = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}


class MiniMaxM2(Llama):
    """Experts in every layer, whose weights sum to 1 for each token."""

    model_type = "minimax_m2"
    renames = MappingProxyType({r"\.block_sparse_moe\.": ".mlp."})

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        for key, known in _BUILT_IN.items():
            hf.choice(key, known)
        moe = moe_config(
            hf,
            renormalize=True,
            scoring="sigmoid",
            correction_bias="e_score_correction_bias",
            float32_router=True,
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        rotary_dim = hf.optional_integer("rotary_dim")
        return decoder_config(
            hf,
            rope=rope_config(
                hf, theta=5e6, fraction=1.0 if rotary_dim is None else rotary_dim / hf.integer("head_dim", 128)
            ),
            qkv_bias=False,
            o_bias=False,
            qk_norm="width",
            moe=moe,
            num_mtp_layers=hf.integer("num_mtp_modules", 0, least=0),
        )
