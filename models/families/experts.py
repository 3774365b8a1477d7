"""Families with experts; they differ from Llama only in fields of `decoder_config` and names of weights.

Fields are joined as in `dense`: none is given twice.
"""

from __future__ import annotations

from typing import Any

from paged.errors import CheckpointError
from paged.kernels.common.attention.plan import MAX_HEAD_DIM
from paged.kernels.common.scalars import shown
from paged.models.families.dense import (
    HUNYUAN_RENAMES,
    NO_BIAS,
    exaone_attention,
    granite_fields,
    hunyuan,
    mistral,
    window_if_used,
)
from paged.models.families.llama import family
from paged.models.layers.config import MoeConfig, QueryGrowth
from paged.models.layers.decoder_config import (
    by_window,
    count_layers,
    layer_windows,
    moe_config,
    read_head_dim,
    rotating_layers,
    weights_dtype,
)
from paged.models.layers.rope import rope_config, ropes_by_kind
from paged.models.loading.hf_config import HfConfig

# Constants of `fused_moe`'s clamped SwiGLU, and renormalised weights of the chosen experts.
_GPT_OSS_BUILT_IN = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu", "norm_topk_prob": True}
# Constants of MiniMax-M2 in transformers, repeated by published configurations.
_MINIMAX_BUILT_IN = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
}
# Published names; transformers' own names for experts and router are accepted too.
GRANITE_RENAMES = {
    r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
    r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
    r"\.block_sparse_moe\.router\.layer\.": ".mlp.router.",
    r"\.block_sparse_moe\.": ".mlp.",
    r"\.shared_mlp\.input_linear\.": ".mlp.shared_experts.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": ".mlp.shared_experts.down_proj.",
}
_ERNIE_RENAMES = {r"\.gate\.moe_statics\.": ".moe_statics."}
_EXAONE_RENAMES = {r"\.gate\.e_score_correction_bias$": ".e_score_correction_bias"}
_MIMO_RENAMES = {r"\.attention_sink_bias$": ".sinks"}
_MIXTRAL_RENAMES = {r"\.block_sparse_moe\.": ".mlp."}
_MIXTRAL_NAMES = {"gate_name": "w1", "up_name": "w3", "down_name": "w2"}


def _dots1(hf: HfConfig) -> dict[str, Any]:
    """dots.llm1 (rednote, 2025): norms of heads, experts as in GLM-4.5; the last layers may have a window."""
    _check_sigmoid(hf)
    hf.value("use_sliding_window")  # published, and ignored
    window, first = hf.optional_integer("sliding_window"), hf.integer("max_window_layers", least=0)
    return {
        "window": layer_windows(hf, window, lambda layer: window is not None and layer >= first),
        "qk_norm": "head",
        "moe": after_dense(hf, sigmoid_experts(hf)),
    }


def _ernie_moe(hf: HfConfig) -> dict[str, Any]:
    """ERNIE 4.5 MoE (Baidu, 2025): a bias chooses experts by softmax; every `moe_layer_interval`-th layer of a range
    has experts, and shared ones."""
    hf.choice("use_bias", False)  # the head would have one too
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
        shared_size=size * hf.integer("moe_num_shared_experts", least=0),
    )
    step, first = hf.integer("moe_layer_interval"), hf.integer("moe_layer_start_index", least=0)
    last = hf.integer("moe_layer_end_index", least=-1)
    if last == -1:
        last = layers - 1
    experts: list[MoeConfig | None] = [None] * layers
    for layer in range(first, min(last + 1, layers)):
        if (layer + 1) % step == 0:
            experts[layer] = moe
    return dict(**NO_BIAS, rope=rope_config(hf, interleaved=True), moe=tuple(experts))


def _glm4_moe(hf: HfConfig) -> dict[str, Any]:
    """GLM-4.5 to 4.7 (GLM Team, 2025): sigmoid routing with a bias, experts from the best groups, shared experts; the
    first layers are dense."""
    return {
        "rope": rope_config(hf, is_partial=True),
        "o_bias": False,
        "qk_norm": "head" if hf.flag("use_qk_norm") else None,
        "moe": after_dense(hf, sigmoid_experts(hf)),
        "num_mtp_layers": hf.integer("num_nextn_predict_layers", 0, least=0),
    }


def sigmoid_experts(hf: HfConfig, shared_size: int | None = None) -> MoeConfig:
    """Return experts with the routing of DeepSeek-V3.

    shared_size: intermediate size of the shared MLP; None for `n_shared_experts` times that of an expert.
    """
    bias = "gate.e_score_correction_bias"
    return grouped_experts(hf, shared_size, scoring="sigmoid", correction_bias=bias, float32_router=True)


def grouped_experts(hf: HfConfig, shared_size: int | None = None, **fields: Any) -> MoeConfig:
    """Return experts from the best groups beside a shared MLP, with the routing in `fields` of MoeConfig."""
    shared_by_count = hf.integer("moe_intermediate_size") * hf.integer("n_shared_experts")
    if shared_size is None:
        shared_size = shared_by_count
    return moe_config(
        hf,
        size_key="moe_intermediate_size",
        count_key="n_routed_experts",
        renormalize=hf.flag("norm_topk_prob"),
        num_expert_groups=hf.integer("n_group"),
        topk_groups=hf.integer("topk_group"),
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        shared_size=shared_size,
        **fields,
    )


def after_dense(hf: HfConfig, moe: MoeConfig) -> tuple[MoeConfig | None, ...]:
    """Return experts for all layers except the first `first_k_dense_replace`."""
    num_dense = hf.integer("first_k_dense_replace", least=0)
    return tuple(None if layer < num_dense else moe for layer in range(count_layers(hf)))


def by_mlp_layer_types(hf: HfConfig, moe: MoeConfig) -> tuple[MoeConfig | None, ...]:
    """Return experts for the layers that `mlp_layer_types` calls sparse; without it, see `after_dense`.

    Raises:
        CheckpointError: there are not as many types as layers, or one is unknown.
    """
    _check_sigmoid(hf)
    by_count, kinds = after_dense(hf, moe), hf.items("mlp_layer_types", str)
    if not kinds:
        return by_count
    if len(kinds) != count_layers(hf) or not {*kinds} <= {"dense", "sparse"}:
        raise CheckpointError(f"{hf.source}: mlp_layer_types {shown(kinds)}, expected dense or sparse for each layer")
    return tuple(moe if kind == "sparse" else None for kind in kinds)


def _check_repeated(hf: HfConfig, key: str, expected: list[Any]) -> None:
    """Raise CheckpointError unless a list that repeats what other keys say is absent or as expected."""
    values = hf.value(key)
    if values is not None and values != expected:
        raise CheckpointError(f"{hf.source}: {key} = {shown(values)}, expected {shown(expected)} by other keys")


def _check_sigmoid(hf: HfConfig) -> None:
    """Raise UnsupportedError unless the names of the routing are the published ones of sigmoid routing."""
    for key in ("scoring_func", "topk_method"):
        hf.choice(key, "sigmoid", "noaux_tc")


def _exaone_moe(hf: HfConfig) -> dict[str, Any]:
    """K-EXAONE (LG AI Research, 2025): attention of EXAONE 4, sigmoid routing with a bias, shared experts."""
    moe = moe_config(
        hf,
        size_key="moe_intermediate_size",
        renormalize=hf.flag("norm_topk_prob"),
        scoring="sigmoid",
        correction_bias="e_score_correction_bias",
        float32_router=True,
        num_expert_groups=hf.integer("n_group"),
        topk_groups=hf.integer("topk_group"),
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        shared_size=hf.integer("moe_intermediate_size") * hf.integer("num_shared_experts"),
    )
    experts = by_mlp_layer_types(hf, moe)
    _check_repeated(hf, "is_moe_layer", [layer is not None for layer in experts])
    hf.choice("first_last_k_dense_replace", 1)  # an older name of first_k_dense_replace
    return dict(**exaone_attention(hf), moe=experts)


def _gpt_oss(hf: HfConfig) -> dict[str, Any]:
    """gpt-oss (OpenAI, 2025): attention with sinks, experts with biases.

    Every second layer from the first on has a window.
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
        fields["quantization"] = None  # the experts' own
    return fields


def granite_moe(hf: HfConfig) -> dict[str, Any]:
    """Granite 3 MoE (IBM, 2024): experts in every layer with weights that sum to 1, and optionally a shared MLP."""
    shared_size = hf.integer("shared_intermediate_size", 0, least=0)
    moe = moe_config(hf, renormalize=True, router_name="router", shared_size=shared_size)
    return dict(**granite_fields(hf), moe=moe, fused_mlp=True)


def _hy3(hf: HfConfig) -> dict[str, Any]:
    """Hy3 (Tencent, 2026): norms of heads, sigmoid routing with a bias, shared experts; the first layer is dense."""
    for key in ("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm"):
        hf.choice(key, True)
    for part in ("attention_fp32_softmax", "lm_head_fp32", "moe_fp32_combine"):
        hf.value(f"enable_{part}")  # roundings of the authors' code
    size = hf.integer("moe_intermediate_size")
    hf.choice("expert_hidden_dim", size)
    hf.value("use_grouped_mm")
    moe = moe_config(
        hf,
        size_key="moe_intermediate_size",
        renormalize=True,
        scoring="sigmoid",
        correction_bias="expert_bias",
        float32_router=True,
        routed_scaling_factor=hf.number("router_scaling_factor"),
        shared_size=size * hf.integer("num_shared_experts"),
        shared_name="shared_mlp",
        router_name="router.gate",
    )
    return {
        "qk_norm": "head",
        "mlp_bias": hf.flag("mlp_bias"),
        "moe": by_mlp_layer_types(hf, moe),
        "num_mtp_layers": hf.integer("num_nextn_predict_layers", 0, least=0),
    }


def _hunyuan_moe(hf: HfConfig) -> dict[str, Any]:
    """Hunyuan-A13B (Tencent, 2025): Hunyuan with experts and a shared MLP in every layer; `moe_topk` may be a list."""
    layers = count_layers(hf)
    listed = isinstance(hf.value("moe_topk"), list)
    top_ks = hf.items("moe_topk", int) if listed else [hf.integer("moe_topk")] * layers
    if len(top_ks) != layers:
        raise CheckpointError(f"{hf.source}: {len(top_ks)} entries in moe_topk for {layers} layers")
    moe = {
        top_k: moe_config(
            hf.overridden({"moe_topk": top_k}),
            top_k_key="moe_topk",
            renormalize=True,
            float32_router=True,
            router_name="gate.wg",
            shared_size=hf.integer("intermediate_size"),
            shared_name="shared_mlp",
        )
        for top_k in set(top_ks)
    }
    return dict(**hunyuan(hf), moe=tuple(moe[top_k] for top_k in top_ks))


def _laguna(hf: HfConfig) -> dict[str, Any]:
    """Laguna (Poolside, 2026): layers have their own numbers of query heads, whose outputs are gated by softplus;
    sigmoid routing with a bias and a shared MLP; another rotation in layers with a window."""
    hf.choice("attention_bias", False)  # the gate has none
    hf.choice("moe_apply_router_weight_on_input", False)
    hf.choice("moe_router_logit_softcapping", 0)
    hf.choice("norm_topk_prob", True)
    hf.choice("decoder_sparse_step", 1)
    num_layers, head_dim = count_layers(hf), read_head_dim(hf)
    heads = hf.items("num_attention_heads_per_layer", int) or [hf.integer("num_attention_heads")] * num_layers
    if len(heads) != num_layers or min(heads) < 1:
        raise CheckpointError(
            f"{hf.source}: num_attention_heads_per_layer {shown(heads)}, expected one for each of {num_layers} layers"
        )
    is_per_element = hf.choice("gating", True, "per-head", "per-element") == "per-element"
    _check_repeated(hf, "gating_types", ["per_element" if is_per_element else "per_head"] * num_layers)
    moe = moe_config(
        hf,
        size_key="moe_intermediate_size",
        renormalize=True,
        scoring="sigmoid",
        correction_bias="experts.e_score_correction_bias",
        routed_scaling_factor=hf.number("moe_routed_scaling_factor"),
        shared_size=hf.integer("shared_expert_intermediate_size"),
        shared_name="shared_expert",
    )
    experts = by_mlp_layer_types(hf, moe)
    _check_repeated(hf, "mlp_only_layers", [layer for layer in range(num_layers) if experts[layer] is None])
    windows = layer_windows(hf, hf.optional_integer("sliding_window"), lambda layer: False)
    return {
        "num_heads": tuple(heads),
        "window": windows,
        "rope": by_window(windows, *ropes_by_kind(hf, 1e4, is_partial=True)),
        "qk_norm": "head",
        "softplus_gate": head_dim if is_per_element else 1,
        "moe": experts,
    }


def _llama4(hf: HfConfig) -> dict[str, Any]:
    """Llama 4 (Meta, 2025), text only: each token takes one expert; Llama Guard 4 has no experts.

    Layers that rotate see only their chunk and normalise heads without weights. In the other layers queries grow.
    Norms follow the rotation. They give the same before it, in fewer launches, unless it also scales heads.
    """
    rotates, rope = rotating_layers(hf), rope_config(hf, interleaved=True)
    growth = QueryGrowth(hf.number("attn_scale"), hf.integer("floor_scale"), offset=1)
    tuning = hf.value("attn_temperature_tuning")  # published as a number or a bool
    growth_elsewhere = growth if tuning else None
    norm = "unit" if hf.flag("use_qk_norm") else None
    rotates_first = norm is not None and rope.attention_factor != 1
    layers, has_list = range(count_layers(hf)), hf.value("moe_layers") is not None
    step = hf.integer("interleave_moe_layer_step", least=0 if has_list else 1)
    sparse = hf.items("moe_layers", int) if has_list else layers[step - 1 :: step]
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
    # `layer_types` name the layers with chunks; if absent, these are the layers that rotate.
    max_positions = hf.integer("max_position_embeddings")
    size = hf.optional_integer("attention_chunk_size") or max_positions
    chunks = layer_windows(hf, size, lambda layer: rotates[layer] == 1, "chunked_attention")
    return {
        "intermediate_size": hf.integer("intermediate_size_mlp"),
        "mlp_name": "feed_forward",
        "moe": tuple(moe if layer in sparse else None for layer in layers),
        "rope": tuple(rope if is_rotated else None for is_rotated in rotates),
        "qk_norm": tuple(norm if is_rotated else None for is_rotated in rotates),
        "norm_after_rope": tuple(bool(is_rotated) and rotates_first for is_rotated in rotates),
        "query_growth": tuple(None if is_rotated else growth_elsewhere for is_rotated in rotates),
        "chunk_size": chunks if size < max_positions else None,
    }


def _mixtral(hf: HfConfig) -> dict[str, Any]:
    """Mixtral (Jiang et al., 2024): experts in every layer with weights that sum to 1; no window by default."""
    hf.choice("norm_topk_prob", True)
    return dict(**mistral(hf), moe=moe_config(hf, renormalize=True, **_MIXTRAL_NAMES))


def _mimo_v2(hf: HfConfig) -> dict[str, Any]:
    """MiMo-V2-Flash (Xiaomi, 2025): sigmoid routing with a bias; layers with a window have sinks, other KV heads and
    another rotation."""
    num_layers, num_heads, kv_heads = (
        count_layers(hf),
        hf.integer("num_attention_heads"),
        hf.integer("num_key_value_heads"),
    )
    head_dim, v_head_dim = read_head_dim(hf), hf.integer("v_head_dim", most=MAX_HEAD_DIM)
    for key, size in (("num_attention_heads", num_heads), ("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        hf.choice(f"swa_{key}", size)
    hf.choice("attention_projection_layout", "split")

    # `hybrid_layer_pattern` has 1 for each layer with a window; by default, the first and every sixth have none.
    window = hf.integer("sliding_window")
    if hf.value("sliding_window_size") is not None:
        window = hf.integer("sliding_window_size") + 1  # the token itself is beside these
    hf.value("attention_chunk_size")  # another name of the window
    pattern = hf.items("hybrid_layer_pattern", int)
    if not pattern:
        pattern = [int(layer > 0 and (layer + 1) % 6 != 0) for layer in range(num_layers)]
    if len(pattern) != num_layers or not {*pattern} <= {0, 1}:
        raise CheckpointError(f"{hf.source}: hybrid_layer_pattern {shown(pattern)}, expected 0 or 1 for each layer")
    windows = layer_windows(hf, window, lambda layer: pattern[layer] == 1)

    moe = moe_config(
        hf,
        size_key="moe_intermediate_size",
        count_key="n_routed_experts",
        renormalize=hf.flag("norm_topk_prob"),
        scoring="sigmoid",
        correction_bias="gate.e_score_correction_bias",
        float32_router=True,
        num_expert_groups=hf.integer("n_group"),
        topk_groups=hf.integer("topk_group"),
        routed_scaling_factor=hf.number("routed_scaling_factor", 1.0),
    )
    experts = by_mlp_layer_types(hf, moe)
    _check_repeated(hf, "moe_layer_freq", [int(layer is not None) for layer in experts])
    return {
        "num_kv_heads": by_window(windows, kv_heads, hf.integer("swa_num_key_value_heads", 2 * kv_heads)),
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "window": windows,
        "rope": by_window(windows, *ropes_by_kind(hf, hf.number("swa_rope_theta", 1e4), is_partial=True)),
        "o_bias": False,
        "value_scale": hf.number("attention_value_scale", 1.0),
        "sinks": by_window(
            windows, hf.flag("add_full_attention_sink_bias"), hf.flag("add_swa_attention_sink_bias", True)
        ),
        "eps": hf.number("layernorm_epsilon", hf.number("rms_norm_eps")),
        "moe": experts,
    }


def _minimax_m2(hf: HfConfig) -> dict[str, Any]:
    """MiniMax-M2 (MiniMax, 2025): sigmoid routing with a bias and weights that sum to 1.

    Norms span all query and all key heads; only part of each head rotates.
    """
    for key, known in _MINIMAX_BUILT_IN.items():
        hf.choice(key, known)
    moe = moe_config(
        hf,
        renormalize=True,
        scoring="sigmoid",
        correction_bias="e_score_correction_bias",
        float32_router=True,
        **_MIXTRAL_NAMES,
    )
    rotary_dim = hf.optional_integer("rotary_dim")
    fraction = 1.0 if rotary_dim is None else rotary_dim / read_head_dim(hf)
    return dict(
        **NO_BIAS,
        rope=rope_config(hf, fraction=fraction, is_partial=True),
        qk_norm="width",
        moe=moe,
        num_mtp_layers=hf.integer("num_mtp_modules", 0, least=0),
    )


def _olmoe(hf: HfConfig) -> dict[str, Any]:
    """OLMoE (Muennighoff et al., 2024): norms over all query and key heads together, experts in every layer."""
    return {"qk_norm": "width", "moe": moe_config(hf, renormalize=hf.flag("norm_topk_prob"))}


def _qwen2_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al., 2024): experts beside a gated MLP for all tokens; among the first
    layers, every second has a window."""
    window, end = window_if_used(hf), hf.integer("max_window_layers", least=0)
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
    """Qwen3 MoE (Yang et al., 2025): experts instead of most layers' MLP; all layers have the same window."""
    return {
        "window": window_if_used(hf),
        "qk_norm": "head",
        "moe": qwen_experts(hf, renormalize=hf.flag("norm_topk_prob")),
    }


def _qwen3_vl_moe(hf: HfConfig) -> dict[str, Any]:
    """Text part of Qwen3-VL MoE (Qwen Team, 2025): weights of the chosen experts always sum to 1."""
    hf.choice("norm_topk_prob", True)
    return {"qk_norm": "head", "moe": qwen_experts(hf, renormalize=True, transposed=None)}


def _solar_open(hf: HfConfig) -> dict[str, Any]:
    """Solar Open (Upstage, 2025): experts as in GLM-4.5 in every layer."""
    experts = sigmoid_experts(hf)
    return {"o_bias": False, "moe": experts, "intermediate_size": experts.intermediate_size}


def qwen_experts(hf: HfConfig, **fields: Any) -> tuple[MoeConfig | None, ...]:
    """Return experts for every decoder_sparse_step-th layer except mlp_only_layers."""
    step, dense = hf.integer("decoder_sparse_step"), set(hf.items("mlp_only_layers", int))
    moe = moe_config(hf, size_key="moe_intermediate_size", **fields)
    experts: list[MoeConfig | None] = []
    for layer in range(count_layers(hf)):
        is_sparse = layer not in dense and (layer + 1) % step == 0
        experts.append(moe if is_sparse else None)
    return tuple(experts)


# Keys are names in `architectures` of config.json.
EXPERTS = {
    "Dots1ForCausalLM": family("dots1", _dots1),
    "Ernie4_5_MoeForCausalLM": family("ernie4_5_moe", _ernie_moe, _ERNIE_RENAMES),
    "ExaoneMoeForCausalLM": family("exaone_moe", _exaone_moe, _EXAONE_RENAMES),
    "Glm4MoeForCausalLM": family("glm4_moe", _glm4_moe),
    "GptOssForCausalLM": family("gpt_oss", _gpt_oss),
    "GraniteMoeForCausalLM": family("granitemoe", granite_moe, GRANITE_RENAMES),
    "GraniteMoeSharedForCausalLM": family("granitemoeshared", granite_moe, GRANITE_RENAMES),
    "HYV3ForCausalLM": family("hy_v3", _hy3),
    "HunYuanMoEV1ForCausalLM": family("hunyuan_v1_moe", _hunyuan_moe, HUNYUAN_RENAMES),
    "LagunaForCausalLM": family("laguna", _laguna),
    "Llama4ForCausalLM": family("llama4_text", _llama4),
    "MiMoV2FlashForCausalLM": family("mimo_v2_flash", _mimo_v2, _MIMO_RENAMES),
    "MixtralForCausalLM": family("mixtral", _mixtral, _MIXTRAL_RENAMES),
    "MiniMaxM2ForCausalLM": family("minimax_m2", _minimax_m2, _MIXTRAL_RENAMES),
    "OlmoeForCausalLM": family("olmoe", _olmoe),
    "Qwen2MoeForCausalLM": family("qwen2_moe", _qwen2_moe),
    "Qwen3MoeForCausalLM": family("qwen3_moe", _qwen3_moe),
    "SolarOpenForCausalLM": family("solar_open", _solar_open),
}
# Text parts of multimodal models that have no architecture of their own.
EXPERT_PARTS = (family("glm4v_moe_text", _glm4_moe), family("qwen3_vl_moe_text", _qwen3_vl_moe))
