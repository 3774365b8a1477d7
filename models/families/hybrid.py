"""Families with gated delta nets or short convolutions beside attention.

They differ from Llama in fields of `decoder_config` and names of weights. OLMo Hybrid also has other norms in layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged.errors import CheckpointError
from paged.models.families.decoder_layer import DecoderLayer
from paged.models.families.dense import NO_BIAS, NORMS_AFTER
from paged.models.families.experts import qwen_experts
from paged.models.families.network import family
from paged.models.families.sigmoid_experts import after_dense
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import CONV_ACTIVATIONS, by_window, for_kind, layer_kinds, moe_config
from paged.models.layers.recurrent_config import GatedDeltaConfig, ShortConvConfig
from paged.models.layers.rope import rope_config, rope_section, ropes_by_window
from paged.models.loading.hf_config import HfConfig

_SHARED = {"shared_name": "shared_expert", "shared_gate": "shared_expert_gate"}
_KINDS = ("linear_attention", "full_attention")
_LFM2_KINDS = ("conv", "full_attention")
_LFM3_KINDS = (*_LFM2_KINDS, "sliding_attention")
# transformers has these constants built in; published configurations repeat them.
_QWEN_BUILT_IN = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}


def _qwen(hf: HfConfig, *, by_head: bool = False) -> dict[str, Any]:
    """Qwen3.5 to 3.8 (Qwen Team, 2026), dense.

    Every fourth layer has attention with an output gate; the others are gated delta nets.
    """
    interval = hf.integer("full_attention_interval")
    kinds = layer_kinds(hf, _KINDS, lambda layer: _KINDS[(layer + 1) % interval == 0])
    return _qwen_layers(hf, kinds, by_head=by_head)


def _qwen_layers(hf: HfConfig, kinds: tuple[str, ...], *, by_head: bool = False) -> dict[str, Any]:
    """Return the fields of gated delta nets and gated attention, for layers of these kinds."""
    for key, known in _QWEN_BUILT_IN.items():
        hf.choice(key, known)
    fraction = hf.number("partial_rotary_factor")
    gate = "silu"
    if hf.choice("output_gate_type", "silu", "swish", "sigmoid") == "sigmoid":
        gate = "sigmoid"
    recurrent = _gated_delta(
        hf,
        num_heads=hf.integer("linear_num_value_heads"),
        head_dim=hf.integer("linear_value_head_dim"),
        num_key_heads=hf.integer("linear_num_key_heads"),
        key_dim=hf.integer("linear_key_head_dim"),
        conv_width=hf.integer("linear_conv_kernel_dim", minimum=2),
        by_head=by_head,
        eps=hf.number("rms_norm_eps"),
        gate=gate,
    )
    return {
        "recurrent": for_kind(kinds, _KINDS[0], recurrent),
        "rope": rope_config(hf, fraction=fraction, is_partial=True),
        "qk_norm": "head",
        "output_gate": True,
        "zero_centred": True,
    }


def _gated_delta(hf: HfConfig, **fields: Any) -> GatedDeltaConfig:
    """Return a gated delta net with these fields. `hidden_act` must be the convolution's activation, SiLU."""
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    layer = GatedDeltaConfig(**fields)
    if layer.num_heads % layer.num_key_heads:
        raise CheckpointError(
            f"{hf.source}: linear_num_value_heads {layer.num_heads} is not a multiple of linear_num_key_heads "
            f"{layer.num_key_heads}"
        )
    return layer


def _qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen3.5 to 3.8 with experts in every layer and routing weights that sum to 1."""
    return dict(**_qwen(hf), **_qwen_experts(hf))


def _qwen_experts(hf: HfConfig) -> dict[str, Any]:
    hf.choice("norm_topk_prob", True)
    shared_size = hf.integer("shared_expert_intermediate_size")
    moe = qwen_experts(hf, renormalize=True, shared_size=shared_size, **_SHARED)
    return {"moe": moe, "intermediate_size": hf.integer("moe_intermediate_size")}


def qwen4_exp(hf: HfConfig) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the kinds of Qwen4-Exp's layers, and the fields that it shares with Qwen3.5.

    Published files name its attention "full_attention", transformers "indexed_attention".
    """
    interval = hf.integer("full_attention_interval")
    known = (*_KINDS, "indexed_attention")
    kinds = layer_kinds(hf, known, lambda layer: _KINDS[(layer + 1) % interval == 0])
    kinds = tuple(kind.replace("indexed", "full") for kind in kinds)
    return kinds, _qwen_layers(hf, kinds) | _qwen_experts(hf)


def _qwen3_next(hf: HfConfig) -> dict[str, Any]:
    """Qwen3-Next (Qwen Team, 2025): projections stored by key head; experts in most layers."""
    shared_size = hf.integer("shared_expert_intermediate_size")
    moe = qwen_experts(hf, renormalize=hf.flag("norm_topk_prob"), shared_size=shared_size, **_SHARED)
    return dict(**_qwen(hf, by_head=True), moe=moe)


# Published names of layers and norms -> names here. transformers 5 stores every expert in its own tensor.
_LFM2_RENAMES = {
    r"\.conv\.conv\.": ".linear_attn.conv1d.",
    r"\.conv\.": ".linear_attn.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.([qk])_layernorm\.": r".\1_norm.",
    r"\bmodel\.embedding_norm\.": "model.norm.",
    r"\.feed_forward\.": ".mlp.",
    r"\.w1\.": ".gate_proj.",
    r"\.w3\.": ".up_proj.",
    r"\.w2\.": ".down_proj.",
}
_LFM3_RENAMES = {**_LFM2_RENAMES, r"\.self_attn\.gate_proj\.": ".self_attn.g_proj."}


def _short_convolutions(hf: HfConfig, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that LFM2 and LFM3 share: short convolutions in most layers, and norms of heads."""
    conv = ShortConvConfig(
        conv_width=hf.integer("conv_L_cache", minimum=2), size=hf.integer("hidden_size"), bias=hf.flag("conv_bias")
    )
    return {
        "recurrent": for_kind(kinds, "conv", conv),
        "activation": "silu",  # no key names it
        "qk_norm": "head",
        "eps": hf.number("norm_eps"),
        "before_attention": "operator_norm",
        "before_mlp": "ffn_norm",
    }


def _lfm2_fields(hf: HfConfig, kinds: tuple[str, ...]) -> dict[str, Any]:
    tied = hf.flag("tie_embedding", hf.flag("tie_word_embeddings"))
    return dict(**_short_convolutions(hf, kinds), **NO_BIAS, tie_word_embeddings=tied)


def _lfm2(hf: HfConfig) -> dict[str, Any]:
    """LFM2 (Liquid AI, 2025): the size of MLPs is two thirds of the published size, rounded up."""
    attends = hf.items("full_attn_idxs", int)
    kinds = layer_kinds(hf, _LFM2_KINDS, lambda layer: _LFM2_KINDS[not attends or layer in attends])
    size = hf.integer("block_ff_dim", hf.integer("intermediate_size"))
    if hf.flag("block_auto_adjust_ff_dim", True):
        size = int(hf.number("block_ffn_dim_multiplier") * int(2 * size / 3))
        multiple = hf.integer("block_multiple_of")
        size = -(-size // multiple) * multiple
    return dict(**_lfm2_fields(hf, kinds), intermediate_size=size)


def _lfm2_moe(hf: HfConfig) -> dict[str, Any]:
    """LFM2 MoE (Liquid AI, 2025): sigmoid routing with a bias that only chooses; the first layers are dense."""
    kinds = layer_kinds(hf, _LFM2_KINDS, lambda layer: "full_attention")
    correction_bias = None
    if hf.flag("use_expert_bias", True):
        correction_bias = "expert_bias"
    moe = moe_config(
        hf,
        size_key="moe_intermediate_size",
        renormalize=hf.flag("norm_topk_prob"),
        scoring="sigmoid",
        correction_bias=correction_bias,
        routed_scaling_factor=hf.number("routed_scaling_factor"),
    )
    return dict(**_lfm2_fields(hf, kinds), moe=after_dense(hf, moe, "num_dense_layers"))


def _lfm3(hf: HfConfig) -> dict[str, Any]:
    """LFM3 (Liquid AI, 2026): wider convolutions than LFM2, also norms after each part, and a gate for each head.

    Half of the layers are convolutions. Half of the others have a window and another rotation.
    """

    def kind_of(layer: int) -> str:
        if layer % 4 == 2:
            return "full_attention"
        if layer > 0 and layer % 4 == 0:
            return "sliding_attention"
        return "conv"

    kinds = layer_kinds(hf, _LFM3_KINDS, kind_of)
    window = hf.optional_integer("sliding_window")
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(f"{hf.source}: layer_types has sliding_attention, but there is no sliding_window")
    windows = for_kind(kinds, "sliding_attention", window)
    fields = dict(**_short_convolutions(hf, kinds), window=windows, rope=by_window(windows, *ropes_by_window(hf, 1e4)))
    if hf.flag("use_attention_gate", True):
        fields["head_gate"] = "sigmoid"
    if hf.flag("use_sandwich_norm", True):
        fields |= {"after_attention": "post_operator_norm", "after_mlp": "post_ffn_norm"}
    return fields


# Published names of norms -> names here. Whether a norm stands before or after a layer depends on the layer's kind.
_OLMO_RENAMES = {
    r"\.attention_layer_norm\.": ".input_layernorm.",
    r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    r"\.linear_attn\.g_proj\.": ".linear_attn.in_proj_z.",
    r"\.linear_attn\.([ab])_proj\.": r".linear_attn.in_proj_\1.",
    r"\.linear_attn\.o_": ".linear_attn.out_",
    r"\.linear_attn\.out_norm\.": ".linear_attn.norm.",
}


class _OlmoHybridLayer(DecoderLayer):
    """A layer with norms after attention and MLP if it attends, else before the recurrent part and MLP."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        if config.recurrent[index] is not None:
            norms = replace(
                config.norms,
                before_attention="input_layernorm",
                after_attention=None,
                before_mlp="post_attention_layernorm",
                after_mlp=None,
            )
            config = replace(config, norms=norms)
        super().__init__(config, index)


def _olmo_hybrid(hf: HfConfig) -> dict[str, Any]:
    """OLMo Hybrid (Ai2, 2026): three of four layers are gated delta nets with beta up to 2.

    Published files have a null `rope_theta`; then no layer rotates.
    """
    num_layers = hf.integer("num_hidden_layers")

    def kind_of(layer: int) -> str:
        """Return the default kind of a layer; in a model of fewer than four layers, the last one attends."""
        attends = layer % 4 == 3 or (layer == num_layers - 1 and num_layers < 4)
        return "full_attention" if attends else "linear_attention"

    kinds = layer_kinds(hf, _KINDS, kind_of)
    heads = hf.integer("num_attention_heads")
    key_heads = hf.integer("linear_num_key_heads", heads)
    key_dim = hf.integer("linear_key_head_dim", int(0.75 * hf.integer("hidden_size") / key_heads))
    beta_scale = 1.0
    if hf.flag("linear_allow_neg_eigval", True):
        beta_scale = 2.0
    recurrent = _gated_delta(
        hf,
        num_heads=hf.integer("linear_num_value_heads", heads),
        head_dim=hf.integer("linear_value_head_dim", 2 * key_dim),
        num_key_heads=key_heads,
        key_dim=key_dim,
        conv_width=hf.integer("linear_conv_kernel_dim", minimum=2),
        splits_qkv=True,
        splits_conv=True,
        beta_scale=beta_scale,
        eps=1e-5,  # the authors' code and transformers ignore rms_norm_eps here
    )
    theta = hf.defaults["rope_theta"]
    for values in (hf.values, rope_section(hf).values):
        theta = values.get("rope_theta", theta)
    rope = None
    if theta is not None:
        rope = rope_config(hf)
    return dict(**NORMS_AFTER, qk_norm="width", recurrent=for_kind(kinds, _KINDS[0], recurrent), rope=rope)


# Name in `architectures` of config.json -> family.
HYBRIDS = {
    "Lfm2ForCausalLM": family("lfm2", _lfm2, _LFM2_RENAMES),
    "Lfm2MoeForCausalLM": family("lfm2_moe", _lfm2_moe, _LFM2_RENAMES),
    "Lfm3ForCausalLM": family("lfm3", _lfm3, _LFM3_RENAMES),
    "OlmoHybridForCausalLM": family("olmo_hybrid", _olmo_hybrid, _OLMO_RENAMES, _OlmoHybridLayer),
    "Qwen3NextForCausalLM": family("qwen3_next", _qwen3_next),
    "Qwen3_5ForCausalLM": family("qwen3_5_text", _qwen),
    "Qwen3_5MoeForCausalLM": family("qwen3_5_moe_text", _qwen3_5_moe),
}
