"""GLM-4 (GLM Team, 2024; the 0414 series, 2025) and GLM-4.5 to 4.7 (GLM Team, 2025): half of each head rotates."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import count_layers, decoder_config, moe_config
from paged.models.layers.rope_config import rope_config
from paged.models.loading.hf_config import HfConfig


class Glm(Llama):
    """Llama with biases before attention, rotation of neighbours, and gate and up in one tensor."""

    model_type = "glm"
    after_attention: str | None = None
    after_mlp: str | None = None

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(
            hf,
            rope=rope_config(hf, fraction=0.5, interleaved=True),
            qkv_bias=hf.flag("attention_bias", True),
            o_bias=False,
            fused_mlp=True,
            after_attention=cls.after_attention,
            after_mlp=cls.after_mlp,
        )


class Glm4(Glm):
    """GLM with norms behind attention and MLP, too."""

    model_type = "glm4"
    after_attention, after_mlp = "post_self_attn_layernorm", "post_mlp_layernorm"


class Glm4Moe(Llama):
    """Experts by sigmoid and a bias, out of the best groups, beside shared ones, behind dense layers."""

    model_type = "glm4_moe"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        size, num_dense = hf.integer("moe_intermediate_size"), hf.integer("first_k_dense_replace", 1, least=0)
        moe = moe_config(
            hf,
            size_key="moe_intermediate_size",
            count_key="n_routed_experts",
            renormalize=hf.flag("norm_topk_prob", True),
            scoring="sigmoid",
            correction_bias="gate.e_score_correction_bias",
            float32_router=True,
            num_expert_groups=hf.integer("n_group", 1),
            topk_groups=hf.integer("topk_group", 1),
            routed_scaling_factor=hf.number("routed_scaling_factor", 1.0),
            shared_size=size * hf.integer("n_shared_experts", 1),
        )
        return decoder_config(
            hf,
            rope=rope_config(hf, fraction=0.5),
            o_bias=False,
            qk_norm="head" if hf.flag("use_qk_norm") else None,
            moe=tuple(None if layer < num_dense else moe for layer in range(count_layers(hf))),
            num_mtp_layers=hf.integer("num_nextn_predict_layers", 0, least=0),
        )
