"""Families with latent attention: DeepSeek-V2 and V3 with their descendants, GLM-4.7-Flash, Mistral 4, MiniCPM3."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.cache.latent_cache import MAX_LATENT
from paged.kernels.core.checks import MAX_HEAD_DIM
from paged.kernels.core.errors import shown
from paged.models.families.dense import query_growth
from paged.models.families.network import family
from paged.models.families.sigmoid_experts import after_dense, by_mlp_layer_types, grouped_experts, sigmoid_experts
from paged.models.layers.attention_config import IndexConfig, LatentConfig
from paged.models.layers.config import MoeConfig
from paged.models.layers.decoder_config import count_layers, for_kind, moe_config
from paged.models.layers.rope import rope_config, rope_section, yarn_magnitude
from paged.models.loading.hf_config import HfConfig

# Letter of `index_topk_pattern` -> type of layer.
_INDEXER_LETTERS = {"F": "full", "S": "shared"}


def latent_attention(
    hf: HfConfig, index: IndexConfig | None = None, *, reads_head_dim: bool = True, minimum_rope_dim: int = 1
) -> dict[str, Any]:
    """Return the fields of attention.

    Norms inside attention have eps 1e-6, whatever rms_norm_eps says, as in the authors' code and in transformers. With
    yarn, scores also grow with the square of its magnitude by `mscale_all_dim`.

    reads_head_dim: whether `head_dim` may repeat a size of attention. minimum_rope_dim: least `qk_rope_head_dim`.
    """
    num_heads = hf.integer("num_attention_heads")
    if (kv_heads := hf.integer("num_key_value_heads", num_heads)) != num_heads:
        raise UnsupportedError(f"{hf.source}: num_key_value_heads {kv_heads}, expected num_attention_heads {num_heads}")
    rank = hf.integer("kv_lora_rank")
    nope, rope = hf.integer("qk_nope_head_dim"), hf.integer("qk_rope_head_dim", minimum=minimum_rope_dim)
    if reads_head_dim:
        _check_head_dim(hf, rope, nope)
    hf.value("qk_head_dim")  # repeats nope + rope; nothing reads it
    v_head_dim = hf.integer("v_head_dim", hf.integer("hidden_size") // num_heads)
    for key, size, largest in (("kv_lora_rank", rank, MAX_LATENT), ("qk_rope_head_dim", rope, MAX_HEAD_DIM)):
        if size % 16 or size > largest:
            raise UnsupportedError(f"{hf.source}: {key} {size}, known are multiples of 16 up to {largest}")
    section, scale = rope_section(hf), (nope + rope) ** -0.5
    magnitude = section.number("mscale_all_dim", 0.0, may_be_zero=True)
    if magnitude and section.text("rope_type", section.text("type", "default")) != "default":
        scale *= yarn_magnitude(section.number("factor"), magnitude) ** 2
    q_rank = hf.optional_integer("q_lora_rank")
    latent = LatentConfig(rank=rank, q_rank=q_rank, nope_dim=nope, rope_dim=rope, v_head_dim=v_head_dim, index=index)
    return {
        "num_heads": num_heads,
        "num_kv_heads": 1,
        "head_dim": rank + rope,
        "v_head_dim": rank,
        "latent": latent,
        "softmax_scale": scale,
        "num_mtp_layers": hf.integer("num_nextn_predict_layers", hf.integer("num_mtp_layers", 0, minimum=0), minimum=0),
    }


def _check_head_dim(hf: HfConfig, rope: int, nope: int) -> None:
    """Raise UnsupportedError unless head_dim is absent or one of the three sizes in published files.

    If head_dim is null, transformers takes hidden size / heads as the number of rotated elements.
    """
    hf.choice("head_dim", rope, nope, nope + rope)
    is_null = "head_dim" in hf.values and hf.values["head_dim"] is None
    if is_null and hf.integer("hidden_size") // hf.integer("num_attention_heads") != rope:
        raise UnsupportedError(f"{hf.source}: head_dim null, expected {rope} or no such key")


def _deepseek_v2(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V2 and V2-Lite (2024): softmax routing, in some models from the best groups, and shared experts."""
    return dict(
        **latent_attention(hf),
        rope=rope_config(hf, interleaved=True),
        mlp_bias=hf.flag("mlp_bias"),
        moe=after_dense(hf, _softmax_experts(hf)),
    )


def _deepseek_ocr(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-OCR (2025), DeepSeek-VL2-Tiny (2024): experts of DeepSeek-V2, attention of Llama."""
    for key in ("use_mla", "v_head_dim", "rm_head"):
        hf.choice(key, False, 0)
    hf.choice("lm_head", True)
    return {"mlp_bias": hf.flag("mlp_bias"), "moe": by_mlp_layer_types(hf, _softmax_experts(hf))}


def _softmax_experts(hf: HfConfig) -> MoeConfig:
    method = hf.choice("topk_method", "greedy", "group_limited_greedy")
    hf.choice("scoring_func", "softmax")
    hf.choice("norm_topk_prob", False)
    groups: dict[str, Any] = {}
    for key, name in (("n_group", "num_expert_groups"), ("topk_group", "topk_groups")):
        if hf.value(key) is not None and method == "group_limited_greedy":
            groups[name] = hf.integer(key)
    return moe_config(
        hf,
        size_key="moe_intermediate_size",
        count_key="n_routed_experts",
        renormalize=False,
        float32_router=True,
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        shared_size=hf.integer("moe_intermediate_size") * hf.integer("n_shared_experts"),
        **groups,
    )


def _deepseek_v3(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3, V3.1 and R1 (2024), Kimi K2 (Moonshot AI, 2025): sigmoid routing with a bias.

    GLM-4.7-Flash (Z.ai, 2026) is the same, with `mlp_layer_types`.
    """
    rope = rope_config(hf, interleaved=hf.flag("rope_interleave", True))
    return dict(**latent_attention(hf), rope=rope, moe=by_mlp_layer_types(hf, sigmoid_experts(hf)))


def _deepseek_v32(hf: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3.2 (2025): V3 with an indexer in every layer. The indexer's heads rotate by halves."""
    return indexed_latents(hf, interleaved=False)


def _glm_moe_dsa(hf: HfConfig) -> dict[str, Any]:
    """GLM-5 (Z.ai, 2026): DeepSeek-V3.2, but the indexer's heads rotate in neighbouring pairs.

    GLM-5.2 has an indexer in some layers; the others attend to the keys that the nearest earlier indexer chose.
    """
    hf.choice("indexer_rope_interleave", True)
    hf.choice("moe_router_dtype", "float32")
    hf.value("index_share_for_mtp_iteration")  # acts in multi-token layers alone
    fields = indexed_latents(hf, interleaved=True)
    return {**fields, "latent": sharing_choices(hf, fields["latent"])}


def sharing_choices(hf: HfConfig, latent: LatentConfig) -> tuple[LatentConfig, ...]:
    """Return each layer's latent attention by `indexer_types`. latent: of a layer with an indexer."""
    without_indexer = replace(latent, index=None, shares_choice=True)
    return for_kind(indexer_types(hf), "full", latent, otherwise=without_indexer)


def indexer_types(hf: HfConfig) -> list[str]:
    """Return for each layer "full", with an indexer, or "shared", without.

    The key is `indexer_types`; without it, the letters of `index_topk_pattern`; without both, `index_topk_freq`: all
    layers before layer `index_skip_topk_offset` - 1 have an indexer, and one of `index_topk_freq` layers from there on.

    Raises:
        CheckpointError: there are not as many types as layers, a type is unknown, or the first is not "full".
    """
    num_layers = count_layers(hf)
    frequency = hf.integer("index_topk_freq", 1)
    first = hf.integer("index_skip_topk_offset", 2, minimum=0) - 1
    types: list[str] = hf.items("indexer_types", str)
    pattern = hf.value("index_topk_pattern")
    if not types and isinstance(pattern, str):
        types = [_INDEXER_LETTERS.get(letter, letter) for letter in pattern]
    elif not types and pattern is not None:
        types = hf.items("index_topk_pattern", str)
    elif not types:
        for layer in range(num_layers):
            has_indexer = max(layer - first, 0) % frequency == 0
            types.append("full" if has_indexer else "shared")
    if len(types) != num_layers or not {*types} <= {"full", "shared"} or types[0] != "full":
        raise CheckpointError(
            f"{hf.source}: indexer types {shown(types)}, expected full or shared for each of {num_layers} layers, full "
            "for the first"
        )
    return types


def indexed_attention(hf: HfConfig, **index: Any) -> dict[str, Any]:
    """Return the fields of latent attention with an indexer; index: fields of `IndexConfig` beside its sizes."""
    if kinds := {*hf.items("layer_types", str)} - {"indexed_attention"}:
        raise UnsupportedError(f"{hf.source}: layer type {min(kinds)!r}, known is 'indexed_attention'")
    head_dim = hf.integer("index_head_dim")
    sizes = IndexConfig(hf.integer("index_n_heads"), head_dim, hf.integer("index_topk"), **index)
    fields = latent_attention(hf, sizes)
    if head_dim < fields["latent"].rope_dim:
        raise CheckpointError(f"{hf.source}: index_head_dim {head_dim} is less than qk_rope_head_dim")
    return fields


def indexed_latents(hf: HfConfig, **index: Any) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3.2; index: fields of `IndexConfig` beside its sizes."""
    fields = indexed_attention(hf, **index)
    hf.integer("q_lora_rank")  # required: the indexer reads the queries' latent
    return dict(**fields, rope=rope_config(hf, interleaved=True), moe=by_mlp_layer_types(hf, sigmoid_experts(hf)))


def _mistral4(hf: HfConfig) -> dict[str, Any]:
    """Mistral Small 4 (Mistral AI, 2026): softmax routing; queries grow with their position as in Ministral 3."""
    moe = grouped_experts(hf, sums_two_best=True)
    rope = rope_config(hf, is_partial=True, interleaved=hf.flag("rope_interleave"))
    share = hf.integer("qk_rope_head_dim") / (hf.integer("qk_nope_head_dim") + hf.integer("qk_rope_head_dim"))
    if (rotated := rope_section(hf).number("partial_rotary_factor", share)) != share:  # relative to the complete head
        raise CheckpointError(f"{hf.source}: partial_rotary_factor {rotated}, expected {share}")
    return dict(
        **latent_attention(hf),
        rope=replace(rope, fraction=1.0),
        query_growth=query_growth(hf),
        moe=after_dense(hf, moe),
    )


def _minicpm3(hf: HfConfig) -> dict[str, Any]:
    """MiniCPM3 (OpenBMB, 2024): no experts; multipliers as in MiniCPM (Hu et al., 2024)."""
    hidden, no_scale = hf.integer("hidden_size"), sqrt(count_layers(hf))
    return dict(
        **latent_attention(hf),
        embedding_scale=hf.number("scale_emb"),
        residual_scale=hf.number("scale_depth", no_scale) / no_scale,
        logits_scale=hf.integer("dim_model_base", hidden) / hidden,
    )


# Name in `architectures` of config.json -> family.
DEEPSEEK = {
    "DeepseekV2ForCausalLM": family("deepseek_v2", _deepseek_v2),
    "DeepseekV3ForCausalLM": family("deepseek_v3", _deepseek_v3),
    "DeepseekV32ForCausalLM": family("deepseek_v32", _deepseek_v32),
    "Glm4MoeLiteForCausalLM": family("glm4_moe_lite", _deepseek_v3),
    "GlmMoeDsaForCausalLM": family("glm_moe_dsa", _glm_moe_dsa),
    "MiniCPM3ForCausalLM": family("minicpm3", _minicpm3),
    "Mistral4ForCausalLM": family("mistral4", _mistral4),
}
# Text part of multimodal models; it has no architecture of its own.
DEEPSEEK_PARTS = (family("deepseek_ocr2_text", _deepseek_ocr),)
