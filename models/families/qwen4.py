"""Qwen4-Exp: hybrid layers on gated residual streams, with attention to chosen pools and hashed n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.layers.streams import MAX_STREAMS
from paged.models.families.hashed_tables import MAX_ORDER, MAX_ROWS, SEED_STEP, factor_bound, table_sizes
from paged.models.families.hybrid import qwen4_exp
from paged.models.families.hyper_streams import StreamsLayer, StreamsMix
from paged.models.families.network import Network
from paged.models.layers.attention_config import BlockIndexConfig
from paged.models.layers.config import DecoderConfig, GatedStreamsConfig
from paged.models.layers.decoder_config import count_layers, decoder_config, for_kind, read_head_dim
from paged.models.layers.recurrent_config import NgramConfig
from paged.models.layers.rope import RopeConfig
from paged.models.loading.hf_config import HfConfig

# Numbers of the generator splitmix64 (Steele, Lea and Flood, 2014).
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_MAX_INDEX_HEAD_DIM = 256
_INDEXER_KEYS = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)


class Qwen4Exp(Network):
    """Text part of Qwen4-Exp (Qwen, 2026), the architecture of Qwen3.8-Flash-Next."""

    model_type = "qwen4_exp_text"
    renames = MappingProxyType({r"\bmodel\.hyper_connection_mixer\.": "model.norm."})
    layer_class = StreamsLayer
    norm_class = StreamsMix

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        count = hf.integer("hc_count", minimum=2, maximum=MAX_STREAMS)
        streams = GatedStreamsConfig(count=count, rank=hf.integer("hc_lowrank"))
        kinds, fields = qwen4_exp(hf)
        fields |= {
            "block_index": for_kind(kinds, "full_attention", _indexer(hf, fields["rope"], read_head_dim(hf))),
            "streams": streams,
            "ngrams": _ngrams(hf, kinds),
            # Mixes of streams contain the norms.
            "before_attention": None,
            "before_mlp": None,
        }
        return decoder_config(hf, **fields)


def _indexer(hf: HfConfig, rope: RopeConfig, head_dim: int) -> BlockIndexConfig | None:
    """Return the indexer; None for attention to all keys, as in vLLM, if no size of it is stated.

    rope, head_dim: rotation and size of the heads of attention.
    """
    if all(hf.value(key) is None for key in _INDEXER_KEYS):
        return None
    hf.choice("indexer_kv_heads", 1)
    budget, pool_size = hf.integer("indexer_budget"), hf.integer("indexer_compress_ratio", minimum=2, maximum=256)
    index_head_dim = hf.integer("indexer_head_dim", maximum=_MAX_INDEX_HEAD_DIM)
    if index_head_dim < rope.fraction * head_dim:
        raise CheckpointError(f"{hf.source}: indexer_head_dim {index_head_dim} is less than the rotated part of heads")
    if budget % pool_size:
        raise CheckpointError(
            f"{hf.source}: indexer_budget {budget}, expected a multiple of indexer_compress_ratio {pool_size}"
        )
    return BlockIndexConfig(
        head_dim=index_head_dim,
        top_k=budget // pool_size,
        block_size=pool_size,
        local_blocks=0,
        num_heads=hf.integer("indexer_n_heads"),
        pool_size=pool_size,
    )


def _ngrams(hf: HfConfig, kinds: Sequence[str]) -> tuple[NgramConfig | None, ...]:
    """Return the n-grams of each layer; `ple_layer_ids` counts layers from 1."""
    hf.value("number_of_conv_states")  # follows from ple_layer_ids
    num_layers, vocab_size, hidden_size = count_layers(hf), hf.integer("vocab_size"), hf.integer("hidden_size")
    layers = sorted({layer - 1 for layer in hf.items("ple_layer_ids", int)})
    hf.choice("ple_embedding_dtype")  # packed tables
    order = hf.integer("ngram_size", minimum=2, maximum=MAX_ORDER)
    num_heads = (order - 1) * hf.integer("heads_per_ngram")
    size = hf.integer("ple_embed_dim", hidden_size)
    conv_width = hf.integer("ple_conv_kernel_size", minimum=2)
    first_rows = hf.integer("ngram_vocab_size_base", maximum=MAX_ROWS)
    multiple, num_parts = hf.integer("make_ngram_vocab_size_divisible_by"), hf.integer("split_ngram_parts")
    seed = hf.integer("seed", minimum=0)
    separator = hf.value("eos_token_id")
    if isinstance(separator, list):
        separator = next(iter(separator), None)
    if not layers:
        return (None,) * num_layers
    if type(separator) is not int or not 0 <= separator < vocab_size:
        raise CheckpointError(f"{hf.source}: eos_token_id {separator!r}, expected an id, which n-grams end at")
    if size % num_heads:
        raise CheckpointError(f"{hf.source}: ple_embed_dim {size}, expected a multiple of {num_heads} heads of n-grams")
    for layer in layers:
        if not 0 <= layer < num_layers or kinds[layer] != "linear_attention":
            raise UnsupportedError(
                f"{hf.source}: ple_layer_ids has {layer + 1}, expected a linear_attention layer from 1 to {num_layers}"
            )
    ngrams: list[NgramConfig | None] = [None] * num_layers
    for index, (layer, sizes) in enumerate(zip(layers, table_sizes(first_rows, num_heads), strict=False)):
        ngrams[layer] = NgramConfig(
            order=order,
            size=size,
            conv_width=conv_width,
            table_sizes=sizes,
            multipliers=_multipliers(vocab_size, order, seed + SEED_STEP * index),
            num_rows=-(-sum(sizes) // multiple) * multiple,
            num_parts=num_parts,
            separator=separator,
        )
    return tuple(ngrams)


def _multipliers(vocab_size: int, order: int, seed: int) -> tuple[int, ...]:
    """Return odd random factors; a factor times a token id stays below 2^63."""
    bound = factor_bound(vocab_size)
    factors: list[int] = []
    for index in range(order):
        value = seed + (index + 1) * _GAMMA
        factors.append(2 * (_splitmix(value) % bound) + 1)
    return tuple(factors)


def _splitmix(value: int) -> int:
    """Return a random number of 64 bits for a seed."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


# Name in `architectures` of config.json -> family.
QWEN4: dict[str, Any] = {"Qwen4ExpForCausalLM": Qwen4Exp}
