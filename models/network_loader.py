"""Build a network from a checkpoint's configuration and headers, and load its weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from paged.errors import CheckpointError, PagedError, UnsupportedError
from paged.kernels.core.dtypes import KvKind
from paged.kernels.quantization.packing import FP8_BLOCK
from paged.models.families.network import Network, set_dtype
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.latent_attention import UpProjection
from paged.models.layers.recurrent_config import (
    HASH_NUMBERS,
    EngramConfig,
    GatedDeltaConfig,
    KimiDeltaConfig,
    NgramConfig,
    RecurrentConfig,
    Rwkv7Config,
)
from paged.models.loading.given_tensors import GivenTensors
from paged.models.loading.host_weights import allocate
from paged.models.loading.kv_scales import load_kv_scales, split_kv_scales
from paged.models.loading.text_prefix import BESIDE_BODY, TextPrefix, find_text_prefix
from paged.models.loading.weights import (
    Read,
    StoredTensors,
    Track,
    check_weights,
    load_weights,
    num_weights,
    read_headers,
    read_tensor,
    untracked,
)
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.models.quantization.packed_weights import PackedWeights
from paged.models.quantization.read import as_stored, without_zero_biases

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_KV = re.compile(r"self_attn\.[kv]_")
_EXPERT = re.compile(r"model\.layers\.(\d{1,9})\.(?:\w+\.)?experts\.(\d{1,9})\.")
_STACKED = re.compile(r"model\.layers\.(\d{1,9})\.(?:\w+\.)?experts\.(?:gate_)?up_proj")
_FUSED_MLP = re.compile(r"model\.layers\.\d{1,9}\.(?:\w+\.)+gate_up_proj\.weight")
_WHOLE_CONV = re.compile(r"model\.layers\.\d{1,9}\.linear_attn\.conv1d\.weight")
# Tensors of Qwen4-Exp that serve statistics, or that its authors' code makes and does not read; those that choose
# experts for pictures in DeepSeek-V4.1; and the LM head of Hy3's multi-token layer, which reads the model's instead.
UNUSED = re.compile(
    r"\.ple_embedding\.(?:hashstats_\w+|token_lookup)\Z|\bmodel\.norm\.block_inject_weight\.|\.gate\.bias_vl\Z"
    r"|\.shared_head\.weight\Z"
)
_BODY_MODULE = re.compile(r"model\.\w+\.(?:weight|bias)\w*|model\.rotary_emb\.alpha")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_network(
    network_class: type[Network],
    config: DecoderConfig,
    folder: Path | GivenTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache_kinds: tuple[KvKind, KvKind] | None,
    ranks: Ranks,
    track: Track = untracked,
    draft_prefix: str | None = None,
    kv_rotation: str | None = None,
    kept_layers: tuple[int, ...] = (),
) -> Network:
    """Load a network with the weights of a folder, or of given tensors; with several ranks, this rank's part.

    Headers are compared with the configuration first, so that wrong sizes allocate no memory. Tensors whose names begin
    with `draft_prefix` are left to the draft head.

    cache_kinds: of keys and values; None without a cache. kv_rotation, kept_layers: as `kv_cache_rotation` and
    `kv_cache_keep_layers` in `LoadOptions`.

    Raises:
        CheckpointError: a tensor is missing, unexpected, stored twice, or has another shape or dtype; or a file is
            missing, unreadable, truncated or outside of the folder.
        UnsupportedError: the network cannot be split over this number of ranks.
    """
    share = ranks.share
    headers = read_headers(folder)
    prefix = text_prefix(network_class, config, headers)
    stored, kv_scales = split_kv_scales(_tensors_of(network_class, config, headers, prefix, folder, draft_prefix))
    place = str(folder)
    if config.wrapper:
        place = f"{folder} (text model under {prefix.stored!r})"
    config = replace(with_stored_layout(config, stored), quantization=as_stored(config.quantization, stored))
    _check_counts(stored, config, place)
    if config.tie_word_embeddings and _has_head_of_its_own(stored):
        config = replace(config, tie_word_embeddings=False)  # stored weights decide, as in transformers
    full_network = meta_network(network_class, config, dtype)
    stored = without_zero_biases(stored, full_network.destinations())
    check_weights(stored, full_network.destinations(), tied_head=config.tie_word_embeddings, folder=place)
    network, parts = rank_network(full_network, config, dtype, share)
    allocate(network, device)
    network.join(ranks)
    if network is not full_network:
        network.num_weights = num_weights(full_network)
    load_weights(stored, network.destinations(), parts, track, ranks.tick)
    network.rotate_kv(kv_rotation)
    if cache_kinds is not None and any(kind.takes_scales for kind in cache_kinds):
        num_kv_heads = [attention.num_kv_heads for attention in config.attention]
        scales = load_kv_scales(kv_scales, num_kv_heads, _filled_caches(config, kept_layers), device)
        for index, layer_scales in enumerate(scales):
            if index in kept_layers:
                layer_scales.clear()
            for name, kind in zip(("k_scale", "v_scale"), cache_kinds, strict=True):
                if kind.has_table_scale and name in layer_scales:  # that of all heads, also of other ranks
                    layer_scales[name] = layer_scales[name].amax(0, keepdim=True)
        network.scale_caches(list(map(share.scales, config.attention, scales)), cache_kinds)
    return network


def _filled_caches(config: DecoderConfig, kept_layers: tuple[int, ...]) -> list[str]:
    """Return the letters of the caches with scales that each layer fills: "kv", "k" for a latent, "" for none."""
    caches: list[str] = []
    for index, attention in enumerate(config.attention):
        if not config.attends[index] or attention.shares_kv_with is not None or index in kept_layers:
            caches.append("")
        elif attention.latent is not None:
            caches.append("k")
        else:
            caches.append("kv")
    return caches


def with_stored_layout(config: DecoderConfig, stored: StoredTensors) -> DecoderConfig:
    """Return the configuration with the layout of these tensors, by the family's names (see `text_name`).

    Each layer's experts are separate or stacked; experts with biases are always stacked. Convolutions of q, k and v are
    three tensors or one. Decay rates have one dimension or four. RWKV-7's weights of shifts are six tensors or one.
    Tables of n-grams are many tensors or one, and the numbers of their hashes may be stored.
    Gate and up of an MLP may be one tensor. Without tensors, the layout is the published one.
    """
    shapes: dict[int, list[int]] = {}
    for match in filter(None, map(_STACKED.fullmatch, stored)):
        shapes[int(match[1])] = stored[match[0]].shape
    moes: list[MoeConfig | None] = []
    for layer, moe in enumerate(config.moe):
        if moe is not None:
            transposed = moe.transposed
            if transposed is None:
                rows_first = [moe.num_experts, 2 * moe.intermediate_size, config.hidden_size]
                transposed = shapes.get(layer) != rows_first
            moe = replace(moe, stacked=moe.bias or layer in shapes, transposed=transposed)
        moes.append(moe)
    splits_conv = not any(map(_WHOLE_CONV.fullmatch, stored))
    recurrent: list[RecurrentConfig | None] = []
    for layer, recurrent_layer in enumerate(config.recurrent):
        prefix = f"model.layers.{layer}.{config.recurrent_name}"
        if isinstance(recurrent_layer, KimiDeltaConfig) and f"{prefix}.A_log" in stored:
            recurrent_layer = replace(
                recurrent_layer,
                splits_conv=f"{prefix}.conv1d.weight" not in stored,
                wide_rates=len(stored[f"{prefix}.A_log"].shape) == 4,
            )
        if isinstance(recurrent_layer, Rwkv7Config):
            recurrent_layer = replace(recurrent_layer, stacks_shifts=f"{prefix}.x_x" in stored)
        if isinstance(recurrent_layer, GatedDeltaConfig) and recurrent_layer.splits_qkv:
            recurrent_layer = replace(recurrent_layer, splits_conv=splits_conv)
        recurrent.append(recurrent_layer)
    fused_mlp = config.fused_mlp
    if fused_mlp is None:
        fused_mlp = any(map(_FUSED_MLP.fullmatch, stored))
    ngrams: list[NgramConfig | EngramConfig | None] = []
    for layer, ngram in enumerate(config.ngrams):
        prefix = f"model.layers.{layer}.ple.ple_embedding"
        if isinstance(ngram, NgramConfig):
            stored_hash = tuple(name for name in HASH_NUMBERS if f"{prefix}.{name}" in stored)
            ngram = replace(ngram, stored_hash=stored_hash)
            if f"{prefix}.ngram_embedding.weight" in stored:
                ngram = replace(ngram, num_parts=0)
        ngrams.append(ngram)
    return replace(config, moe=tuple(moes), recurrent=tuple(recurrent), fused_mlp=fused_mlp, ngrams=tuple(ngrams))


def text_prefix(network_class: type[Network], config: DecoderConfig, stored: Iterable[str]) -> TextPrefix:
    """Return where a checkpoint with tensors of these names keeps the text model.

    Raises:
        CheckpointError: the text model could stand in two places.
    """
    rename = partial(_rename, network_class)
    # Most checkpoints hold a text model alone.
    if not config.wrapper and any(rename(name) == _EMBEDDING for name in stored):
        return TextPrefix()
    first_layer = replace(
        config,
        intermediate_size=config.intermediate_size[:1],
        attention=config.attention[:1],
        moe=config.moe[:1],
        recurrent=config.recurrent[:1],
        attends=config.attends[:1],
        quantization=None,
    )
    return find_text_prefix(stored, meta_network(network_class, first_layer, config.dtype).destinations(), rename)


def text_name(network_class: type[Network], config: DecoderConfig, prefix: TextPrefix, name: str) -> str | None:
    """Return the family's name of a checkpoint's tensor; None if it belongs to another part of a multimodal model."""
    inner_name = prefix.strip(name)
    if inner_name is None:
        return None
    inner_name = _rename(network_class, inner_name)
    if config.wrapper and not prefix.stored and _is_beside_layers(inner_name):
        return None
    return inner_name


def _is_beside_layers(name: str) -> bool:
    """Return whether a tensor is outside of the text model, in a checkpoint without a prefix for the text model.

    DeepSeek-OCR keeps its vision towers beside `model.layers`. They contain modules; the text model's parts there do
    not.
    """
    return not name.startswith(("model.layers.", *BESIDE_BODY)) and not _BODY_MODULE.fullmatch(name)


def text_tensors(network_class: type[Network], config: DecoderConfig, stored: StoredTensors) -> StoredTensors:
    """Return the tensors of a checkpoint's text model by the family's names."""
    prefix = text_prefix(network_class, config, stored)
    tensors: StoredTensors = {}
    for name, tensor in stored.items():
        inner_name = text_name(network_class, config, prefix, name)
        if inner_name is not None:
            tensors[inner_name] = tensor
    return tensors


def _rename(network_class: type[Network], name: str) -> str:
    for theirs, ours in network_class.renames.items():
        name = re.sub(theirs, ours, name)
    return name


def meta_network(
    network_class: type[Network], config: DecoderConfig, dtype: torch.dtype, share: Share | None = None
) -> Network:
    """Return a network without memory; with a share, one rank's part of it.

    Raises:
        CheckpointError: a weight is too large, or its size is not a multiple of groups or words.
        UnsupportedError: projections of the same input have different formats.
    """
    try:
        with torch.device("meta"):
            network = network_class(config, share)
        set_dtype(network, dtype)
    except PagedError:
        raise
    except RuntimeError as error:
        raise CheckpointError(f"sizes beyond any model's: {error}; {config}"[:1000]) from error
    return network


def rank_network(
    full_network: Network, config: DecoderConfig, dtype: torch.dtype, share: Share
) -> tuple[Network, dict[str, Read]]:
    """Return a rank's network without memory, and the parts of tensors that it reads.

    Raises:
        UnsupportedError: the network cannot be split over this number of ranks.
    """
    if share.size == 1:
        return full_network, {}
    try:
        network = meta_network(type(full_network), config, dtype, share)
    except CheckpointError as error:
        raise UnsupportedError(f"tensor_parallel_size {share.size}: {error}") from error
    modules = dict(full_network.named_modules())
    for path, module in network.named_modules():
        if isinstance(module, (PackedWeights, UpProjection)) and module.layout is not None:
            packed, layout = cast("PackedWeights | UpProjection", modules[path]), module.layout
            sizes = {*packed.sizes, packed.in_features} ^ {*module.sizes, module.in_features}
            if layout.in_blocks and any(size % FP8_BLOCK for size in sizes):
                raise UnsupportedError(f"tensor_parallel_size {share.size}: {path} would be cut within a block of 128")
            if layout.has_order and module.in_features != packed.in_features:
                raise UnsupportedError(f"tensor_parallel_size {share.size}: {path} has reordered columns")
    return network, share.parts(config, full_network.destinations(), network.destinations())


def _tensors_of(
    network_class: type[Network],
    config: DecoderConfig,
    stored: StoredTensors,
    prefix: TextPrefix,
    folder: Path | GivenTensors,
    draft_prefix: str | None = None,
) -> StoredTensors:
    """Return the tensors that the network uses, by the family's names.

    The network uses no other parts of a multimodal model, no layers that predict tokens further ahead, and no keys and
    values of layers that read another layer's.

    Raises:
        CheckpointError: two tensors have one name.
    """
    used: StoredTensors = {}
    unused: list[str] = []
    for tensor in stored.values():
        name = text_name(network_class, config, prefix, tensor.name)
        if name is None:
            unused.append(tensor.name)
            continue
        if draft_prefix is not None and name.startswith(draft_prefix):
            continue
        if _is_unused(name, config):
            unused.append(tensor.name)
            continue
        if name in used:
            raise CheckpointError(f"{tensor.name}: the same tensor as {used[name].name}, in {tensor.file}")
        used[name] = tensor
    if unused:
        _log.warning(
            "%s: %d tensors are not loaded, because text does not need them; first: %s",
            folder,
            len(unused),
            min(unused),
        )
    return used


def _is_unused(name: str, config: DecoderConfig) -> bool:
    """Return whether a tensor belongs to a multi-token layer or to unused keys and values, or is of `UNUSED`."""
    if UNUSED.search(name):
        return True
    match = _LAYER.match(name)
    if match is None:
        # ERNIE 4.5, MiMo, MiniMax and Qwen store multi-token layers apart, dots3-note its towers beside the model.
        return name.startswith(("model.mtp_", "model.mtp.", "mtp.", "vision_encoder.", "audio_encoder."))
    layer = int(match[1])
    if layer >= config.num_layers:
        return layer < config.num_layers + config.num_mtp_layers
    attention = config.attention[layer]
    if attention.latent is not None and attention.window is not None:
        return name.startswith("self_attn.indexer.", match.end())  # dots3-note has indexers that it does not use
    return attention.shares_kv_with is not None and _KV.match(name, match.end()) is not None


def _check_counts(stored: StoredTensors, config: DecoderConfig, folder: str) -> None:
    """Check the numbers of layers and experts before their modules are made."""
    layers = {int(match[1]) for match in filter(None, map(_LAYER.match, stored))}
    if config.num_layers > len(layers):
        first = min(set(range(config.num_layers)) - layers)
        raise CheckpointError(f"model.layers.{first}: no tensors in {folder}, expected {config.num_layers} layers")
    experts: dict[int, set[int]] = {}
    for match in filter(None, map(_EXPERT.match, stored)):
        experts.setdefault(int(match[1]), set()).add(int(match[2]))
    for layer, moe in enumerate(config.moe):
        num_experts = len(experts.get(layer, ()))
        if moe is not None and not moe.stacked and num_experts < moe.num_experts:
            raise CheckpointError(
                f"model.layers.{layer}: {num_experts} experts in {folder}, expected {moe.num_experts}"
            )


def _has_head_of_its_own(stored: StoredTensors) -> bool:
    if not {_EMBEDDING, _HEAD} <= stored.keys():
        return False
    if stored[_EMBEDDING].shape != stored[_HEAD].shape or stored[_EMBEDDING].dtype != stored[_HEAD].dtype:
        return True
    return not torch.equal(read_tensor(stored, _EMBEDDING), read_tensor(stored, _HEAD))
