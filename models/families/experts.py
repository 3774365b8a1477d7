"""Families with experts by softmax; they differ from Llama only in fields of `decoder_config` and names of weights.

Fields are joined as in `dense`, which refuses a field given twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.models.families.dense import (
    HUNYUAN_RENAMES,
    NO_BIAS,
    granite_fields,
    hunyuan,
    mistral,
    window_if_used,
)
from paged.models.families.network import family
from paged.models.layers.attention_config import QueryGrowth
from paged.models.layers.config import MoeConfig
from paged.models.layers.decoder_config import (
    count_layers,
    for_kind,
    layer_windows,
    moe_config,
    rotating_layers,
    weights_dtype,
)
from paged.models.layers.rope import rope_config, rope_section
from paged.models.loading.hf_config import HfConfig

# Only these values are supported: `fused_moe` has the constants of the clamped SwiGLU built in, and the routing
# renormalises the chosen weights.
_GPT_OSS_BUILT_IN = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu", "norm_topk_prob": True}
# Published tensor names -> names here. transformers' own names for experts and router are accepted too.
GRANITE_RENAMES = {
    r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
    r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
    r"\.block_sparse_moe\.router\.layer\.": ".mlp.router.",
    r"\.block_sparse_moe\.": ".mlp.",
    r"\.shared_mlp\.input_linear\.": ".mlp.shared_experts.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": ".mlp.shared_experts.down_proj.",
}
_ERNIE_RENAMES = {r"\.gate\.moe_statics\.": ".moe_statics."}
MIXTRAL_RENAMES = {r"\.block_sparse_moe\.": ".mlp."}
_PHIMOE_RENAMES = {**MIXTRAL_RENAMES, r"\.mlp\.router\.weight$": ".mlp.gate.weight"}
MIXTRAL_NAMES = {"gate_name": "w1", "up_name": "w3", "down_name": "w2"}


def _ernie_moe(hf: HfConfig) -> dict[str, Any]:
    """ERNIE 4.5 MoE (Baidu, 2025): softmax routing with a bias that only chooses, and shared experts.

    Every `moe_layer_interval`-th layer of a range has experts.
    """
    hf.choice("use_bias", False)  # true would also give the head a bias
    size, layers = hf.integer("moe_intermediate_size"), count_layers(hf)
    moe = moe_config(
        hf,
        size_key="moe_intermediate_size",
        count_key="moe_num_experts",
        top_k_key="moe_k",
        renormalize=True,
        correction_bias="moe_statics.e_score_correction_bias",
        correction_in_row=True,
        float32_router=True,
        shared_size=size * hf.integer("moe_num_shared_experts", minimum=0),
    )
    step, first = hf.integer("moe_layer_interval"), hf.integer("moe_layer_start_index", minimum=0)
    last = hf.integer("moe_layer_end_index", minimum=-1)
    if last == -1:
        last = layers - 1
    experts: list[MoeConfig | None] = [None] * layers
    for layer in range(first, min(last + 1, layers)):
        if (layer + 1) % step == 0:
            experts[layer] = moe
    return dict(**NO_BIAS, rope=rope_config(hf, interleaved=True), moe=tuple(experts))


def _gpt_oss(hf: HfConfig) -> dict[str, Any]:
    """gpt-oss (OpenAI, 2025): attention with sinks, experts with biases.

    Every second layer, beginning with the first, has a window.
    """
    for key, known in _GPT_OSS_BUILT_IN.items():
        hf.choice(key, known)
    packing = hf.section("quantization_config")
    is_mxfp4 = packing is not None and packing.text("quant_method", "") == "mxfp4"
    moe = moe_config(
        hf,
        # Softmax over the chosen logits equals softmax over all, divided by its sum over the chosen.
        renormalize=True,
        bias=True,
        interleaved=True,
        stacked=True,
        transposed=True,
        router_name="router",
        is_mxfp4=is_mxfp4,
    )
    fields = {
        "window": layer_windows(hf, hf.optional_integer("sliding_window"), lambda layer: layer % 2 == 0),
        "sinks": True,
        "activation": "swiglu_oai",
        # The published config.json has no dtype. bfloat16 holds unpacked MXFP4 exactly.
        "dtype": weights_dtype(hf, "bfloat16"),
        "moe": moe,
    }
    if is_mxfp4:
        fields["quantization"] = None  # MXFP4 applies to experts alone
    return fields


def granite_moe(hf: HfConfig) -> dict[str, Any]:
    """Granite 3 MoE (IBM, 2024): experts in every layer, routing weights that sum to 1, and optionally a shared MLP."""
    shared_size = hf.integer("shared_intermediate_size", 0, minimum=0)
    moe = moe_config(hf, renormalize=True, router_name="router", shared_size=shared_size)
    return dict(**granite_fields(hf), moe=moe, fused_mlp=True)


def _hunyuan_moe(hf: HfConfig) -> dict[str, Any]:
    """Hunyuan-A13B (Tencent, 2025): Hunyuan with experts and a shared MLP in every layer; `moe_topk` may be a list."""
    layers = count_layers(hf)
    if isinstance(hf.value("moe_topk"), list):
        top_ks = hf.items("moe_topk", int)
    else:
        top_ks = [hf.integer("moe_topk")] * layers
    if len(top_ks) != layers:
        raise CheckpointError(f"{hf.source}: {len(top_ks)} entries in moe_topk for {layers} layers")
    experts: list[MoeConfig] = []
    for top_k in top_ks:
        moe = moe_config(
            hf.overridden({"moe_topk": top_k}),
            top_k_key="moe_topk",
            renormalize=True,
            float32_router=True,
            router_name="gate.wg",
            shared_size=hf.integer("intermediate_size"),
            shared_name="shared_mlp",
        )
        experts.append(moe)
    return dict(**hunyuan(hf), moe=tuple(experts))


def _llama4(hf: HfConfig) -> dict[str, Any]:
    """Llama 4 (Meta, 2025), text only: each token takes one expert; Llama Guard 4 has no experts.

    Layers that rotate see only their chunk and normalise heads without weights. In the other layers queries grow.

    The model normalises heads after the rotation. Unless the rotation scales heads, norms before it give the same
    result in fewer launches.
    """
    rotates, rope = rotating_layers(hf), rope_config(hf, interleaved=True)
    growth: QueryGrowth | None = QueryGrowth(hf.number("attn_scale"), hf.integer("floor_scale"), offset=1)
    if not hf.value("attn_temperature_tuning"):  # a number or a bool in published files
        growth = None
    norm = None
    if hf.flag("use_qk_norm"):
        norm = "unit"
    rotates_first = norm is not None and rope.attention_factor != 1
    layers = range(count_layers(hf))
    if hf.value("moe_layers") is not None:
        hf.integer("interleave_moe_layer_step", minimum=0)
        sparse = hf.items("moe_layers", int)
    else:
        step = hf.integer("interleave_moe_layer_step")
        sparse = list(layers[step - 1 :: step])
    moe = None
    if sparse:
        hf.choice("num_experts_per_tok", 1)
        moe = moe_config(
            hf,
            renormalize=False,
            scoring="sigmoid",
            weighs_inputs=True,
            shared_size=hf.integer("intermediate_size"),
            shared_name="shared_expert",
            router_name="router",
            transposed=True,
        )
    # `layer_types` names the layers with chunks. If it is absent, the layers that rotate have chunks.
    max_positions = hf.integer("max_position_embeddings")
    size = hf.optional_integer("attention_chunk_size") or max_positions
    chunks = layer_windows(hf, size, lambda layer: rotates[layer] == 1, "chunked_attention")
    return {
        "intermediate_size": hf.integer("intermediate_size_mlp"),
        "mlp_name": "feed_forward",
        "moe": tuple(moe if layer in sparse else None for layer in layers),
        "rope": for_kind(rotates, 1, rope),
        "qk_norm": for_kind(rotates, 1, norm),
        "norm_after_rope": for_kind(rotates, 1, rotates_first, otherwise=False),
        "query_growth": for_kind(rotates, 0, growth),
        "chunk_size": chunks if size < max_positions else None,
    }


def _mixtral(hf: HfConfig) -> dict[str, Any]:
    """Mixtral (Jiang et al., 2023): experts in every layer, routing weights that sum to 1; no window by default."""
    hf.choice("norm_topk_prob", True)
    return dict(**mistral(hf), moe=moe_config(hf, renormalize=True, **MIXTRAL_NAMES))


def _olmoe(hf: HfConfig) -> dict[str, Any]:
    """OLMoE (Muennighoff et al., 2024): norms over all query and key heads together, experts in every layer."""
    return {"qk_norm": "width", "moe": moe_config(hf, renormalize=hf.flag("norm_topk_prob"))}


def _phimoe(hf: HfConfig) -> dict[str, Any]:
    """Phi-3.5-MoE (Microsoft, 2024): two experts a token by SparseMixer, layer norms, a head with a bias."""
    hf.choice("num_experts_per_tok", 2)
    margin = 2 * hf.number("router_jitter_noise", may_be_zero=True)
    hf.value("input_jitter_noise")  # for training
    rope, section = rope_config(hf), rope_section(hf)
    if rope.kind == "longrope":
        factor = section.number("short_mscale")
        if section.number("long_mscale") != factor:
            raise UnsupportedError(f"{section.source}: long_mscale, expected short_mscale {factor}")
        rope = replace(rope, attention_factor=factor)
    else:  # transformers applies short_mscale and long_mscale to every other kind of rotation, too
        section.choice("rope_type", "default")
    return {
        "rope": rope,
        "window": hf.optional_integer("sliding_window"),
        "subtracts_mean": True,
        "bias": True,
        "head_bias": hf.flag("lm_head_bias"),
        "moe": moe_config(hf, renormalize=False, mixer_margin=margin, **MIXTRAL_NAMES),
    }


def _qwen2_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al., 2024): experts beside a gated MLP for all tokens.

    Among the first layers, every second has a window.
    """
    window, end = window_if_used(hf), hf.integer("max_window_layers", minimum=0)
    return {
        "window": layer_windows(hf, window, lambda layer: window is not None and layer % 2 == 0 and layer < end),
        "qkv_bias": hf.flag("qkv_bias"),
        "o_bias": False,
        "moe": qwen_experts(
            hf,
            renormalize=hf.flag("norm_topk_prob"),
            shared_size=hf.integer("shared_expert_intermediate_size"),
            shared_name="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    }


def _qwen3_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen3 MoE (Yang et al., 2025): most layers have experts instead of the MLP; all layers have the same window."""
    return {
        "window": window_if_used(hf),
        "qk_norm": "head",
        "moe": qwen_experts(hf, renormalize=hf.flag("norm_topk_prob")),
    }


def _qwen3_vl_moe(hf: HfConfig) -> dict[str, Any]:
    """Text part of Qwen3-VL MoE (Qwen Team, 2025): routing weights of the chosen experts always sum to 1."""
    hf.choice("norm_topk_prob", True)
    return {"qk_norm": "head", "moe": qwen_experts(hf, renormalize=True, transposed=None)}


def qwen_experts(hf: HfConfig, **fields: Any) -> tuple[MoeConfig | None, ...]:
    """Return experts for every decoder_sparse_step-th layer except mlp_only_layers."""
    step, dense = hf.integer("decoder_sparse_step"), set(hf.items("mlp_only_layers", int))
    moe = moe_config(hf, size_key="moe_intermediate_size", **fields)
    experts: list[MoeConfig | None] = []
    for layer in range(count_layers(hf)):
        is_sparse = layer not in dense and (layer + 1) % step == 0
        experts.append(moe if is_sparse else None)
    return tuple(experts)


# Name in `architectures` of config.json -> family.
EXPERTS = {
    "Ernie4_5_MoeForCausalLM": family("ernie4_5_moe", _ernie_moe, _ERNIE_RENAMES),
    "GptOssForCausalLM": family("gpt_oss", _gpt_oss),
    "GraniteMoeForCausalLM": family("granitemoe", granite_moe, GRANITE_RENAMES),
    "GraniteMoeSharedForCausalLM": family("granitemoeshared", granite_moe, GRANITE_RENAMES),
    "HunYuanMoEV1ForCausalLM": family("hunyuan_v1_moe", _hunyuan_moe, HUNYUAN_RENAMES),
    "Llama4ForCausalLM": family("llama4_text", _llama4),
    "MixtralForCausalLM": family("mixtral", _mixtral, MIXTRAL_RENAMES),
    "OlmoeForCausalLM": family("olmoe", _olmoe),
    "PhimoeForCausalLM": family("phimoe", _phimoe, _PHIMOE_RENAMES),
    "Qwen2MoeForCausalLM": family("qwen2_moe", _qwen2_moe),
    "Qwen3MoeForCausalLM": family("qwen3_moe", _qwen3_moe),
}
# Text parts of multimodal models; they have no architecture of their own.
EXPERT_PARTS = (family("qwen3_vl_moe_text", _qwen3_vl_moe),)
