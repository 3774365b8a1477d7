"""Families with latent attention: DeepSeek-V2 and V3 with their descendants, GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.models.families.experts import after_dense, sigmoid_experts
from paged.models.families.llama import family
from paged.models.layers.config import LatentConfig, MoeConfig
from paged.models.layers.decoder_config import count_layers, moe_config
from paged.models.layers.rope import rope_config, rope_section, yarn_magnitude
from paged.models.loading.hf_config import HfConfig


def _latent_attention(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of attention.

    The norms within it have their own eps, 1e-6 in the authors' code and in transformers, whatever rms_norm_eps says.
    With yarn, scores also grow with the square of its magnitude by `mscale_all_dim`.
    """
    num_heads = hf.integer("num_attention_heads")
    if (kv_heads := hf.integer("num_key_value_heads", num_heads)) != num_heads:
        raise UnsupportedError(f"{hf.source}: num_key_value_heads {kv_heads}, expected num_attention_heads {num_heads}")
    for key in ("head_dim", "qk_head_dim"):
        hf.value(key)  # transformers writes both, of other sizes; neither is read
    rank, nope, rope, v_head_dim = (
        hf.integer(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    for key, size in (("kv_lora_rank", rank), ("qk_rope_head_dim", rope)):
        if size % 16 or size > 512:
            raise UnsupportedError(f"{hf.source}: {key} {size}, known are multiples of 16 up to 512")
    section, scale = rope_section(hf), (nope + rope) ** -0.5
    if section.text("rope_type", section.text("type", "default")) != "default":
        scale *= yarn_magnitude(section.number("factor"), section.number("mscale_all_dim", 0.0, may_be_zero=True)) ** 2
    return {
        "num_heads": num_heads,
        "num_kv_heads": 1,
        "head_dim": rank + rope,
        "v_head_dim": rank,
        "latent": LatentConfig(
            rank=rank, q_rank=hf.optional_integer("q_lora_rank"), nope_dim=nope, rope_dim=rope, v_head_dim=v_head_dim
        ),
        "softmax_scale": scale,
        "num_mtp_layers": hf.integer("num_nextn_predict_layers", hf.integer("num_mtp_layers", 0, least=0), least=0),
    }


def _deepseek_v2(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V2 and V2-Lite (2024): softmax routing, for some from the best groups, and shared experts."""
    method = hf.choice("topk_method", "greedy", "group_limited_greedy")
    hf.choice("scoring_func", "softmax")
    hf.choice("norm_topk_prob", False)
    groups: dict[str, Any] = {}
    for key, name in (("n_group", "num_expert_groups"), ("topk_group", "topk_groups")):
        if hf.value(key) is not None and method == "group_limited_greedy":
            groups[name] = hf.integer(key)
    moe = moe_config(
        hf,
        size_key="moe_intermediate_size",
        count_key="n_routed_experts",
        renormalize=False,
        float32_router=True,
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        shared_size=hf.integer("moe_intermediate_size") * hf.integer("n_shared_experts"),
        **groups,
    )
    return {
        **_latent_attention(hf),
        "rope": rope_config(hf, interleaved=True),
        "mlp_bias": hf.flag("mlp_bias"),
        "moe": after_dense(hf, moe),
    }


def _deepseek_v3(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3, V3.1 and R1 (2024), Kimi K2 (Moonshot AI, 2025): sigmoid routing with a bias."""
    return {**_with_sigmoid_experts(hf), "moe": after_dense(hf, _experts(hf))}


def _glm4_moe_lite(hf: HfConfig) -> dict[str, Any]:
    """GLM-4.7-Flash (Z.ai, 2026): as DeepSeek-V3; `mlp_layer_types` may name the layers with experts."""
    moe, kinds = _experts(hf), hf.items("mlp_layer_types", str)
    if not kinds:
        return {**_with_sigmoid_experts(hf), "moe": after_dense(hf, moe)}
    if len(kinds) != count_layers(hf) or not {*kinds} <= {"dense", "sparse"}:
        raise CheckpointError(f"{hf.source}: mlp_layer_types {kinds}, expected dense or sparse for each layer")
    return {**_with_sigmoid_experts(hf), "moe": tuple(moe if kind == "sparse" else None for kind in kinds)}


def _experts(hf: HfConfig) -> MoeConfig:
    for key in ("scoring_func", "topk_method"):
        hf.choice(key, "sigmoid", "noaux_tc")  # published names of this routing
    return sigmoid_experts(hf)


def _with_sigmoid_experts(hf: HfConfig) -> dict[str, Any]:
    return {**_latent_attention(hf), "rope": rope_config(hf, interleaved=hf.flag("rope_interleave", True))}


# Keys are names in `architectures` of config.json.
DEEPSEEK = {
    "DeepseekV2ForCausalLM": family("deepseek_v2", _deepseek_v2),
    "DeepseekV3ForCausalLM": family("deepseek_v3", _deepseek_v3),
    "Glm4MoeLiteForCausalLM": family("glm4_moe_lite", _glm4_moe_lite),
}
