"""Families with recurrent layers; they differ from Llama only in fields of `decoder_config` and names of weights."""

from __future__ import annotations

from typing import Any

from paged.models.families.experts import qwen_experts
from paged.models.families.llama import family
from paged.models.layers.config import RecurrentConfig
from paged.models.layers.decoder_config import layer_kinds
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig

_SHARED = {"shared_name": "shared_expert", "shared_gate": "shared_expert_gate"}
# Constants of these models in transformers, repeated by published configurations.
_QWEN_BUILT_IN = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}


def _qwen(hf: HfConfig, *, by_head: bool = False) -> dict[str, Any]:
    """Fields of Qwen's hybrids: every fourth layer has attention with an output gate, the others gated delta nets."""
    for key, known in _QWEN_BUILT_IN.items():
        hf.choice(key, known)
    interval = hf.integer("full_attention_interval")
    attends = layer_kinds(hf, "linear_attention", lambda layer: (layer + 1) % interval == 0)
    fraction = hf.number("partial_rotary_factor")
    recurrent = RecurrentConfig(
        num_heads=hf.integer("linear_num_value_heads"),
        head_dim=hf.integer("linear_value_head_dim"),
        num_key_heads=hf.integer("linear_num_key_heads"),
        key_dim=hf.integer("linear_key_head_dim"),
        conv_width=hf.integer("linear_conv_kernel_dim"),
        by_head=by_head,
        eps=hf.number("rms_norm_eps"),
        gate="sigmoid" if hf.choice("output_gate_type", "silu", "swish", "sigmoid") == "sigmoid" else "silu",
    )
    return {
        "recurrent": tuple(None if one else recurrent for one in attends),
        "rope": rope_config(hf, fraction=fraction, is_partial=True),
        "qk_norm": "head",
        "output_gate": True,
        "zero_centred": True,
    }


def _qwen3_5(hf: HfConfig) -> dict[str, Any]:
    """Qwen3.5 to 3.8, dense (Qwen Team, 2026)."""
    return _qwen(hf)


def _qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    """Qwen3.5 to 3.8 with experts in every layer, whose weights sum to 1."""
    hf.choice("norm_topk_prob", True)
    shared_size = hf.integer("shared_expert_intermediate_size")
    moe = qwen_experts(hf, renormalize=True, shared_size=shared_size, **_SHARED)
    return {**_qwen(hf), "moe": moe, "intermediate_size": hf.integer("moe_intermediate_size")}


def _qwen3_next(hf: HfConfig) -> dict[str, Any]:
    """Qwen3-Next (Qwen Team, 2025): projections stored by key head; experts in most layers."""
    shared_size = hf.integer("shared_expert_intermediate_size")
    return {**_qwen(hf, by_head=True), "moe": qwen_experts(hf, shared_size=shared_size, **_SHARED)}


# Keys are names in `architectures` of config.json.
HYBRIDS = {
    "Qwen3NextForCausalLM": family("qwen3_next", _qwen3_next),
    "Qwen3_5ForCausalLM": family("qwen3_5_text", _qwen3_5),
    "Qwen3_5MoeForCausalLM": family("qwen3_5_moe_text", _qwen3_5_moe),
}
