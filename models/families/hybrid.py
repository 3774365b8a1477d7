"""Families with gated delta nets or short convolutions beside attention.

They differ from Llama in fields of `decoder_config` and names of weights; OLMo Hybrid also in its layers' norms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged.errors import CheckpointError
from paged.models.families.dense import NORMS_AFTER
from paged.models.families.experts import qwen_experts
from paged.models.families.network import DecoderLayer, family
from paged.models.families.sigmoid_experts import after_dense
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import CONV_ACTIVATIONS, for_kind, layer_kinds, moe_config
from paged.models.layers.recurrent_config import GatedDeltaConfig, ShortConvConfig
from paged.models.layers.rope import rope_config, rope_section
from paged.models.loading.hf_config import HfConfig

_SHARED = {"shared_name": "shared_expert", "shared_gate": "shared_expert_gate"}
_KINDS = ("linear_attention", "full_attention")
_LFM2_KINDS = ("conv", "full_attention")
# Constants of these models in transformers, repeated by published configurations.
_QWEN_BUILT_IN = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}


def _qwen(hf: HfConfig, *, by_head: bool = False) -> dict[str, Any]:
    """Qwen3.5 to 3.8 (Qwen Team, 2026), dense: every fourth layer has attention with an output gate, the others gated
    delta nets."""
    for key, known in _QWEN_BUILT_IN.items():
        hf.choice(key, known)
    interval = hf.integer("full_attention_interval")
    kinds = layer_kinds(hf, _KINDS, lambda layer: _KINDS[(layer + 1) % interval == 0])
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
    """Return a gated delta net of these fields, whose convolution has the SiLU that `hidden_act` must be."""
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    layer = GatedDeltaConfig(**fields)
    if layer.num_heads % layer.num_key_heads:
        raise CheckpointError(
            f"{hf.source}: linear_num_value_heads {layer.num_heads} is not a multiple of linear_num_key_heads "
            f"{layer.num_key_heads}"
        )
    return layer


def _qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen3.5 to 3.8 with experts in every layer, whose weights sum to 1."""
    hf.choice("norm_topk_prob", True)
    shared_size = hf.integer("shared_expert_intermediate_size")
    moe = qwen_experts(hf, renormalize=True, shared_size=shared_size, **_SHARED)
    return dict(**_qwen(hf), moe=moe, intermediate_size=hf.integer("moe_intermediate_size"))


def _qwen3_next(hf: HfConfig) -> dict[str, Any]:
    """Qwen3-Next (Qwen Team, 2025): projections stored by key head; experts in most layers."""
    shared_size = hf.integer("shared_expert_intermediate_size")
    moe = qwen_experts(hf, renormalize=hf.flag("norm_topk_prob"), shared_size=shared_size, **_SHARED)
    return dict(**_qwen(hf, by_head=True), moe=moe)


# Names of layers and norms in published checkpoints. transformers 5 stores experts one by one, too.
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


def _lfm2_fields(hf: HfConfig, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Fields of LFM2: short convolutions in most layers, whose state is their last inputs; norms of heads."""
    conv = ShortConvConfig(
        conv_width=hf.integer("conv_L_cache", minimum=2), size=hf.integer("hidden_size"), bias=hf.flag("conv_bias")
    )
    return {
        "recurrent": for_kind(kinds, "conv", conv),
        "activation": "silu",  # no key says so
        "qk_norm": "head",
        "qkv_bias": False,
        "o_bias": False,
        "eps": hf.number("norm_eps"),
        "before_attention": "operator_norm",
        "before_mlp": "ffn_norm",
        "tie_word_embeddings": hf.flag("tie_embedding", hf.flag("tie_word_embeddings")),
    }


def _lfm2(hf: HfConfig) -> dict[str, Any]:
    """LFM2 (Liquid AI, 2025): the size of MLPs is two thirds of the published one, rounded up."""
    attends = hf.items("full_attn_idxs", int)
    kinds = layer_kinds(hf, _LFM2_KINDS, lambda layer: _LFM2_KINDS[not attends or layer in attends])
    size = hf.integer("block_ff_dim", hf.integer("intermediate_size"))
    if hf.flag("block_auto_adjust_ff_dim", True):
        size = int(hf.number("block_ffn_dim_multiplier") * int(2 * size / 3))
        multiple = hf.integer("block_multiple_of")
        size = -(-size // multiple) * multiple
    return dict(**_lfm2_fields(hf, kinds), intermediate_size=size)


def _lfm2_moe(hf: HfConfig) -> dict[str, Any]:
    """LFM2 MoE (Liquid AI, 2025): sigmoid routing, for which a bias chooses; the first layers are dense."""
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


# Published names of norms; the norms' places follow from the kind of layer.
_OLMO_RENAMES = {
    r"\.attention_layer_norm\.": ".input_layernorm.",
    r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    r"\.linear_attn\.g_proj\.": ".linear_attn.in_proj_z.",
    r"\.linear_attn\.([ab])_proj\.": r".linear_attn.in_proj_\1.",
    r"\.linear_attn\.o_": ".linear_attn.out_",
    r"\.linear_attn\.out_norm\.": ".linear_attn.norm.",
}


class _OlmoHybridLayer(DecoderLayer):
    """Layers with attention have norms after both parts, the others before them."""

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

    With a null `rope_theta`, as published, no layer rotates.
    """
    num_layers = hf.integer("num_hidden_layers")

    def kind_of(layer: int) -> str:
        """Return the kind of a layer by default: of fewer than four layers, the last one attends."""
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
        eps=1e-5,  # whatever rms_norm_eps says, in the authors' code and in transformers
    )
    theta = hf.defaults["rope_theta"]
    for values in (hf.values, rope_section(hf).values):
        theta = values.get("rope_theta", theta)
    rope = None
    if theta is not None:
        rope = rope_config(hf)
    return dict(**NORMS_AFTER, qk_norm="width", recurrent=for_kind(kinds, _KINDS[0], recurrent), rope=rope)


# Keys are names in `architectures` of config.json.
HYBRIDS = {
    "Lfm2ForCausalLM": family("lfm2", _lfm2, _LFM2_RENAMES),
    "Lfm2MoeForCausalLM": family("lfm2_moe", _lfm2_moe, _LFM2_RENAMES),
    "OlmoHybridForCausalLM": family("olmo_hybrid", _olmo_hybrid, _OLMO_RENAMES, _OlmoHybridLayer),
    "Qwen3NextForCausalLM": family("qwen3_next", _qwen3_next),
    "Qwen3_5ForCausalLM": family("qwen3_5_text", _qwen),
    "Qwen3_5MoeForCausalLM": family("qwen3_5_moe_text", _qwen3_5_moe),
}
