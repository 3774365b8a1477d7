"""DeepSeek-V4.1: layers share entries and choices; streams are mixed in one pass; n-grams of tokens are looked up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.cache.latent_cache import MXFP8_BYTES
from paged.kernels.core.errors import shown
from paged.models.families.deepseek_v4 import (
    RENAMES,
    indexer,
    rotations,
    routed_experts,
    shared_fields,
    window_sizes,
)
from paged.models.families.hashed_tables import MAX_ORDER, MAX_ROWS, SEED_STEP, factor_bound, table_sizes
from paged.models.families.hyper_streams import StreamsLayer, StreamsNorm, streams_config
from paged.models.families.network import Network
from paged.models.layers.attention_config import CompressedConfig, EntrySharing
from paged.models.layers.compressed_cache import entries_layer, token_ids_index
from paged.models.layers.config import BlockDrafterConfig, DecoderConfig, MoeConfig
from paged.models.layers.decoder_config import count_layers, decoder_config
from paged.models.layers.engram import GROUP
from paged.models.layers.recurrent_config import EngramConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.tokenizer_file import shared_ids
from paged.models.parallel.share import Share

# Most ids of the hash, which the cache keeps as float32.
_MAX_IDS = 1 << 24
# Most layers of the drafter, and tokens of its blocks; published are 3 and 5.
_MOST_DRAFT_LAYERS, _MOST_DRAFTS = 16, 32


class DeepseekV41(Network):
    """Text part of DeepSeek-V4.1 (DeepSeek-AI, 2026), by the files of vLLM 0.33."""

    model_type = "deepseek_v41_text"
    renames = RENAMES
    layer_class = StreamsLayer
    norm_class = StreamsNorm

    def __init__(self, config: DecoderConfig, share: Share | None = None) -> None:
        super().__init__(config, share)
        self.ids_of_tokens: torch.Tensor | None = None

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        main, compressed = rotations(hf)
        sizes = _layer_sizes(hf)
        ropes = tuple(compressed if layer.pool_size else main for layer in sizes)
        experts = routed_experts(hf)
        fields = shared_fields(hf) | {
            "rope": ropes,
            "compressed": sizes,
            "moe": experts,
            "streams": streams_config(hf, num_iterations=hf.integer("hc_sinkhorn_iters"), single_pass=True),
            "ngrams": _engrams(hf),
        }
        config = decoder_config(hf, **fields)
        window_alone = replace(config.attention[-1], rope=main, compressed=_window_alone(hf))
        return replace(config, mtp_attention=window_alone, block_drafter=_block_drafter(hf, experts))

    def read_folder(self, folder: Path) -> None:
        """Read the tokenizer, by which tokens share ids in the hash of n-grams.

        Raises:
            CheckpointError: tokenizer.json is missing or malformed, or gives another number of ids.
            UnsupportedError: the tokenizers package is not installed.
        """
        engrams = [ngrams for ngrams in self.config.ngrams if isinstance(ngrams, EngramConfig)]
        if not engrams:
            return
        file = folder / "tokenizer.json"
        ids = shared_ids(file)
        num_ids, num_tokens = len(set(ids)), len(ids)
        if num_ids != engrams[0].num_ids:
            raise CheckpointError(
                f"{file}: tokens share {num_ids} ids, expected {engrams[0].num_ids}, engram_compressed_vocab_size"
            )
        padding = engrams[0].pad_token_id
        if padding >= num_tokens:
            raise CheckpointError(f"{file}: {num_tokens} tokens, expected engram_pad_token_id {padding} among them")
        # Rows of the vocabulary behind the tokenizer's have no text.
        ids += [ids[padding]] * max(self.config.vocab_size - num_tokens, 0)
        self.ids_of_tokens = torch.tensor(ids, device=self.embed_tokens.device)

    def set_caches(self, kv_manager: PagedKvCacheManager, max_seq_len: int) -> None:
        super().set_caches(kv_manager, max_seq_len)
        attention = self.cached_attention
        for layer in self.layers:
            if isinstance(layer, StreamsLayer) and layer.engram is not None:
                assert self.ids_of_tokens is not None
                layer.engram.set_cache(
                    kv_manager, entries_layer(attention), token_ids_index(attention), self.ids_of_tokens
                )


def _layer_sizes(hf: HfConfig) -> tuple[CompressedConfig, ...]:
    """Return the attention of each layer: a window, and for most layers entries of an earlier layer."""
    num_layers, source = count_layers(hf), hf.source
    ratios = hf.items("compress_ratios", int)[:num_layers]  # more are of the drafter, see `_block_drafter`
    if len(ratios) < num_layers:
        raise CheckpointError(f"{source}: {len(ratios)} compress_ratios for {num_layers} layers")
    if unknown := set(ratios) - {0, 1, 2}:
        raise UnsupportedError(f"{source}: compress_ratios has {min(unknown)}, known are 0, 1 and 2")
    window_alone = _window_alone(hf)
    kv_sources, index_sources = _source_layers(hf, "kv_source_layer_ids"), _source_layers(hf, "index_source_layer_ids")
    candidate_source = hf.integer("candidate_source_layer_id", -1, minimum=-1)
    num_blocks = hf.integer("candidate_topk_blocks", 0, minimum=0)
    block_size = hf.integer("candidate_block_size", 0, minimum=0)
    has_candidates = candidate_source >= 0 and num_blocks > 0
    if has_candidates and (block_size < 1 or candidate_source not in index_sources or ratios[candidate_source] != 1):
        raise UnsupportedError(
            f"{source}: candidate_source_layer_id {candidate_source}, expected a layer of index_source_layer_ids with "
            "compress_ratios 1, and a candidate_block_size"
        )
    index = indexer(hf, 1)
    layers: list[CompressedConfig] = []
    for layer, ratio in enumerate(ratios):
        if not ratio:
            layers.append(window_alone)
            continue
        kv_source = _source_of(hf, "kv_source_layer_ids", kv_sources, layer, ratios)
        index_source = _source_of(hf, "index_source_layer_ids", index_sources, layer, ratios)
        if kv_source not in index_sources or index_source < kv_source:
            raise UnsupportedError(
                f"{source}: layer {layer} reads entries of layer {kv_source} and a choice of layer {index_source}, "
                "expected an indexer at the layer of the entries or later, and one at that layer"
            )
        candidates: dict[str, int] = {}
        if has_candidates and layer == index_source and layer >= candidate_source:
            candidates = {
                "candidates_of": candidate_source,
                "candidate_blocks": num_blocks,
                "candidate_block_size": block_size,
            }
        sharing = EntrySharing(entries_of=kv_source, choice_of=index_source, **candidates)
        sizes = replace(window_alone, pool_size=ratio, sharing=sharing)
        if layer == index_source:
            sizes = replace(sizes, index=replace(index, pool_size=ratio))
        layers.append(sizes)
    return tuple(layers)


def _window_alone(hf: HfConfig) -> CompressedConfig:
    """Return the attention of a layer with a window alone."""
    return replace(window_sizes(hf), norms_queries=False, record_bytes=MXFP8_BYTES)


def _block_drafter(hf: HfConfig, experts: MoeConfig) -> BlockDrafterConfig | None:
    """Return the drafter (DSpark), by the keys that vLLM 0.33 reads; None without one. experts: of the target."""
    source, num_target_layers = hf.source, count_layers(hf)
    num_layers = hf.integer("num_nextn_predict_layers", 3, minimum=0, maximum=_MOST_DRAFT_LAYERS)
    num_layers = hf.integer("n_mtp_layers", num_layers, minimum=0, maximum=_MOST_DRAFT_LAYERS)
    taps = hf.items("dspark_target_layer_ids", int)
    if not taps or not num_layers:
        return None
    if any(not 1 <= tap <= num_target_layers for tap in taps):
        raise UnsupportedError(
            f"{source}: dspark_target_layer_ids {shown(taps)}, expected layers from 1 to {num_target_layers}"
        )
    if any(hf.items("compress_ratios", int)[num_target_layers:]):
        raise UnsupportedError(f"{source}: compress_ratios of the drafter's layers, expected 0: a window alone")
    hf.choice("sample_from_anchor", True)
    hf.choice("dspark_draft_topk")
    num_experts = hf.integer("dspark_n_routed_experts", 0, minimum=0) or experts.num_experts
    top_k = hf.integer("dspark_num_experts_per_tok", experts.top_k, maximum=num_experts)
    return BlockDrafterConfig(
        num_layers=num_layers,
        block_size=hf.integer("dspark_block_size", maximum=_MOST_DRAFTS),
        noise_token_id=hf.integer("dspark_noise_token_id", minimum=0, maximum=hf.integer("vocab_size") - 1),
        taps=tuple(taps),
        markov_rank=hf.integer("dspark_markov_rank"),
        moe=replace(experts, num_experts=num_experts, top_k=top_k),
    )


def _source_layers(hf: HfConfig, key: str) -> list[int]:
    """Return the layers of a key, which must rise."""
    layers = hf.items(key, int)
    if layers != sorted(set(layers)) or any(not 0 <= layer < count_layers(hf) for layer in layers):
        raise CheckpointError(f"{hf.source}: {key} {shown(layers)}, expected rising layers below {count_layers(hf)}")
    return layers


def _source_of(hf: HfConfig, key: str, sources: Sequence[int], layer: int, ratios: Sequence[int]) -> int:
    """Return the layer that a layer reads from: the last one of `sources` up to it, with the same ratio."""
    place = bisect_right(sources, layer) - 1
    if place < 0 or ratios[sources[place]] != ratios[layer]:
        raise CheckpointError(
            f"{hf.source}: {key} {shown(list(sources))}, expected a layer up to {layer} with compress_ratios "
            f"{ratios[layer]}"
        )
    return sources[place]


def _engrams(hf: HfConfig) -> tuple[EngramConfig | None, ...]:
    """Return the n-grams of each layer."""
    num_layers, source = count_layers(hf), hf.source
    engrams: list[EngramConfig | None] = [None] * num_layers
    layers, rows = hf.items("engram_layer_ids", int), hf.items("engram_num_embeddings", int)
    if not layers:
        return tuple(engrams)
    order = hf.integer("engram_max_ngram_size", minimum=2, maximum=MAX_ORDER)
    num_heads = (order - 1) * hf.integer("engram_n_heads")
    head_size = hf.integer("engram_head_dim")
    num_ids = hf.integer("engram_compressed_vocab_size", maximum=_MAX_IDS)
    padding = hf.integer("engram_pad_token_id", minimum=0, maximum=hf.integer("vocab_size") - 1)
    first_rows = hf.integer("engram_vocab_size", maximum=MAX_ROWS)
    if len(rows) != len(layers) or any(not 0 <= layer < num_layers for layer in layers):
        raise CheckpointError(
            f"{source}: engram_layer_ids {shown(layers)} with {len(rows)} engram_num_embeddings, expected layers below "
            f"{num_layers} and a number for each"
        )
    if head_size % GROUP and hf.section("quantization_config") is not None:
        raise UnsupportedError(f"{source}: engram_head_dim {head_size}, known are multiples of {GROUP} in e4m3")
    for layer, num_rows, sizes in zip(layers, rows, table_sizes(first_rows, num_heads), strict=False):
        if sum(sizes) > num_rows:
            raise CheckpointError(
                f"{source}: engram_num_embeddings {num_rows}, expected at least {sum(sizes)} for layer {layer}"
            )
        engrams[layer] = EngramConfig(
            order=order,
            size=num_heads * head_size,
            table_sizes=sizes,
            multipliers=_multipliers(layer, order, num_ids),
            num_rows=num_rows,
            num_ids=num_ids,
            pad_token_id=padding,
        )
    return tuple(engrams)


def _multipliers(layer: int, order: int, num_ids: int) -> tuple[int, ...]:
    """Return odd random factors; a factor times an id stays below 2^63."""
    generator = np.random.default_rng(SEED_STEP * layer)
    numbers = generator.integers(0, factor_bound(num_ids), size=order, dtype=np.int64)
    return tuple(2 * int(number) + 1 for number in numbers)
