"""DeepSeek-V4: attention to a window and compressed entries, several residual streams, experts by token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.checks import MAX_HEAD_DIM
from paged.kernels.core.errors import shown
from paged.kernels.quantization.packing import MXFP4_GROUP
from paged.models.families.hyper_streams import StreamsLayer, StreamsNorm, streams_config
from paged.models.families.network import Network
from paged.models.layers.attention_config import CompressedConfig, IndexConfig
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.decoder_config import CONV_ACTIVATIONS, count_layers, decoder_config, layer_kinds, moe_config
from paged.models.layers.rope import RopeConfig, rope_section, scaled_rope
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.layouts import Fp4, Quantization, Rule
from paged.models.quantization.name_patterns import NamePattern
from paged.models.quantization.read import read_quantization

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# Value of `compress_ratios` -> kind of layer.
_KIND_OF_RATIO = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
_POOL_SIZES = {_SPARSE: 4, _HEAVY: 128}
_OLDER_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_HASHED, _ROUTED = "hash_moe", "moe"
_EXPERT_DTYPES = ("fp4", "fp8")
# Only these values are supported; transformers has most of them built in.
BUILT_IN = {
    "attention_bias": False,
    "mlp_bias": False,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "vision_n_layers": 0,
}
# Published names, names as transformers saves them, and those of its parameters -> names here.
RENAMES = {
    r"^(?=(?:layers|norm|embed|hc_head_\w+)\b)": "model.",
    r"^model\.embed\.": "model.embed_tokens.",
    r"^head\.": "lm_head.",
    r"^model\.hc_head\.hc_": "model.hc_head_",
    r"\.attn\.": ".self_attn.",
    r"\.self_attn\.norm\.": ".self_attn.kv_norm.",
    r"\.ffn\.": ".mlp.",
    r"\.(attn|ffn)_hc\.": r".hc_\1_",
    r"\.input_layernorm\.": ".attn_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.compressor\.indexer\.scorer\.": ".indexer.",
    r"\.compressor\.indexer\.q_b_proj\.": ".indexer.wq_b.",
    r"\.compressor\.indexer\.": ".indexer.compressor.",
    r"\.compressor\.gate_proj\.": ".compressor.wgate.",
    r"\.compressor\.kv_norm\.": ".compressor.norm.",
    r"\.position_bias$": ".ape",
    r"\.kv_proj\.": ".wkv.",
    r"\.self_attn\.(q|o)_(a|b)_proj\.": r".self_attn.w\1_\2.",
    r"\.q_a_norm\.": ".q_norm.",
    r"\.self_attn\.sinks$": ".self_attn.attn_sink",
    r"\.gate\.e_score_correction_bias$": ".gate.bias",
    r"\.shared_experts\.w1\.": ".shared_experts.gate_proj.",
    r"\.shared_experts\.w2\.": ".shared_experts.down_proj.",
    r"\.shared_experts\.w3\.": ".shared_experts.up_proj.",
}


class DeepseekV4(Network):
    """DeepSeek-V4 (DeepSeek-AI, 2026), Flash and full."""

    model_type = "deepseek_v4"
    renames = RENAMES
    layer_class = StreamsLayer
    norm_class = StreamsNorm

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        main, compressed = rotations(hf)
        config = decoder_config(hf, **_deepseek_v4(hf, main, compressed))
        # The multi-token layer has a window alone.
        last = config.attention[-1]
        assert last.compressed is not None
        window_alone = replace(last, rope=main, compressed=replace(last.compressed, pool_size=0, index=None))
        return replace(config, mtp_attention=window_alone)

    def layer_inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return the token ids for each layer whose experts they choose."""
        inputs: list[tuple[torch.Tensor, ...]] = []
        for moe in self.config.moe:
            is_hashed = moe is not None and moe.token_table is not None
            inputs.append((input_ids,) if is_hashed else ())
        return inputs


def _deepseek_v4(hf: HfConfig, main: RopeConfig, compressed: RopeConfig) -> dict[str, Any]:
    fields, sizes, kinds = shared_fields(hf), window_sizes(hf), _kinds(hf)
    rates, window = _pool_sizes(hf), fields["window"]
    if window <= rates[_SPARSE]:
        raise UnsupportedError(
            f"{hf.source}: sliding_window {window}, expected more than the {rates[_SPARSE]} positions of a pool that "
            "the next pool overlaps"
        )
    of_kind = {
        _WINDOW: sizes,
        _SPARSE: replace(sizes, pool_size=rates[_SPARSE], index=indexer(hf, rates[_SPARSE])),
        _HEAVY: replace(sizes, pool_size=rates[_HEAVY]),
    }
    ropes = {_WINDOW: main, _SPARSE: compressed, _HEAVY: compressed}
    return fields | {
        "rope": tuple(ropes[kind] for kind in kinds),
        "compressed": tuple(of_kind[kind] for kind in kinds),
        "moe": _experts(hf),
        "streams": streams_config(hf, num_iterations=hf.integer("hc_sinkhorn_iters"), has_head=True),
        "num_mtp_layers": hf.integer("num_nextn_predict_layers", minimum=0),
    }


def shared_fields(hf: HfConfig) -> dict[str, Any]:
    """Return the fields that DeepSeek-V4 and V4.1 read alike."""
    for key, known in BUILT_IN.items():
        hf.choice(key, known)
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    head_dim = hf.integer("head_dim")
    return {
        "num_heads": hf.integer("num_attention_heads"),
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "softmax_scale": head_dim**-0.5,
        "window": hf.integer("sliding_window"),
        "activation": "silu_10",
        "intermediate_size": hf.integer("moe_intermediate_size"),
        "before_attention": "attn_norm",
        "before_mlp": "ffn_norm",
        "quantization": expert_quantization(hf),
    }


def window_sizes(hf: HfConfig) -> CompressedConfig:
    """Return the sizes of a layer with a window alone."""
    num_heads, num_groups = hf.integer("num_attention_heads"), hf.integer("o_groups")
    if num_heads % num_groups:
        raise CheckpointError(f"{hf.source}: num_attention_heads {num_heads}, expected a multiple of {num_groups}")
    return CompressedConfig(
        q_rank=hf.integer("q_lora_rank"),
        rope_dim=rope_dim_of(hf),
        pool_size=0,
        index=None,
        num_groups=num_groups,
        group_rank=hf.integer("o_lora_rank"),
    )


def indexer(hf: HfConfig, pool_size: int) -> IndexConfig:
    """Return the indexer of entries of `pool_size` positions."""
    return IndexConfig(
        hf.integer("index_n_heads"),
        hf.integer("index_head_dim", minimum=rope_dim_of(hf)),
        hf.integer("index_topk"),
        interleaved=True,
        pool_size=pool_size,
    )


def expert_quantization(hf: HfConfig) -> Quantization | None:
    """Return the format of packed weights. Published are e4m3 in blocks of 128 x 128, and experts in MXFP4 or as these.

    Pools are never packed.
    """
    quantization = read_quantization(hf)
    section = hf.section("quantization_config")
    # transformers moves the key into the section.
    expert_dtype = hf.choice("expert_dtype", *_EXPERT_DTYPES)
    if section is None or quantization is None:
        return None
    expert_dtype = section.choice("expert_dtype", *_EXPERT_DTYPES) or expert_dtype or "fp4"
    section.choice("moe_quant_algo", "MXFP4", "FP8")  # published too: NVFP4
    rules: list[Rule] = [(NamePattern(r".*\.compressor\."), None)]
    if section.text("quant_method") == "fp8" and expert_dtype == "fp4":
        mxfp4 = Fp4(form="mxfp4", group_size=MXFP4_GROUP, weight="weight", scale="scale")
        rules.append((NamePattern(r".*\.experts\.\d+\.w[123]\Z"), mxfp4))
    return replace(quantization, rules=(*rules, *quantization.rules))


def rope_dim_of(hf: HfConfig) -> int:
    """Return how many numbers of a head rotate. The share of a head, if given, takes precedence as in transformers."""
    head_dim = hf.integer("head_dim")
    rope_dim = hf.integer("qk_rope_head_dim", head_dim // 8)
    if hf.value("partial_rotary_factor") is not None:
        rope_dim = int(head_dim * hf.number("partial_rotary_factor"))
    sizes = rope_dim, head_dim - rope_dim
    if min(sizes) < 1 or any(size % 16 for size in sizes) or head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"{hf.source}: {rope_dim} of {head_dim} numbers of a head rotate, known are heads up to {MAX_HEAD_DIM} "
            "whose parts are multiples of 16"
        )
    return rope_dim


def _kinds(hf: HfConfig) -> tuple[str, ...]:
    """Return the kind of each layer, by `layer_types` or by `compress_ratios`, which may also list extra layers."""
    num_layers = count_layers(hf)
    kinds = hf.items("layer_types", str)
    ratios = hf.items("compress_ratios", int)
    if not kinds and ratios:
        if unknown := set(ratios) - {*_KIND_OF_RATIO}:
            known = ", ".join(map(str, _KIND_OF_RATIO))
            raise UnsupportedError(f"{hf.source}: compress_ratios has {min(unknown)}, known are {known}")
        kinds = [_KIND_OF_RATIO[ratio] for ratio in ratios]
    named = hf.overridden({"layer_types": kinds[:num_layers]})

    def default(layer: int) -> str:
        return _SPARSE if layer > 2 and layer % 2 == 1 else _HEAVY

    return layer_kinds(named, (_WINDOW, _SPARSE, _HEAVY), default)


def _pool_sizes(hf: HfConfig) -> dict[str, int]:
    """Return the positions of an entry by the kind of layer."""
    section = hf.section("compress_rates") or HfConfig({}, hf.source)
    sizes: dict[str, int] = {}
    for kind, size in _POOL_SIZES.items():
        sizes[kind] = hf.integer(_OLDER_RATES[kind], section.integer(kind, size), minimum=2)
    section.refuse_unread()
    return sizes


def rotations(hf: HfConfig) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of layers without and with entries; scaling applies to layers with entries alone."""
    share = rope_dim_of(hf) / hf.integer("head_dim")
    theta, compress_theta = hf.number("rope_theta"), hf.number("compress_rope_theta")
    section = rope_section(hf)
    main, compressed = section.section("main"), section.section("compress")
    if main is None or compressed is None:
        main = HfConfig({}, hf.source)
        values = {key: value for key, value in section.values.items() if key not in ("main", "compress")}
        compressed = HfConfig({**values, "rope_theta": compress_theta}, section.source)
    # The model does not multiply cosines and sines by yarn's factor.
    compressed = HfConfig({"attention_factor": 1.0, **compressed.values}, compressed.source)
    return _rotation(hf, main, theta, share), _rotation(hf, compressed, compress_theta, share)


def _rotation(hf: HfConfig, section: HfConfig, theta: float, share: float) -> RopeConfig:
    """Return the rotation of a section. theta: its default. share: part of a head that rotates."""
    for key in ("rope_type", "type"):
        section.choice(key, "default", "yarn")
    rope = scaled_rope(hf, section, theta, share, is_partial=True)
    if rope.fraction != share:
        raise CheckpointError(f"{section.source}: partial_rotary_factor {rope.fraction}, expected {share}")
    return replace(rope, fraction=1.0, interleaved=True)


def routed_experts(hf: HfConfig) -> MoeConfig:
    """Return the experts of a layer that chooses them by score."""
    return moe_config(
        hf,
        size_key="moe_intermediate_size",
        count_key="n_routed_experts",
        renormalize=True,
        scoring="sqrt_softplus",
        correction_bias="gate.bias",
        float32_router=True,
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        shared_size=hf.integer("moe_intermediate_size"),
        gate_name="w1",
        up_name="w3",
        down_name="w2",
    )


def _experts(hf: HfConfig) -> tuple[MoeConfig, ...]:
    """Return the experts of each layer. In the first layers the token id chooses them."""
    routed = routed_experts(hf)
    hashed = replace(routed, correction_bias=None, token_table="gate.tid2eid")
    num_layers, num_hashed = count_layers(hf), hf.integer("num_hash_layers", minimum=0)
    kinds = hf.items("mlp_layer_types", str)
    if not kinds:
        kinds = [_HASHED if layer < num_hashed else _ROUTED for layer in range(num_layers)]
    if len(kinds) != num_layers or not {*kinds} <= {_HASHED, _ROUTED}:
        raise CheckpointError(
            f"{hf.source}: mlp_layer_types {shown(kinds)}, expected {_HASHED} or {_ROUTED} for each of {num_layers} "
            "layers"
        )
    return tuple(hashed if kind == _HASHED else routed for kind in kinds)
