"""Families with Mamba-2 layers: Mamba-2 itself, Bamba, Granite 4.0, Nemotron-H, Falcon-H1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.families.decoder_layer import DecoderLayer
from paged.models.families.dense import granite_fields
from paged.models.families.experts import GRANITE_RENAMES, granite_moe
from paged.models.families.network import Network, family
from paged.models.families.sigmoid_experts import sigmoid_experts
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import (
    CONV_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    STATE_POSITIONS,
    decoder_config,
    for_kind,
    layer_kinds,
    read_head_dim,
    without_attention,
)
from paged.models.layers.recurrent_config import Mamba2Config
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig
from paged.step.metadata import AttentionMetadata, OutputRows

_KINDS = ("linear_attention", "full_attention")
# Letter of `hybrid_override_pattern` -> kind of layer. The first published Nemotron-H models have this key.
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NEMOTRON_KINDS = (*_KINDS, "mlp", "moe")
_MAMBA_RENAMES = {r"\.mamba\.": ".linear_attn."}
_GRANITE_RENAMES = {
    **_MAMBA_RENAMES,
    r"\.shared_mlp\.input_linear\.": ".mlp.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": ".mlp.down_proj.",
}
_GRANITE_MOE_RENAMES = {**_MAMBA_RENAMES, **GRANITE_RENAMES}
# Published names begin with "backbone."; transformers 5 writes "model." instead.
_NEMOTRON_RENAMES = {
    r"^backbone\.": "model.",
    r"^model\.embeddings\.": "model.embed_tokens.",
    r"^model\.norm_f\.": "model.norm.",
    r"\.mixer\.(?=(?:[qkvo]|qkv|qkqkv)_proj\.|attn\.|(?:[qkv]|kv)_(?:scale|zero_point)$)": ".self_attn.",
    r"\.mixer\.(?=(?:in_proj|out_proj|conv1d|norm|A_log|dt_bias|D)\b)": ".linear_attn.",
    r"\.mixer\.": ".mlp.",
}
# Names of models of Mamba-2 alone, whose only part of a layer is the mixer.
_MAMBA2_RENAMES = {
    r"^backbone\.": "model.",
    r"^model\.embeddings\.": "model.embed_tokens.",
    r"^model\.norm_f\.": "model.norm.",
    r"\.mixer\.": ".linear_attn.",
}
_FALCON_RENAMES = {**_MAMBA_RENAMES, r"^model\.final_layernorm\.": "model.norm."}
_BAMBA_RENAMES = {**_FALCON_RENAMES, r"\.feed_forward\.": ".mlp."}


def _dt_limits(hf: HfConfig) -> tuple[float, float] | None:
    """Read `time_step_limit`; None for 0 to infinity. transformers 5 writes infinity as an object."""
    value = hf.value("time_step_limit")
    limits: list[float] = []
    try:
        for limit in value or (0.0, math.inf):
            if isinstance(limit, dict):
                limit = limit["__float__"]
            limits.append(float(limit))
        low, high = limits
    except (KeyError, TypeError, ValueError, OverflowError):
        low, high = math.nan, math.nan
    if not 0 <= low <= high:
        raise CheckpointError(
            f"{hf.source}: time_step_limit = {shown(value)}, expected two rising numbers of at least 0"
        )
    if (low, high) == (0, math.inf):
        return None
    return low, high


def _mamba(hf: HfConfig, size: int, *, bias: bool, eps: float | None, **fields: Any) -> Mamba2Config:
    """Read the keys that Bamba, Granite and Falcon-H1 share. size: elements of all heads together."""
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    heads = hf.integer("mamba_n_heads")
    if hf.value("mamba_d_head") == "auto":
        head_dim = max(1, size // heads)
    else:
        head_dim = hf.integer("mamba_d_head")
    if heads * head_dim != size:
        raise CheckpointError(f"{hf.source}: {heads} mamba heads of {head_dim}, expected {size} elements")
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        num_key_heads=_divisor(hf, "mamba_n_groups", heads),
        key_dim=hf.integer("mamba_d_state"),
        conv_width=hf.integer("mamba_d_conv", minimum=2),
        conv_bias=hf.flag("mamba_conv_bias", True),
        bias=bias,
        dt_limits=_dt_limits(hf),
        eps=eps,
        **fields,
    )


def _divisor(hf: HfConfig, key: str, heads: int) -> int:
    groups = hf.integer(key)
    if heads % groups:
        raise CheckpointError(f"{hf.source}: {key} = {groups}, expected a divisor of the {heads} mamba heads")
    return groups


def _mamba2(hf: HfConfig) -> dict[str, Any]:
    """Mamba-2 (Dao and Gu, 2024) in every layer, and nothing else, as in Codestral Mamba.

    As in transformers, the norm always follows the gate. Residual streams have the model's dtype, also where
    `residual_in_fp32` asks for float32.
    """
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    hf.choice("rms_norm", True)
    hf.flag("residual_in_fp32")
    # Keys of the authors' code, of initialisation, and a size that follows from others.
    for key in ("norm_before_gate", "time_step_min", "intermediate_size"):
        hf.value(key)
    heads, head_dim = hf.integer("num_heads"), hf.integer("head_dim")
    size = int(hf.number("expand") * hf.integer("hidden_size"))
    if heads * head_dim != size:
        raise CheckpointError(f"{hf.source}: {heads} heads of {head_dim}, expected {size} elements")
    mamba = Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        num_key_heads=_divisor(hf, "n_groups", heads),
        key_dim=hf.integer("state_size"),
        conv_width=hf.integer("conv_kernel", minimum=2),
        conv_bias=hf.flag("use_conv_bias", True),
        bias=hf.flag("use_bias"),
        dt_limits=_dt_limits(hf),
        eps=hf.number("layer_norm_epsilon"),
    )
    return {
        **without_attention(heads, head_dim),
        "max_position_embeddings": hf.integer("max_position_embeddings", STATE_POSITIONS),
        "recurrent": mamba,
        "intermediate_size": 0,
        "activation": "silu",
        "eps": hf.number("layer_norm_epsilon"),
        "before_attention": "norm",
    }


def _bamba(hf: HfConfig) -> dict[str, Any]:
    """Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba-2 in most layers; in the others half of each head rotates."""
    attends = hf.items("attn_layer_indices", int)
    kinds = layer_kinds(hf, _KINDS, lambda layer: _KINDS[layer in attends])
    size = hf.integer("mamba_expand") * hf.integer("hidden_size")
    mamba = _mamba(hf, size, bias=hf.flag("mamba_proj_bias"), eps=hf.number("rms_norm_eps"))
    return {
        "recurrent": for_kind(kinds, _KINDS[0], mamba),
        "rope": rope_config(hf, fraction=0.5, is_partial=True),
        "mlp_bias": hf.flag("mlp_bias"),
        "before_mlp": "pre_ff_layernorm",
    }


def _granite_hybrid(hf: HfConfig) -> dict[str, Any]:
    """Granite 4.0 (IBM, 2025): Mamba-2 in most layers, or in no layer of some models; only some models rotate."""
    hf.value("time_step_min")  # only for initialisation
    kinds = layer_kinds(hf, _KINDS, lambda layer: _KINDS[0])
    size = hf.integer("mamba_expand") * hf.integer("hidden_size")
    mamba = None
    if _KINDS[0] in kinds:
        mamba = _mamba(hf, size, bias=hf.flag("mamba_proj_bias"), eps=hf.number("rms_norm_eps"))
    rotates = hf.choice("position_embedding_type", "rope", "nope") == "rope"
    hf.value("partial_rotary_factor")  # has no effect without rotation
    fields: dict[str, Any] = {"recurrent": for_kind(kinds, _KINDS[0], mamba), "rope": None}
    if rotates:
        fields["rope"] = rope_config(hf)
    if _has_experts(hf):
        return dict(**granite_moe(hf), **fields)
    hf.value("num_experts_per_tok")  # published, but dense models do not use it
    size = hf.integer("shared_intermediate_size")
    return dict(**granite_fields(hf), **fields, intermediate_size=size, fused_mlp=True)


def _has_experts(hf: HfConfig) -> bool:
    return hf.integer("num_local_experts", 8, minimum=0) > 0


class _GraniteHybrid(Network):
    """Granite 4.0 without experts. Its only MLP has the name of the shared MLP."""

    model_type = "granitemoehybrid"
    renames = _GRANITE_RENAMES

    @classmethod
    def variant(cls, hf: HfConfig) -> type[Network]:
        return _GraniteMoeHybrid if _has_experts(hf) else cls

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, **_granite_hybrid(hf))


class _GraniteMoeHybrid(_GraniteHybrid):
    renames = _GRANITE_MOE_RENAMES


def _nemotron_h(hf: HfConfig) -> dict[str, Any]:
    """Nemotron-H, Nemotron Nano 2 (Nvidia, 2025) and Nemotron 3 (2025).

    Each layer is Mamba-2, attention that does not rotate, an MLP or experts without gates. Experts of Nemotron 3 Super
    and Ultra read and write a latent.

    transformers limits dt to `time_step_min`, but in prompts only. The authors' kernels use `time_step_limit`, as does
    this code. So a `time_step_min` other than the published 0.001 is refused.
    """
    pattern = hf.text("hybrid_override_pattern", "ME*-")
    listed = hf.items("layers_block_type", str)
    if not listed:
        listed = [_PATTERN.get(letter, letter) for letter in pattern]
    hf.defaults = {**hf.defaults, "num_hidden_layers": len(listed)}  # transformers 5 omits num_hidden_layers
    kinds = layer_kinds(hf, _NEMOTRON_KINDS, lambda layer: listed[layer], "layers_block_type")
    hf.choice("mamba_hidden_act", *CONV_ACTIVATIONS)
    # transformers writes the keys of experts for models without experts too.
    moe = sigmoid_experts(hf, shared_size=hf.integer("moe_shared_expert_intermediate_size"))
    moe = replace(moe, latent_size=hf.optional_integer("moe_latent_size"))
    mlp_bias = hf.flag("mlp_bias")
    if moe.latent_size is not None and mlp_bias:
        raise UnsupportedError(f"{hf.source}: moe_latent_size {moe.latent_size} with mlp_bias, expected no biases")
    heads = hf.integer("mamba_num_heads")
    mamba = Mamba2Config(
        num_heads=heads,
        head_dim=hf.integer("mamba_head_dim"),
        num_key_heads=_divisor(hf, "n_groups", heads),
        key_dim=hf.integer("ssm_state_size"),
        conv_width=hf.integer("conv_kernel", minimum=2),
        conv_bias=hf.flag("use_conv_bias", True),
        bias=hf.flag("use_bias"),
        dt_limits=_dt_limits(hf),
        eps=hf.number("layer_norm_epsilon"),
    )
    size = hf.integer("intermediate_size")
    activations = ["relu2"]
    if "moe" not in kinds:  # without a gate, `fused_moe` computes relu2 alone
        activations.append("gelu_pytorch_tanh")
    return {
        "recurrent": for_kind(kinds, "linear_attention", mamba),
        "attends": for_kind(kinds, "full_attention", value=True, otherwise=False),
        "intermediate_size": for_kind(kinds, "mlp", size, otherwise=0),
        "moe": for_kind(kinds, "moe", moe),
        "rope": None,
        "gated": False,
        "activation": PLAIN_ACTIVATIONS[hf.choice("mlp_hidden_act", *activations)],
        "mlp_bias": mlp_bias,
        "eps": hf.number("layer_norm_epsilon"),
        "before_attention": "norm",
        "before_mlp": "norm",
    }


class _FalconLayer(DecoderLayer):
    """Attention and Mamba-2 on the same input; their outputs are added."""

    def attend(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor:
        assert self.self_attn is not None
        assert self.linear_attn is not None
        before, after, after_mamba = cast(Mamba2Config, self.linear_attn.config).beside_attention
        mixed: torch.Tensor = self.linear_attn(hidden, metadata, outputs)
        if before != 1:
            hidden = hidden * before
        attended: torch.Tensor = self.self_attn(hidden, positions, metadata, outputs)
        return attended.mul_(after).add_(mixed, alpha=after_mamba)


def _falcon_h1(hf: HfConfig) -> dict[str, Any]:
    """Falcon-H1 (TII, 2025): attention beside Mamba-2 in every layer; a multiplier for each projection.

    The multiplier of keys becomes a factor of the scores.
    """
    for key in ("mamba_proj_bias", "projectors_bias"):
        hf.choice(key, False)
    hf.value("time_step_min")  # only for initialisation
    size = hf.optional_integer("mamba_d_ssm") or hf.integer("mamba_expand") * hf.integer("hidden_size")
    into = hf.number("ssm_in_multiplier")
    eps = None
    if hf.flag("mamba_rms_norm"):
        eps = hf.number("rms_norm_eps")
    beside_attention = (
        hf.number("attention_in_multiplier"),
        hf.number("attention_out_multiplier"),
        hf.number("ssm_out_multiplier"),
    )
    mamba = _mamba(
        hf,
        size,
        bias=False,
        eps=eps,
        norm_first=hf.flag("mamba_norm_before_gate", True),
        in_factors=tuple(into * factor for factor in _multipliers(hf, "ssm_multipliers", 5)),
        beside_attention=beside_attention,
    )
    gate, out = _multipliers(hf, "mlp_multipliers", 2)
    return {
        "recurrent": mamba,
        "attends": True,
        "softmax_scale": hf.number("key_multiplier") * read_head_dim(hf) ** -0.5,
        "mlp_name": "feed_forward",
        "mlp_bias": hf.flag("mlp_bias"),
        "mlp_factors": (gate, out),
        "before_mlp": "pre_ff_layernorm",
        "embedding_scale": hf.number("embedding_multiplier"),
        "logits_scale": hf.number("lm_head_multiplier"),
    }


def _multipliers(hf: HfConfig, key: str, count: int) -> tuple[float, ...]:
    if hf.value(key) is None:
        return (1.0,) * count
    numbers = hf.numbers(key)
    if len(numbers) != count:
        raise CheckpointError(f"{hf.source}: {key} = {shown(numbers)}, expected {count} numbers")
    return numbers


# Name in `architectures` of config.json -> family.
MAMBAS = {
    "BambaForCausalLM": family("bamba", _bamba, _BAMBA_RENAMES),
    "FalconH1ForCausalLM": family("falcon_h1", _falcon_h1, _FALCON_RENAMES, _FalconLayer),
    "GraniteMoeHybridForCausalLM": _GraniteHybrid,
    "Mamba2ForCausalLM": family("mamba2", _mamba2, _MAMBA2_RENAMES),
    "NemotronHForCausalLM": family("nemotron_h", _nemotron_h, _NEMOTRON_RENAMES),
}
