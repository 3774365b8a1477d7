"""MiniMax-M3: attention to chosen blocks, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.attention.paged_attention import MAX_CHOSEN_BLOCK
from paged.kernels.core.errors import shown
from paged.models.families.dense import NO_BIAS
from paged.models.families.experts import MIXTRAL_NAMES, MIXTRAL_RENAMES
from paged.models.families.network import family
from paged.models.layers.attention_config import BlockIndexConfig
from paged.models.layers.decoder_config import count_layers, for_kind, moe_config, read_head_dim
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig

# Only these values are known. The keys from `scoring_func` on are in published files alone, and transformers has their
# values built in, as the kernels have the numbers of the clamped gate.
_BUILT_IN = {
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "n_shared_experts": 1,
    "attention_output_gate": False,
    "swiglu_beta": 1.0,
}
# The same for `sparse_attention_config`.
_INDEXER_BUILT_IN = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
# Published tensor name -> transformers' name; both are accepted.
_RENAMES = {
    **MIXTRAL_RENAMES,
    r"\.self_attn\.index_([qk])_": r".self_attn.indexer.\1_",
    r"\.gate\.e_score_correction_bias$": ".e_score_correction_bias",
}
# Key of the indexer in transformers -> key in the published `sparse_attention_config`, which takes precedence.
_INDEXER_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
_SPARSE_ATTENTION = "minimax_m3_sparse"


def _minimax_m3(hf: HfConfig) -> dict[str, Any]:
    """MiniMax-M3 (MiniMax, 2026): an indexer in most layers, zero-centred norms of heads, sigmoid routing with a bias.

    A part of each head rotates. Only transformers' own files fuse gate and up.
    """
    for key, known in _BUILT_IN.items():
        hf.choice(key, known)
    hf.choice("hidden_act", "swigluoai", "silu")  # transformers writes "silu" for the same activation
    hf.value("rotary_dim")  # published, but nothing reads it
    section = hf.section("sparse_attention_config") or HfConfig({}, hf.source)
    attention_kinds = _kinds(
        hf.items("layer_types", str), section, "sparse_attention_freq", (_SPARSE_ATTENTION, "full_attention"), hf
    )
    mlp_kinds = _kinds(hf.items("mlp_layer_types", str), hf, "moe_layer_freq", ("sparse", "dense"), hf)
    rope = rope_config(hf, is_partial=True)
    for key in _INDEXER_KEYS:
        hf.value(key)  # without effect if no layer has an indexer
    index = None
    if _SPARSE_ATTENTION in attention_kinds:
        index = _indexer(hf, section, attention_kinds)
        if index.head_dim < rope.fraction * read_head_dim(hf):
            raise CheckpointError(
                f"{hf.source}: index_head_dim {index.head_dim} is less than the rotated part of heads"
            )
    experts = moe_config(
        hf,
        renormalize=True,
        scoring="sigmoid",
        correction_bias="e_score_correction_bias",
        float32_router=True,
        routed_scaling_factor=hf.number("routed_scaling_factor"),
        shared_size=hf.integer("shared_intermediate_size"),
        **MIXTRAL_NAMES,
    )
    return dict(
        **NO_BIAS,
        intermediate_size=hf.integer("dense_intermediate_size"),
        activation="swiglu_oai",
        fused_mlp=None,
        zero_centred=True,
        qk_norm="head",
        rope=rope,
        block_index=for_kind(attention_kinds, _SPARSE_ATTENTION, index),
        moe=for_kind(mlp_kinds, "sparse", experts),
        num_mtp_layers=hf.integer("num_mtp_modules", 0, minimum=0),
    )


def _kinds(stated: Sequence[str], published: HfConfig, key: str, known: tuple[str, str], hf: HfConfig) -> Sequence[str]:
    """Return each layer's kind: as stated by transformers' key, else by the published list of 1 and 0.

    known: the kinds for 1 and 0. Without both keys, all layers have attention to all keys, and experts.

    Raises:
        CheckpointError: there are not as many entries as layers, an entry is unknown, or the keys contradict each
            other.
    """
    num_layers, frequencies = count_layers(hf), published.items(key, int)
    by_frequency = [known[0] if frequency else known[1] for frequency in frequencies]
    kinds = list(stated) or by_frequency
    if not kinds and known[0] == _SPARSE_ATTENTION:
        kinds = [known[1]] * num_layers
    elif not kinds:
        kinds = [known[0]] * num_layers
    if len(kinds) != num_layers or not {*kinds} <= {*known} or not {*frequencies} <= {0, 1}:
        raise CheckpointError(
            f"{hf.source}: {shown(kinds)} by {key} or layer types, expected {' or '.join(known)} for each of "
            f"{num_layers} layers"
        )
    if frequencies and by_frequency != kinds:
        raise CheckpointError(f"{hf.source}: {key} = {shown(frequencies)}, but layer types say {shown(kinds)}")
    return kinds


def _indexer(hf: HfConfig, section: HfConfig, kinds: Sequence[str]) -> BlockIndexConfig:
    """Read the indexer.

    Raises:
        UnsupportedError: an option, or the number of heads, is not supported.
        CheckpointError: a size is malformed.
    """
    for key, known in _INDEXER_BUILT_IN.items():
        section.choice(key, known)
    without_values = section.items("sparse_disable_index_value", int)
    if without_values and without_values != [int(kind == _SPARSE_ATTENTION) for kind in kinds]:
        raise UnsupportedError(
            f"{section.source}: sparse_disable_index_value {shown(without_values)}, expected 1 for each layer with an "
            "indexer"
        )
    sizes: dict[str, int] = {}
    for name, key in _INDEXER_KEYS.items():
        minimum = 1
        if name == "index_local_blocks":
            minimum = 0
        sizes[name] = hf.integer(name, minimum=minimum)
        sizes[name] = section.integer(key, sizes[name], minimum=minimum)
    section.refuse_unread()
    if sizes["index_n_heads"] != (num_kv_heads := hf.integer("num_key_value_heads")):
        raise UnsupportedError(f"{hf.source}: index_n_heads {sizes['index_n_heads']}, expected {num_kv_heads} KV heads")
    size, head_dim, top_k = sizes["index_block_size"], sizes["index_head_dim"], sizes["index_topk_blocks"]
    if size > MAX_CHOSEN_BLOCK or not 16 <= head_dim <= 256:
        raise UnsupportedError(
            f"{hf.source}: blocks of {size} by heads of {head_dim}, supported are up to {MAX_CHOSEN_BLOCK} by 16 to 256"
        )
    if sizes["index_local_blocks"] > top_k:
        raise CheckpointError(f"{hf.source}: index_local_blocks {sizes['index_local_blocks']} of {top_k} blocks")
    return BlockIndexConfig(head_dim, top_k, size, sizes["index_local_blocks"])


# Name in `architectures` of config.json -> family.
MINIMAX = {"MiniMaxM3VLForCausalLM": family("minimax_m3_vl_text", _minimax_m3, _RENAMES)}
