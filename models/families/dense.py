"""Families without experts; they differ from Llama only in fields of `decoder_config`.

A family that extends another joins both fields by `dict(**others, name=value)`, which refuses a field given twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged.errors import CheckpointError
from paged.models.families.network import family
from paged.models.layers.attention_config import QueryGrowth
from paged.models.layers.decoder_config import (
    ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    by_window,
    for_kind,
    layer_windows,
    periodic_windows,
    read_head_dim,
    rotating_layers,
)
from paged.models.layers.rope import rope_config, rope_section, ropes_by_window
from paged.models.loading.hf_config import HfConfig

NO_BIAS = {"qkv_bias": False, "o_bias": False}
# Patterns in checkpoint names -> names here: the norms of query and key heads in Hunyuan, the MLP in StarCoder2.
HUNYUAN_RENAMES = {r"\.query_layernorm\.": ".q_norm.", r"\.key_layernorm\.": ".k_norm."}
_STARCODER_RENAMES = {r"\.mlp\.c_fc\.": ".mlp.up_proj.", r"\.mlp\.c_proj\.": ".mlp.down_proj."}
_GLM4_NORMS = {"after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"}
# `DecoderConfig` fields of families with norms only after attention and MLP.
NORMS_AFTER: dict[str, Any] = {
    "before_attention": None,
    "after_attention": "post_attention_layernorm",
    "before_mlp": None,
    "after_mlp": "post_feedforward_layernorm",
}


def _apertus(hf: HfConfig) -> dict[str, Any]:
    """Apertus (Swiss AI Initiative, 2025): MLPs without a gate, with an activation that has learned parameters."""
    return {
        "gated": False,
        "activation": PLAIN_ACTIVATIONS[hf.choice("hidden_act", "xielu")],
        "qk_norm": "head",
        "before_attention": "attention_layernorm",
        "before_mlp": "feedforward_layernorm",
    }


def _arcee(hf: HfConfig) -> dict[str, Any]:
    """Arcee's AFM (Arcee AI, 2025): MLPs without a gate."""
    return dict(**_no_gate(hf), mlp_bias=hf.flag("mlp_bias"))


def _no_gate(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of MLPs without a gate."""
    return {"gated": False, "activation": PLAIN_ACTIVATIONS[hf.choice("hidden_act", "relu2", "gelu_pytorch_tanh")]}


def _ernie(hf: HfConfig) -> dict[str, Any]:
    """ERNIE 4.5 (Baidu, 2025): heads rotate in neighbouring pairs; one key sets all biases."""
    has_bias = hf.flag("use_bias")
    return {
        "rope": rope_config(hf, interleaved=True),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": has_bias,
    }


def _exaone4(hf: HfConfig) -> dict[str, Any]:
    """EXAONE 4 (LG AI Research, 2025): norms after attention and MLP, and norms of heads."""
    return dict(**NORMS_AFTER, **exaone_attention(hf))


def exaone_attention(hf: HfConfig) -> dict[str, Any]:
    """Return the fields of attention of EXAONE 4 and K-EXAONE.

    Every fourth layer sees all tokens and does not rotate. In a model without windows, all layers rotate.
    """
    window, pattern = hf.optional_integer("sliding_window"), hf.value("sliding_window_pattern")
    # Published models also give a pattern such as "LLLG", beside `layer_types`.
    period = 1
    if window is not None and not isinstance(pattern, str):
        period = hf.integer("sliding_window_pattern")
    windows, rope = layer_windows(hf, window, lambda layer: (layer + 1) % period != 0), rope_config(hf)
    rope_of_all = None
    if window is None:
        rope_of_all = rope
    ropes = by_window(windows, rope_of_all, rope)
    return dict(**NO_BIAS, window=windows, rope=ropes, qk_norm="head")


def _gemma(hf: HfConfig) -> dict[str, Any]:
    """Gemma (Gemma Team, 2024): "gelu" means its approximation by tanh."""
    activation = ACTIVATIONS[hf.choice("hidden_act", *ACTIVATIONS)]
    if activation == "gelu":
        activation = "gelu_tanh"
    return {
        "activation": activation,
        "embedding_scale": hf.integer("hidden_size") ** 0.5,
        "zero_centred": True,
    }


def _gemma2(hf: HfConfig) -> dict[str, Any]:
    """Gemma 2 (Gemma Team, 2024): norms before and after attention and MLP, soft caps of scores and logits.

    Every second layer, beginning with the first, has a window.
    """
    window = hf.optional_integer("sliding_window")
    return dict(
        **gemma_fields(hf),
        zero_centred=True,
        softcap=hf.softcap("attn_logit_softcapping"),
        softmax_scale=hf.number("query_pre_attn_scalar") ** -0.5,
        window=layer_windows(hf, window, lambda layer: layer % 2 == 0),
    )


def _gemma3(hf: HfConfig) -> dict[str, Any]:
    """Gemma 3 (Gemma Team, 2025), text only.

    Every sixth layer sees all tokens; the others have a window and another rotation.
    """
    windows = periodic_windows(hf, hf.integer("sliding_window_pattern"))
    ropes = ropes_by_window(hf, hf.number("rope_local_base_freq"))
    return dict(
        **gemma_fields(hf),
        zero_centred=True,
        softmax_scale=hf.number("query_pre_attn_scalar") ** -0.5,
        window=windows,
        rope=by_window(windows, *ropes),
        qk_norm="head",
    )


def gemma_fields(hf: HfConfig) -> dict[str, Any]:
    """Return the fields that Gemma 2, 3 and 4 share."""
    return {
        "logits_softcap": hf.softcap("final_logit_softcapping"),
        "activation": ACTIVATIONS[hf.choice("hidden_activation", *ACTIVATIONS)],
        "embedding_scale": hf.integer("hidden_size") ** 0.5,
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }


def _glm(hf: HfConfig) -> dict[str, Any]:
    """GLM-4 (GLM Team, 2024): biases before attention; half of each head rotates, in neighbouring pairs."""
    return dict(**_glm_fields(hf), qkv_bias=hf.flag("attention_bias"))


def _glm4(hf: HfConfig) -> dict[str, Any]:
    """GLM-4-0414 (GLM Team, 2025): GLM-4 with additional norms after attention and MLP."""
    return dict(**_glm(hf), **_GLM4_NORMS)


def _glm4v(hf: HfConfig) -> dict[str, Any]:
    """Text part of GLM-4.1V (GLM Team, 2025): GLM-4-0414, always with biases before attention."""
    hf.value("attention_bias")
    return dict(**_glm_fields(hf), **_GLM4_NORMS, qkv_bias=True)


def _glm_ocr(hf: HfConfig) -> dict[str, Any]:
    """Text part of GLM-OCR (GLM Team, 2026): the text part of GLM-4.1V without biases."""
    num_mtp_layers = hf.integer("num_nextn_predict_layers", 0, minimum=0)
    return dict(**_glm_fields(hf), **_GLM4_NORMS, qkv_bias=False, num_mtp_layers=num_mtp_layers)


def _glm_fields(hf: HfConfig) -> dict[str, Any]:
    return {"rope": rope_config(hf, is_partial=True, interleaved=True), "o_bias": False, "fused_mlp": True}


def _granite(hf: HfConfig) -> dict[str, Any]:
    """Granite 3 (IBM, 2024)."""
    return dict(**granite_fields(hf), mlp_bias=hf.flag("mlp_bias"))


def granite_fields(hf: HfConfig) -> dict[str, Any]:
    """Return the multipliers of embeddings, scores, residuals and logits."""
    return {
        "softmax_scale": hf.number("attention_multiplier"),
        "embedding_scale": hf.number("embedding_multiplier"),
        "residual_scale": hf.number("residual_multiplier"),
        "logits_scale": 1 / hf.number("logits_scaling"),
    }


def _helium(hf: HfConfig) -> dict[str, Any]:
    """Helium (Kyutai, 2025): heads rotate in neighbouring pairs."""
    return {"rope": rope_config(hf, interleaved=True), "o_bias": False, "mlp_bias": hf.flag("mlp_bias")}


def hunyuan(hf: HfConfig) -> dict[str, Any]:
    """Hunyuan (Tencent, 2025): heads rotate before their norms.

    The rotation of type "dynamic" with an `alpha` has a larger theta, at any length.
    """
    rope, section, size = rope_config(hf), rope_section(hf), read_head_dim(hf)
    is_dynamic = section.text("rope_type", section.text("type", "default")) == "dynamic"
    if is_dynamic and section.value("alpha") is not None:
        if size == 2:
            raise CheckpointError(
                f"{hf.source}: head_dim 2 with alpha, expected more: alpha grows by 1 / (head_dim - 2)"
            )
        rope = replace(rope, theta=rope.theta * section.number("alpha") ** (size / (size - 2)))
    return {"rope": rope, "qk_norm": "head", "norm_after_rope": True}


def mistral(hf: HfConfig) -> dict[str, Any]:
    """Mistral (Jiang et al., 2023): all layers have the window `sliding_window`, or none if it is null."""
    return dict(**NO_BIAS, window=hf.optional_integer("sliding_window"))


def _ministral(hf: HfConfig) -> dict[str, Any]:
    """Ministral 8B (Mistral AI, 2024): Mistral with a window in some layers only."""
    window = hf.optional_integer("sliding_window")
    return dict(**NO_BIAS, window=layer_windows(hf, window, lambda layer: window is not None))


def _ministral3(hf: HfConfig) -> dict[str, Any]:
    """Ministral 3 (Mistral AI, 2025): queries grow with the log of their position beyond the pre-training length."""
    return dict(**mistral(hf), query_growth=query_growth(hf))


def query_growth(hf: HfConfig) -> QueryGrowth:
    """Return the growth of queries that the rotation's section gives."""
    rope = rope_section(hf)
    weight = rope.number("llama_4_scaling_beta", may_be_zero=True)
    return QueryGrowth(weight, rope.integer("original_max_position_embeddings"), offset=0)


def _nemotron(hf: HfConfig) -> dict[str, Any]:
    """Nemotron-4 and Minitron (Nvidia, 2024): layer norms, MLPs without a gate; part of each head rotates."""
    return dict(
        **_no_gate(hf),
        mlp_bias=hf.flag("mlp_bias"),
        rope=rope_config(hf, is_partial=True),
        eps=hf.number("norm_eps"),
        zero_centred=True,
        subtracts_mean=True,
        bias=True,
    )


def _olmo2(hf: HfConfig) -> dict[str, Any]:
    """OLMo 2 (OLMo Team, 2024): norms after attention and MLP, and over all query and key heads together."""
    return dict(**NORMS_AFTER, qk_norm="width")


def _olmo3(hf: HfConfig) -> dict[str, Any]:
    """OLMo 3 (OLMo Team, 2025): OLMo 2 with a window, and an unscaled rotation, in three of four layers."""
    windows = periodic_windows(hf, 4)
    ropes = ropes_by_window(hf, hf.defaults["rope_theta"])
    return dict(**_olmo2(hf), window=windows, rope=by_window(windows, *ropes))


def _phi3(hf: HfConfig) -> dict[str, Any]:
    """Phi-3 (Abdin et al., 2024) and Phi-4: a checkpoint stores QKV as one tensor, and gate and up as one.

    Only part of each head rotates; longrope scaling is possible.
    """
    return dict(**mistral(hf), rope=rope_config(hf, is_partial=True), fused=True, fused_mlp=True)


def _qwen2(hf: HfConfig) -> dict[str, Any]:
    """Qwen2 and Qwen2.5 (Yang et al., 2024): biases before attention; a window in some layers."""
    hf.value("attention_bias")
    return {"window": _qwen_windows(hf), "qkv_bias": True, "o_bias": False}


def _qwen3(hf: HfConfig) -> dict[str, Any]:
    """Qwen3 (Yang et al., 2025): a norm of every query and key head; windows as in Qwen2."""
    return {"window": _qwen_windows(hf), "qk_norm": "head"}


def _qwen_windows(hf: HfConfig) -> tuple[int | None, ...]:
    """Return each layer's window by `layer_types` or `max_window_layers`, if `use_sliding_window` is true."""
    window = window_if_used(hf)
    first = 0
    if window is not None:
        first = hf.integer("max_window_layers", minimum=0)
    return layer_windows(hf, window, lambda layer: window is not None and layer >= first)


def window_if_used(hf: HfConfig) -> int | None:
    """Return `sliding_window` if `use_sliding_window` is true, else None."""
    hf.value("sliding_window")
    if not hf.flag("use_sliding_window"):
        return None
    return hf.optional_integer("sliding_window")


def _seed_oss(hf: HfConfig) -> dict[str, Any]:
    """Seed-OSS (ByteDance, 2025): a separate key sets the bias of the projection after attention."""
    return {
        "qkv_bias": hf.flag("attention_bias"),
        "o_bias": hf.flag("attention_out_bias"),
        "mlp_bias": hf.flag("mlp_bias"),
    }


def _starcoder2(hf: HfConfig) -> dict[str, Any]:
    """StarCoder2 (Lozhkov et al., 2024): layer norms, biases everywhere, MLPs without a gate."""
    has_bias = hf.flag("use_bias")
    return dict(
        **_no_gate(hf),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        window=hf.optional_integer("sliding_window"),
        eps=hf.number("norm_epsilon"),
        subtracts_mean=True,
        bias=True,
    )


def _smollm3(hf: HfConfig) -> dict[str, Any]:
    """SmolLM3 (Hugging Face, 2025): every fourth layer does not rotate; only such layers can have a window."""
    rotates, rope, window = rotating_layers(hf), rope_config(hf), window_if_used(hf)
    return {
        "rope": for_kind(rotates, 1, rope),
        "window": layer_windows(hf, window, lambda layer: window is not None and not rotates[layer]),
        "mlp_bias": hf.flag("mlp_bias"),
    }


# Name in `architectures` of config.json -> family.
DENSE = {
    "ApertusForCausalLM": family("apertus", _apertus),
    "ArceeForCausalLM": family("arcee", _arcee),
    "Ernie4_5ForCausalLM": family("ernie4_5", _ernie),
    "Exaone4ForCausalLM": family("exaone4", _exaone4),
    "GemmaForCausalLM": family("gemma", _gemma),
    "Gemma2ForCausalLM": family("gemma2", _gemma2),
    "Gemma3ForCausalLM": family("gemma3_text", _gemma3),
    "GlmForCausalLM": family("glm", _glm),
    "Glm4ForCausalLM": family("glm4", _glm4),
    "GraniteForCausalLM": family("granite", _granite),
    "HeliumForCausalLM": family("helium", _helium),
    "HunYuanDenseV1ForCausalLM": family("hunyuan_v1_dense", hunyuan, HUNYUAN_RENAMES),
    "MistralForCausalLM": family("mistral", mistral),
    "MinistralForCausalLM": family("ministral", _ministral),
    "Ministral3ForCausalLM": family("ministral3", _ministral3),
    "NemotronForCausalLM": family("nemotron", _nemotron),
    "Olmo2ForCausalLM": family("olmo2", _olmo2),
    "Olmo3ForCausalLM": family("olmo3", _olmo3),
    "Phi3ForCausalLM": family("phi3", _phi3),
    "Qwen2ForCausalLM": family("qwen2", _qwen2),
    "Qwen3ForCausalLM": family("qwen3", _qwen3),
    "SeedOssForCausalLM": family("seed_oss", _seed_oss),
    "SmolLM3ForCausalLM": family("smollm3", _smollm3),
    "Starcoder2ForCausalLM": family("starcoder2", _starcoder2, _STARCODER_RENAMES),
}
# Text parts of multimodal models; they have no architecture of their own.
DENSE_PARTS = (
    family("glm4v_text", _glm4v),
    family("glm_ocr_text", _glm_ocr),
    family("qwen2_vl_text", _qwen2),
    family("qwen2_5_vl_text", _qwen2),
    family("qwen3_vl_text", lambda hf: {"qk_norm": "head"}),  # Qwen3 without windows (Qwen Team, 2025)
)
