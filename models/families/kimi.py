"""Families with Kimi delta attention beside latent attention: Kimi Linear, Kimi K3, Ling 3, GLM-5.3."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.families.attention_residual import SnapshotLayer, SnapshotNorm
from paged.models.families.deepseek import indexer_types, latent_attention, sharing_choices
from paged.models.families.experts import MIXTRAL_NAMES, MIXTRAL_RENAMES
from paged.models.families.hyper_streams import StreamsLayer, StreamsNorm, streams_config
from paged.models.families.network import Network, family
from paged.models.families.sigmoid_experts import by_mlp_layer_types, sigmoid_experts
from paged.models.layers.attention_config import IndexConfig
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.decoder_config import CONV_ACTIVATIONS, decoder_config, for_kind, layer_kinds
from paged.models.layers.recurrent_config import KimiDeltaConfig
from paged.models.layers.rope import RopeConfig, rope_config, rope_section
from paged.models.loading.hf_config import HfConfig

_KINDS = ("linear_attention", "full_attention")
# Common key -> key in published files.
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
# Constants of the activation "situ": its name says no others.
_SITU = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
# Names of transformers 5 -> published names.
_OWN_RENAMES = {
    r"\.self_attn\.forget_gate\.": ".self_attn.",
    r"\.attn_hc\.": ".hc_attn_",
    r"\.ffn_hc\.": ".hc_ffn_",
}
# Published names -> names here.
_KIMI_RENAMES = {
    **_OWN_RENAMES,
    **MIXTRAL_RENAMES,
    r"\.routed_expert_down_proj\.": ".fc1_latent_proj.",
    r"\.routed_expert_up_proj\.": ".fc2_latent_proj.",
    r"\.routed_expert_norm\.": ".latent_norm.",
}
_LING_RENAMES = {
    **_OWN_RENAMES,
    r"^model\.word_embeddings\.": "model.embed_tokens.",
    r"\.attention\.dense\.": ".self_attn.o_proj.",
    r"\.attention\.": ".self_attn.",
    r"\.mlp\.gate\.expert_bias$": ".mlp.gate.e_score_correction_bias",
}


class _KimiLinear(Network):
    """Kimi Linear (Moonshot AI, 2025): three of four layers are Kimi delta attention; latents do not rotate."""

    model_type = "kimi_linear"
    renames = _KIMI_RENAMES

    @classmethod
    def variant(cls, hf: HfConfig) -> type[Network]:
        return _KimiK3 if hf.value("attn_res_block_size") is not None else cls

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, **_kimi_linear(hf))


class _KimiK3(_KimiLinear):
    """Text part of Kimi K3 (Moonshot AI, 2026): Kimi Linear with attention to snapshots of the residual stream.

    Experts may read and write a latent, and a gate may multiply each number that latent attention returns.
    """

    layer_class = SnapshotLayer
    norm_class = SnapshotNorm

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        fields = _kimi_linear(hf)
        # The layers' norms share an eps, as in vLLM and SGLang.
        fields["latent"] = replace(fields["latent"], eps=hf.number("rms_norm_eps"))
        return decoder_config(hf, **fields, snapshot_period=hf.integer("attn_res_block_size"))


def _kimi_linear(hf: HfConfig) -> dict[str, Any]:
    hf.own_names = _NAMES
    for key, known in (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid"), ("use_grouped_topk", True)):
        hf.choice(key, known)
    activation = _activation(hf)
    section = hf.section("linear_attn_config") or HfConfig({}, hf.source)
    attends = section.items("full_attn_layers", int)  # counted from 1
    section.value("kda_layers")  # the other layers

    def kind_of(layer: int) -> str:
        if attends:
            return _KINDS[layer + 1 in attends]
        return _KINDS[layer > 0 and layer % 4 == 0]

    kinds = layer_kinds(hf, _KINDS, kind_of)
    lower_bound: float | None = None
    if section.value("gate_lower_bound") is not None:
        lower_bound = _lower_bound(section, "gate_lower_bound")
    delta = _delta_of(hf, section, lower_bound)
    if section.flag("use_full_rank_gate"):
        delta = replace(delta, gate_rank=None)
    section.refuse_unread()
    fields = dict(
        **latent_attention(hf, reads_head_dim=False),
        activation=activation,
        rope=None,
        recurrent=for_kind(kinds, _KINDS[0], delta),
        recurrent_name="self_attn",
        moe=by_mlp_layer_types(hf, _kimi_experts(hf)),
    )
    if hf.flag("mla_use_output_gate"):
        fields |= {"head_gate": "sigmoid", "head_gate_size": fields["latent"].v_head_dim}
    return fields


def _activation(hf: HfConfig) -> str:
    """Return the activation of MLPs and experts; the convolutions' is SiLU in every model."""
    activation: str = hf.choice("hidden_act", *CONV_ACTIVATIONS, "situ")
    if activation != "situ":
        return "silu"
    for key, known in _SITU.items():
        if hf.number(key) != known:
            raise UnsupportedError(f"{hf.source}: {key} = {hf.number(key)} is not supported, known is {known}")
    return activation


def _kimi_experts(hf: HfConfig) -> MoeConfig:
    moe = sigmoid_experts(hf, None, **MIXTRAL_NAMES)
    moe = replace(moe, latent_size=hf.optional_integer("routed_expert_hidden_size"))
    if hf.flag("latent_moe_use_norm") and moe.latent_size is not None:
        moe = replace(moe, latent_eps=hf.number("rms_norm_eps"))
    return moe


def _ling(hf: HfConfig) -> dict[str, Any]:
    """Ling 3 (inclusionAI, 2026): five of six layers are Kimi delta attention with a bounded decay.

    Latents rotate in neighbouring pairs, and a gate multiplies the output of each head. transformers writes sizes of
    Kimi delta attention under names of its own, and `head_dim` is then a size of latent attention.
    """
    hf.own_names = _NAMES
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    group = hf.integer("layer_group_size")
    kinds = layer_kinds(hf, _KINDS, lambda layer: _KINDS[(layer + 1) % group == 0])
    lower_bound: float | None = _lower_bound(hf, "kda_lower_bound")
    if not hf.flag("kda_safe_gate", True):
        lower_bound = None
    delta = _delta(
        hf,
        num_heads=hf.integer("linear_num_heads", hf.integer("num_attention_heads")),
        head_dim=hf.integer("linear_head_dim", hf.integer("head_dim")),
        conv_width=hf.integer("linear_conv_kernel_dim", hf.integer("short_conv_kernel_size"), minimum=2),
        lower_bound=lower_bound,
        decay_rank=None,
        gate_rank=None,
    )
    return dict(
        **latent_attention(hf, reads_head_dim=False),
        rope=_ling_rotation(hf),
        head_gate="sigmoid",
        recurrent=for_kind(kinds, _KINDS[0], delta),
        recurrent_name="self_attn",
        moe=by_mlp_layer_types(hf, sigmoid_experts(hf)),
    )


def _ling_rotation(hf: HfConfig) -> RopeConfig:
    rope = rope_config(hf, interleaved=True)
    # transformers' default for it is the class's length where the file has `model_max_length`, else the file's.
    key = "original_max_position_embeddings"
    if rope.original_max_positions and key not in {**hf.values, **rope_section(hf).values}:
        raise UnsupportedError(f"{hf.source}: {key} is missing, expected it beside a scaled rotation")
    return rope


def _glm5_next(hf: HfConfig) -> dict[str, Any]:
    """Text part of GLM-5.3-Flash (Z.ai, 2026): four residual streams, and latent attention that does not rotate.

    An indexer chooses the keys of latent attention in pools, see `PooledIndexer`.
    """
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    hf.choice("swiglu_limit", 10.0)
    hf.choice("index_kpool_always_select_tail", True)
    section = hf.section("linear_attn_config") or HfConfig({}, hf.source)
    bounds, key = hf, "linear_lower_bound"
    if "gate_lower_bound" in section.values:
        bounds, key = section, "gate_lower_bound"
    is_safe = section.flag("safe_gate", True)
    lower_bound: float | None = None
    if bounds.value(key) is not None:
        lower_bound = _lower_bound(bounds, key)
    elif section.values and is_safe:
        lower_bound = -5.0
    delta = _delta_of(hf, section, lower_bound)
    for name in ("kda_layers", "full_attn_layers"):
        section.value(name)  # repeat `layer_types`
    section.refuse_unread()
    fields = latent_attention(hf, _pooled_index(hf), reads_head_dim=False, minimum_rope_dim=0)
    latent = replace(fields.pop("latent"), eps=hf.number("rms_norm_eps"))
    if latent.rope_dim:
        raise UnsupportedError(f"{hf.source}: qk_rope_head_dim {latent.rope_dim}, expected 0")
    hf.integer("q_lora_rank")  # required: the indexer reads the queries' latent
    kinds, types = _glm5_kinds(hf), indexer_types(hf)
    attending = [kind for layer, kind in enumerate(types) if kinds[layer] == _KINDS[1]]
    if attending[:1] == ["shared"]:
        raise CheckpointError(f"{hf.source}: indexer type 'shared' of the first layer that attends, expected 'full'")
    return dict(
        **fields,
        latent=sharing_choices(hf, latent),
        activation="silu_10",
        rope=None,
        recurrent=for_kind(kinds, _KINDS[0], delta),
        recurrent_name="self_attn",
        moe=by_mlp_layer_types(hf, sigmoid_experts(hf)),
        streams=streams_config(hf, num_iterations=hf.integer("hc_sinkhorn_iters")),
    )


def _pooled_index(hf: HfConfig) -> IndexConfig:
    """Return the indexer; transformers refuses the same sizes."""
    top_k, pool_size = hf.integer("index_topk"), hf.integer("index_kpool", minimum=2)
    if top_k % pool_size:
        raise CheckpointError(f"{hf.source}: index_topk {top_k}, expected a multiple of index_kpool {pool_size}")
    return IndexConfig(hf.integer("index_n_heads"), hf.integer("index_head_dim"), top_k, pool_size=pool_size)


def _glm5_kinds(hf: HfConfig) -> tuple[str, ...]:
    """Return the kind of each layer; "indexed_attention" counts as "full_attention"."""
    kinds: list[str] = []
    for kind in hf.items("layer_types", str):
        kinds.append("full_attention" if kind == "indexed_attention" else kind)
    return layer_kinds(hf.overridden({"layer_types": kinds}), _KINDS, lambda layer: _KINDS[layer % 4 == 3])


def _lower_bound(hf: HfConfig, key: str) -> float:
    value = hf.value(key)
    if type(value) not in (int, float) or not -math.inf < value < 0:
        raise CheckpointError(f"{hf.source}: {key} = {shown(value)}, expected a negative number")
    return float(value)


def _delta_of(hf: HfConfig, section: HfConfig, lower_bound: float | None) -> KimiDeltaConfig:
    """Return Kimi delta attention with sizes of a section, or of transformers' keys; both gates are low rank."""
    head_dim = section.integer("head_dim", hf.integer("linear_head_dim"))
    return _delta(
        hf,
        num_heads=section.integer("num_heads", hf.integer("linear_num_heads")),
        head_dim=head_dim,
        conv_width=section.integer("short_conv_kernel_size", hf.integer("linear_conv_kernel_dim"), minimum=2),
        lower_bound=lower_bound,
        decay_rank=head_dim,
        gate_rank=head_dim,
    )


def _delta(hf: HfConfig, *, num_heads: int, head_dim: int, **fields: Any) -> KimiDeltaConfig:
    """Return Kimi delta attention; its keys and values have the same heads."""
    return KimiDeltaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        num_key_heads=num_heads,
        key_dim=head_dim,
        eps=hf.number("rms_norm_eps"),
        **fields,
    )


# Name in `architectures` of config.json -> family.
KIMI = {
    "BailingHybridForCausalLM": family("bailing_hybrid", _ling, _LING_RENAMES),
    "KimiLinearForCausalLM": _KimiLinear,
}
# Text part of multimodal models; it has no architecture of its own.
KIMI_PARTS = (family("glm5_next_text", _glm5_next, _OWN_RENAMES, StreamsLayer, StreamsNorm),)
