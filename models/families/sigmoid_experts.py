"""Families whose experts are chosen by sigmoid scores and a correction bias, as in DeepSeek-V3.

They differ from Llama only in fields of `decoder_config` and names of weights. Fields are joined as in `dense`.
"""

from __future__ import annotations

from typing import Any

from paged.errors import CheckpointError
from paged.kernels.core.checks import MAX_HEAD_DIM
from paged.kernels.core.errors import shown
from paged.models.families.dense import NO_BIAS, exaone_attention
from paged.models.families.experts import MIXTRAL_NAMES, MIXTRAL_RENAMES
from paged.models.families.network import family
from paged.models.layers.config import MoeConfig
from paged.models.layers.decoder_config import (
    by_window,
    count_layers,
    for_kind,
    layer_windows,
    moe_config,
    read_head_dim,
)
from paged.models.layers.rope import rope_config, ropes_by_window
from paged.models.loading.hf_config import HfConfig

# transformers has these constants of MiniMax-M2 built in; published configurations repeat them.
_MINIMAX_BUILT_IN = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
}
_EXAONE_RENAMES = {r"\.gate\.e_score_correction_bias$": ".e_score_correction_bias"}
# Tensor name in transformers -> name in published files.
_HY3_RENAMES = {
    r"\.mlp\.gate\.weight$": ".mlp.router.gate.weight",
    r"\.mlp\.e_score_correction_bias$": ".mlp.expert_bias",
    r"\.mlp\.shared_experts\.": ".mlp.shared_mlp.",
}
_LAGUNA_RENAMES = {
    r"\.mlp\.gate\.e_score_correction_bias$": ".mlp.experts.e_score_correction_bias",
    r"\.mlp\.shared_experts\.": ".mlp.shared_expert.",
}
_MIMO_RENAMES = {r"\.attention_sink_bias$": ".sinks"}


def _dots1(hf: HfConfig) -> dict[str, Any]:
    """dots.llm1 (rednote, 2025): norms of heads, experts as in GLM-4.5; the last layers may have a window."""
    hf.value("use_sliding_window")  # published, but nothing reads it
    window, first = hf.optional_integer("sliding_window"), hf.integer("max_window_layers", minimum=0)
    return {
        "window": layer_windows(hf, window, lambda layer: window is not None and layer >= first),
        "qk_norm": "head",
        "moe": after_dense(hf, sigmoid_experts(hf)),
    }


def _exaone_moe(hf: HfConfig) -> dict[str, Any]:
    """K-EXAONE (LG AI Research, 2025): attention of EXAONE 4, sigmoid routing with a bias, shared experts."""
    _check_sigmoid(hf)
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
    _check_repeated(hf, "is_moe_layer", list(for_kind(experts, None, value=False, otherwise=True)))
    hf.choice("first_last_k_dense_replace", 1)  # an older name of first_k_dense_replace
    return dict(**exaone_attention(hf), moe=experts)


def _glm4_moe(hf: HfConfig) -> dict[str, Any]:
    """GLM-4.5 to 4.7 (GLM Team, 2025): sigmoid routing with a bias, experts from the best groups, shared experts.

    The first layers are dense.
    """
    qk_norm = None
    if hf.flag("use_qk_norm"):
        qk_norm = "head"
    return {
        "rope": rope_config(hf, is_partial=True),
        "o_bias": False,
        "qk_norm": qk_norm,
        "moe": after_dense(hf, sigmoid_experts(hf)),
        "num_mtp_layers": hf.integer("num_nextn_predict_layers", 0, minimum=0),
    }


def _hy3(hf: HfConfig) -> dict[str, Any]:
    """Hy3 (Tencent, 2026): norms of heads, sigmoid routing with a bias, shared experts; the first layer is dense."""
    for key in ("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm"):
        hf.choice(key, True)
    for part in ("attention_fp32_softmax", "lm_head_fp32", "moe_fp32_combine"):
        hf.value(f"enable_{part}")  # only changes roundings in the authors' code
    size = hf.integer("moe_intermediate_size")
    hf.choice("expert_hidden_dim", size)
    _check_sigmoid(hf)
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
        "num_mtp_layers": hf.integer("num_nextn_predict_layers", 0, minimum=0),
    }


def _laguna(hf: HfConfig) -> dict[str, Any]:
    """Laguna (Poolside, 2026): sigmoid routing with a bias and a shared MLP; softplus gates the output of heads.

    Each layer has its own number of query heads. Layers with a window have another rotation.
    """
    hf.choice("moe_apply_router_weight_on_input", False)
    hf.choice("moe_router_logit_softcapping", 0)
    _check_sigmoid(hf)
    hf.choice("norm_topk_prob", True)
    hf.choice("decoder_sparse_step", 1)
    num_layers, head_dim = count_layers(hf), read_head_dim(hf)
    heads = hf.items("num_attention_heads_per_layer", int) or [hf.integer("num_attention_heads")] * num_layers
    if len(heads) != num_layers or min(heads) < 1:
        raise CheckpointError(
            f"{hf.source}: num_attention_heads_per_layer {shown(heads)}, expected one for each of {num_layers} layers"
        )
    gating, gate_size = "per_head", 1
    if hf.choice("gating", True, "per-head", "per-element") == "per-element":
        gating, gate_size = "per_element", head_dim
    _check_repeated(hf, "gating_types", [gating] * num_layers)
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
        "rope": by_window(windows, *ropes_by_window(hf, 1e4, is_partial=True)),
        "qk_norm": "head",
        "head_gate": "softplus",
        "head_gate_size": gate_size,
        "moe": experts,
    }


def _mimo_v2(hf: HfConfig) -> dict[str, Any]:
    """MiMo-V2-Flash (Xiaomi, 2025): sigmoid routing with a bias.

    Layers with a window have sinks, other KV heads and another rotation.
    """
    hf.choice("attention_projection_layout", "split")
    num_layers, num_heads, kv_heads = (
        count_layers(hf),
        hf.integer("num_attention_heads"),
        hf.integer("num_key_value_heads"),
    )
    head_dim, v_head_dim = read_head_dim(hf), hf.integer("v_head_dim", maximum=MAX_HEAD_DIM)
    for key, size in (("num_attention_heads", num_heads), ("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        hf.choice(f"swa_{key}", size)
    _check_sigmoid(hf)

    # `hybrid_layer_pattern` has a 1 for each layer with a window. Without the pattern, the first and every sixth layer
    # have no window.
    window = hf.integer("sliding_window")
    if hf.value("sliding_window_size") is not None:
        window = hf.integer("sliding_window_size") + 1  # sliding_window_size does not count the token itself
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
    _check_repeated(hf, "moe_layer_freq", list(for_kind(experts, None, 0, otherwise=1)))
    return {
        "num_kv_heads": by_window(windows, kv_heads, hf.integer("swa_num_key_value_heads", 2 * kv_heads)),
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "window": windows,
        "rope": by_window(windows, *ropes_by_window(hf, hf.number("swa_rope_theta", 1e4), is_partial=True)),
        "o_bias": False,
        "value_scale": hf.number("attention_value_scale", 1.0),
        "sinks": by_window(
            windows, hf.flag("add_full_attention_sink_bias"), hf.flag("add_swa_attention_sink_bias", True)
        ),
        "eps": hf.number("layernorm_epsilon", hf.number("rms_norm_eps")),
        "moe": experts,
    }


def _minimax_m2(hf: HfConfig) -> dict[str, Any]:
    """MiniMax-M2 (MiniMax, 2025): sigmoid routing with a bias and routing weights that sum to 1.

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
        **MIXTRAL_NAMES,
    )
    fraction = 1.0
    rotary_dim = hf.optional_integer("rotary_dim")
    if rotary_dim is not None:
        fraction = rotary_dim / read_head_dim(hf)
    return dict(
        **NO_BIAS,
        rope=rope_config(hf, fraction=fraction, is_partial=True),
        qk_norm="width",
        moe=moe,
        num_mtp_layers=hf.integer("num_mtp_modules", 0, minimum=0),
    )


def _solar_open(hf: HfConfig) -> dict[str, Any]:
    """Solar Open (Upstage, 2025): experts as in GLM-4.5 in every layer."""
    experts = sigmoid_experts(hf)
    return {"o_bias": False, "moe": experts, "intermediate_size": experts.intermediate_size}


def sigmoid_experts(hf: HfConfig, shared_size: int | None = None, **fields: Any) -> MoeConfig:
    """Return experts with the routing of DeepSeek-V3, and other fields of MoeConfig.

    shared_size: intermediate size of the shared MLP; None for `n_shared_experts` times an expert's size.
    """
    _check_sigmoid(hf)
    bias = "gate.e_score_correction_bias"
    return grouped_experts(hf, shared_size, scoring="sigmoid", correction_bias=bias, float32_router=True, **fields)


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
        num_expert_groups=hf.integer("n_group", 1),
        topk_groups=hf.integer("topk_group", 1),
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        shared_size=shared_size,
        **fields,
    )


def after_dense(hf: HfConfig, moe: MoeConfig, key: str = "first_k_dense_replace") -> tuple[MoeConfig | None, ...]:
    """Return experts for all layers except the first ones, whose number `key` gives."""
    num_layers = count_layers(hf)
    num_dense = min(hf.integer(key, minimum=0), num_layers)
    return (None,) * num_dense + (moe,) * (num_layers - num_dense)


def by_mlp_layer_types(hf: HfConfig, moe: MoeConfig) -> tuple[MoeConfig | None, ...]:
    """Return experts for the layers that `mlp_layer_types` calls sparse; without the key, see `after_dense`.

    Raises:
        CheckpointError: there are not as many types as layers, or a type is unknown.
    """
    by_count, kinds = after_dense(hf, moe), hf.items("mlp_layer_types", str)
    if not kinds:
        return by_count
    if len(kinds) != count_layers(hf) or not {*kinds} <= {"dense", "sparse"}:
        raise CheckpointError(f"{hf.source}: mlp_layer_types {shown(kinds)}, expected dense or sparse for each layer")
    return for_kind(kinds, "sparse", moe)


def _check_sigmoid(hf: HfConfig) -> None:
    """Raise UnsupportedError unless the keys of the routing have the published values for sigmoid routing."""
    for key in ("scoring_func", "topk_method"):
        hf.choice(key, "sigmoid", "noaux_tc")


def _check_repeated(hf: HfConfig, key: str, expected: list[Any]) -> None:
    """Raise CheckpointError unless a list that repeats other keys is absent or as expected."""
    values = hf.value(key)
    if values is not None and values != expected:
        raise CheckpointError(f"{hf.source}: {key} = {shown(values)}, expected {shown(expected)} by other keys")


# Name in `architectures` of config.json -> family.
SIGMOID_EXPERTS = {
    "Dots1ForCausalLM": family("dots1", _dots1),
    "ExaoneMoeForCausalLM": family("exaone_moe", _exaone_moe, _EXAONE_RENAMES),
    "Glm4MoeForCausalLM": family("glm4_moe", _glm4_moe),
    "HYV3ForCausalLM": family("hy_v3", _hy3, _HY3_RENAMES),
    "LagunaForCausalLM": family("laguna", _laguna, _LAGUNA_RENAMES),
    "MiMoV2FlashForCausalLM": family("mimo_v2_flash", _mimo_v2, _MIMO_RENAMES),
    "MiniMaxM2ForCausalLM": family("minimax_m2", _minimax_m2, MIXTRAL_RENAMES),
    "SolarOpenForCausalLM": family("solar_open", _solar_open),
}
# Text part of multimodal models; it has no architecture of its own.
SIGMOID_PARTS = (family("glm4v_moe_text", _glm4_moe),)
