"""dots3-note (rednote, 2026), text only: sparse latent attention, and latent attention with a window."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.families.deepseek import latent_attention
from paged.models.families.network import Network
from paged.models.families.sigmoid_experts import by_mlp_layer_types, sigmoid_experts
from paged.models.layers.attention_config import IndexConfig, LatentConfig
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.decoder_config import count_layers, decoder_config, for_kind, layer_kinds, own_values
from paged.models.layers.rope import RopeConfig, scaled_rope
from paged.models.loading.hf_config import HfConfig

_INDEXED, _FULL, _SLIDING = "indexed_attention", "full_attention", "sliding_attention"
# Sizes that layers with a window have of their own. Published files have them as keys that begin with `swa_`.
_WINDOW_SIZES = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
_SIZES = (*_WINDOW_SIZES, "qk_rope_head_dim")
# RoPE's base in layers with a window.
_WINDOW_THETA = 5e4


class Dots3Note(Network):
    """Latents are scaled after their norms, the rotated part of keys has a norm, and heads are gated by sigmoid."""

    model_type = "dots3_note_text"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.choice("apply_mla_qkv_lora_rescale", True)
        hf.choice("indexer_rope_interleave", True)
        for key in ("attention_gate_type", "swa_attention_gate_type"):
            hf.choice(key, "headwise")
        window = hf.integer("sliding_window", hf.integer("sliding_window_size", 512))
        kinds = _kinds(hf)
        index = IndexConfig(
            hf.integer("index_n_heads"), hf.integer("index_head_dim"), hf.integer("index_topk"), interleaved=True
        )
        layers: dict[str, list[Any]] = {}
        for layer, kind in enumerate(kinds):
            for name, value in _attention(hf, layer, kind, index).items():
                layers.setdefault(name, []).append(value)
        fields = {name: tuple(values) for name, values in layers.items()}
        (num_mtp_layers,) = set(fields.pop("num_mtp_layers"))
        return decoder_config(
            hf,
            **fields,
            num_mtp_layers=num_mtp_layers,
            window=for_kind(kinds, _SLIDING, window),
            rope=_rotations(hf, kinds),
            head_gate="sigmoid",
            moe=_experts(hf),
        )


def _kinds(hf: HfConfig) -> tuple[str, ...]:
    """Return the kind of each layer. Published files call layers with an indexer "full_attention"."""
    default: bool | None = True
    if "per_layer_config" in hf.values:  # written by transformers, which names the layers' kinds
        default = None
    uses_index = hf.values.get("use_dsa", default)
    hf.choice("use_dsa", True, False)
    full_kind = _INDEXED
    if uses_index is False:
        full_kind = _FULL
    has_windows = hf.flag("use_sliding_window", True)

    def kind_of(layer: int) -> str:
        if not has_windows or layer < 2 or layer % 4 == 1:
            return full_kind
        return _SLIDING

    kinds = layer_kinds(hf, (_INDEXED, _FULL, _SLIDING), kind_of)
    if uses_index is None:
        return kinds
    return for_kind([kind == _SLIDING for kind in kinds], True, _SLIDING, otherwise=full_kind)


def _attention(hf: HfConfig, index: int, kind: str, indexer: IndexConfig) -> dict[str, Any]:
    """Return the fields of a layer's attention."""
    sizes: dict[str, Any] = own_values(hf, index, _SIZES)
    window_sizes = {key: hf.integer(f"swa_{key}", default) for key, default in _WINDOW_SIZES.items()}
    rope_dim = window_sizes["head_dim"] - window_sizes["qk_nope_head_dim"]
    window_sizes["qk_rope_head_dim"] = hf.integer("swa_qk_rope_head_dim", rope_dim)
    if kind == _SLIDING and "per_layer_config" not in hf.values:
        sizes = window_sizes
    layer = hf.overridden(sizes)
    fields = latent_attention(layer, reads_head_dim=False)
    latent: LatentConfig = fields["latent"]
    hidden_size, q_rank = hf.integer("hidden_size"), layer.integer("q_lora_rank")
    head_dim = layer.integer("head_dim")
    if kind == _SLIDING and head_dim != latent.nope_dim + latent.rope_dim:
        raise CheckpointError(
            f"{hf.source}: head_dim {head_dim} of layer {index}, expected {latent.nope_dim} + {latent.rope_dim}"
        )
    if kind == _INDEXED:
        latent = replace(latent, index=indexer)
        if indexer.head_dim < latent.rope_dim:
            raise CheckpointError(f"{hf.source}: index_head_dim {indexer.head_dim} is less than qk_rope_head_dim")
    hf.read_keys |= layer.read_keys
    fields["latent"] = replace(
        latent,
        eps=hf.number("rms_norm_eps"),
        q_factor=sqrt(hidden_size / q_rank),
        kv_factor=sqrt(hidden_size / latent.rank),
        norms_rope=True,
    )
    return fields


def _rotations(hf: HfConfig, kinds: tuple[str, ...]) -> tuple[RopeConfig, ...]:
    """Return the rotation of each layer; `rope_parameters` has an object for each kind of layer.

    Raises:
        UnsupportedError: there is a `rope_scaling`, or `rope_parameters` is one object for all layers.
    """
    hf.choice("rope_scaling")
    thetas = {_SLIDING: hf.number("swa_rope_theta", _WINDOW_THETA)}
    sections = hf.section("rope_parameters")
    if sections is not None and not all(isinstance(value, dict) for value in sections.values.values()):
        raise UnsupportedError(
            f"{hf.source}: rope_parameters {shown(sections.values)}, expected an object for each kind"
        )
    rotations: list[RopeConfig] = []
    for kind in kinds:
        section = None
        if sections is not None:
            section = sections.section(kind)
        section = section or HfConfig({}, hf.source)
        rope = scaled_rope(hf, section, thetas.get(kind, hf.number("rope_theta")), is_partial=True)
        rotations.append(replace(rope, fraction=1.0, interleaved=True))
    return tuple(rotations)


def _experts(hf: HfConfig) -> tuple[MoeConfig | None, ...]:
    """Return the experts of each layer, by `mlp_layer_types`, or `first_k_dense_replace` and `moe_layer_freq`."""
    size = hf.integer("moe_shared_expert_intermediate_size", hf.integer("shared_experts_intermediate_size"))
    moe = sigmoid_experts(hf, size * hf.integer("n_shared_experts"))
    first = hf.integer("first_k_dense_replace", minimum=0)
    frequency = hf.value("moe_layer_freq")
    if hf.items("mlp_layer_types", str):
        return by_mlp_layer_types(hf, moe)
    experts: list[MoeConfig | None] = []
    for layer in range(count_layers(hf)):
        has_experts = layer >= first
        if isinstance(frequency, list):
            has_experts = has_experts and bool(hf.items("moe_layer_freq", int)[layer])
        else:
            has_experts = has_experts and layer % hf.integer("moe_layer_freq", 1) == 0
        experts.append(moe if has_experts else None)
    return tuple(experts)
