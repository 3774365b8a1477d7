"""Sizes of a model's KV cache: groups of layers that share a block table, and numbers of blocks and states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paged.cache.groups import DEFAULT_RING, CacheGroup, ConvSpec, RecurrentSpec
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.pooled_groups import OpenPoolGroup, PooledGroup
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.attention.tiles import default_block_size
from paged.kernels.cache.latent_cache import LATENT_CODES, LATENT_ROPE, NVFP4_LATENT_BYTES
from paged.kernels.core.device import device_of
from paged.kernels.core.dtypes import KV_KINDS, kv_kind
from paged.kernels.core.errors import shown
from paged.models.generic.config import ModuleConfig
from paged.models.layers.attention_config import AttentionConfig, BlockIndexConfig, IndexConfig
from paged.models.layers.compressed_cache import compressed_groups, has_records, num_cache_layers, whole_pools
from paged.models.layers.config import DecoderConfig
from paged.models.layers.head_rotation import KEYS_AND_VALUES, OPTION, check_layer, rotation_name, values_error
from paged.models.layers.recurrent_config import EngramConfig, NgramConfig, RecurrentConfig
from paged.models.loading.load_options import LoadOptions
from paged.models.parallel.ranks import Ranks

# The default cache on a CPU holds this many sequences of full length, but takes at most this many bytes.
_CPU_SEQUENCES = 4
_CPU_BYTES = 1 << 30
# Fraction of a GPU's memory for weights and cache; the rest is for activations.
GPU_FRACTION = 0.9
# Largest fraction of the cache's memory for states of recurrent layers. models/limits.md compares states and K/V.
_STATE_FRACTION = 0.5
# Largest fraction of the cache's memory for rows of open pools. A slot of DeepSeek-V4 is 5,000 tokens of 16 bits.
_OPEN_FRACTION = 0.25
# Most blocks of a cache without K/V. They take no memory on the device, and the host keeps 84 bytes for each.
_MOST_EMPTY_BLOCKS = 1 << 20
# Largest number of recurrent-state slots on a GPU: for each of 256 sequences, two slots and one snapshot.
_MOST_SLOTS = 768
# Largest number of recurrent-state slots on a CPU: for each of 8 sequences, two slots and two snapshots.
_CPU_SLOTS = 32


def cache_config(config: DecoderConfig, **fields: Any) -> PagedKvCacheConfig:
    """Return the cache configuration of a model: groups of equal K/V shape and window, and recurrent layers.

    The index keys of layer i form a further layer of the cache, with index num_layers + i. If an indexer pools tokens,
    the further layer has its tokens' rows, and the pools' keys lie beside the keys or latents of all layers of a group.
    The rows that the MLP of a layer with `shifts_mlp` keeps form such a further layer too. Layers with n-grams have two
    more: index 2 * num_layers + i for rows of the convolution, and 3 * num_layers + i for token ids. Compressed
    entries, and rows of open pools, are further layers as in `compressed_groups`.

    fields: other fields of PagedKvCacheConfig; its dtype decides the size of index keys. With compressed entries,
    block_size is one of them. A dtype of 4 bits decides the form of entries and latents alone: the cache's dtype is one
    of bytes.
    """
    dtype = fields.get("dtype") or torch.get_default_dtype()
    keeps_records = dtype == torch.float4_e2m1fn_x2 and any(map(_has_latent_records, config.attention))
    if keeps_records:
        fields["dtype"] = torch.float8_e4m3fn  # records hold their scales: to the cache they are bytes
    if config.attention[0].compressed is not None:
        keeps_ids = any(isinstance(ngrams, EngramConfig) for ngrams in config.ngrams)
        fields["groups"] = compressed_groups(config.attention, dtype, fields["block_size"], keeps_ids=keeps_ids)
        if dtype == torch.float4_e2m1fn_x2:
            fields["dtype"] = torch.float8_e4m3fn  # records hold their scales: to the cache they are bytes
        num_layers = num_cache_layers(config.attention)
        return PagedKvCacheConfig(num_layers, config.num_kv_heads, config.head_dim, **fields)
    kinds: dict[tuple[int, int, int, int | None, bool], list[int]] = {}
    for index, layer in enumerate(config.attention):
        if layer.shares_kv_with is None and config.attends[index]:
            kind = layer.cache_kind
            if keeps_records and _has_latent_records(layer):
                kind = 1, NVFP4_LATENT_BYTES, NVFP4_LATENT_BYTES, layer.window, True
            kinds.setdefault(kind, []).append(index)
    indexers: dict[int, IndexConfig | BlockIndexConfig] = {}
    for index, layer in enumerate(config.attention):
        if layer.indexer is not None and config.attends[index]:
            indexers[index] = layer.indexer
    sizes = (config.num_kv_heads, config.head_dim, config.head_dim, config.windows[0], False)
    if list(kinds) == [sizes] and len(kinds[sizes]) == config.num_layers and not indexers:
        fields["sliding_window"] = config.windows[0]
    else:
        fields["groups"] = [CacheGroup(tuple(layers), *kind) for kind, layers in kinds.items()]
    num_layers = config.num_layers
    if indexers:
        key_layers = tuple(num_layers + index for index in indexers)
        index_config = next(iter(indexers.values()))
        fields["groups"] = _with_index_keys(fields["groups"], key_layers, index_config, dtype)
        num_layers *= 2
    recurrent = {index: states for index, states in enumerate(config.recurrent) if states is not None}
    if recurrent:
        (spec,) = {_spec(state) for state in recurrent.values()}
        conv_layers: list[int] = []
        for index, state in recurrent.items():
            if state.shifts_mlp:
                conv_layers.append(num_layers + index)
        if conv_layers:
            num_layers *= 2
        other_convs = _ngram_rows(config)
        if other_convs:
            num_layers = 4 * config.num_layers
        fields["recurrent"] = replace(
            spec, layers=tuple(recurrent), conv_layers=tuple(conv_layers), other_convs=other_convs
        )
    return PagedKvCacheConfig(num_layers, config.num_kv_heads, config.head_dim, **fields)


def _has_latent_records(layer: AttentionConfig) -> bool:
    """Return whether a layer's latents have the sizes of records, their form in a cache of 4 bits."""
    sizes = layer.latent
    return sizes is not None and (sizes.rank, sizes.rope_dim) == (LATENT_CODES, LATENT_ROPE)


def _ngram_rows(config: DecoderConfig) -> tuple[ConvSpec, ...]:
    """Return what layers with n-grams keep of earlier tokens: rows of a convolution over all streams, and token ids."""
    convs: list[ConvSpec] = []
    for index, ngrams in enumerate(config.ngrams):
        if isinstance(ngrams, NgramConfig):
            assert config.streams is not None
            channels = config.streams.count * config.hidden_size
            convs.append(ConvSpec(2 * config.num_layers + index, channels, ngrams.span))
            convs.append(ConvSpec(3 * config.num_layers + index, ngrams.order - 1, ngrams.order, torch.float32))
    return tuple(convs)


def _with_index_keys(
    groups: list[CacheGroup], key_layers: tuple[int, ...], index: IndexConfig | BlockIndexConfig, dtype: torch.dtype
) -> list[CacheGroup]:
    """Return the groups with room for the keys of indexers, in a cache of `dtype`."""
    key_size = index.key_size(dtype)
    if index.pool_size == 1:
        return [*groups, CacheGroup(key_layers, 1, key_size, key_size, latent=True)]
    pooled: list[CacheGroup] = []
    for group in groups:
        if group.latent or isinstance(index, BlockIndexConfig):
            shape = group.layers, group.num_kv_heads, group.head_dim, group.v_head_dim, group.sliding_window
            group = PooledGroup(*shape, group.latent, pool_size=index.pool_size, entry_size=key_size)
        pooled.append(group)
    row_size = index.row_size(dtype)
    return [*pooled, CacheGroup(key_layers, 1, row_size, row_size, sliding_window=1, latent=True)]


def _spec(layer: RecurrentConfig) -> RecurrentSpec:
    """Return the shape of a layer's state, as that of layer 0."""
    return RecurrentSpec(
        (0,),
        layer.channels,
        layer.conv_width,
        layer.num_heads,
        layer.head_dim,
        layer.num_key_heads,
        layer.key_dim,
        decays_channels=layer.decays_channels,
        rank=layer.rank,
    )


def check_cache_dtypes(
    config: DecoderConfig,
    dtype: torch.dtype,
    cache_dtypes: tuple[torch.dtype, torch.dtype],
    kept_layers: tuple[int, ...] = (),
    *,
    has_draft_head: bool = False,
) -> None:
    """Raise InvalidInputError unless a model in `dtype` can have keys and values of these dtypes in its cache.

    kept_layers: layers that keep `dtype`; that of a draft head comes behind the model's.
    """
    allowed, note = _allowed_dtypes(config, dtype)
    for cache_dtype in cache_dtypes:
        if cache_dtype not in allowed:
            expected = " or ".join(map(str, allowed))
            raise InvalidInputError(f"kv_cache_dtype: {cache_dtype}, expected {expected}{note}")
    if note and cache_dtypes[0] != cache_dtypes[1]:
        raise InvalidInputError(f"kv_cache_dtype: {cache_dtypes[0]},{cache_dtypes[1]}, expected one dtype{note}")
    if note and kept_layers:
        raise InvalidInputError(f"kv_cache_keep_layers: {shown(kept_layers)}, expected none{note}")
    known: list[int] = []
    for index, layer in enumerate(config.attention):
        if config.attends[index] and layer.shares_kv_with is None:
            known.append(index)
    if has_draft_head:
        known.append(config.num_layers)
    for kept in kept_layers:
        if kept not in known:
            raise InvalidInputError(
                f"kv_cache_keep_layers: {kept}, expected layers with keys and values of their own: {shown(known)}"
            )


def _allowed_dtypes(config: DecoderConfig, dtype: torch.dtype) -> tuple[list[torch.dtype], str]:
    """Return the dtypes that K/V of a model in `dtype` can have, and what limits them, for messages."""
    allowed = [dtype, *KV_KINDS]
    note = ""
    if not any(config.attends):
        allowed = [dtype]
        note = ", as no layer has keys and values"
    elif any(layer.compressed is not None for layer in config.attention):
        allowed = [dtype]
        for record_dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
            if all(has_records(layer, record_dtype) for layer in config.attention):
                allowed.append(record_dtype)
        note = " for compressed entries"
    elif any(layer.latent is not None for layer in config.attention):
        allowed[1:] = [torch.float8_e4m3fn]
        note = " for latents"
        attending = [layer for layer, attends in zip(config.attention, config.attends, strict=True) if attends]
        if all(map(_has_latent_records, attending)):
            allowed.append(torch.float4_e2m1fn_x2)
        else:
            note += f" other than {LATENT_CODES} + {LATENT_ROPE}"
    elif any(layer.indexer is not None for layer in config.attention):
        allowed = [other for other in allowed if not kv_kind(other).has_scales]
        note = " beside an indexer"
    return allowed, note


def check_state_dtype(config: DecoderConfig, state_dtype: torch.dtype) -> None:
    """Raise InvalidInputError unless the model has recurrent states, which `state_dtype` is for, or it is float32."""
    has_states = any(layer is not None and layer.num_heads > 0 for layer in config.recurrent)
    if not has_states and state_dtype != torch.float32:
        raise InvalidInputError(f"state_dtype: {state_dtype}, expected float32 or None, as no layer has such states")


def check_rotation(config: DecoderConfig, rotation: str | None) -> None:
    """Raise unless heads of all layers can be rotated. rotation: as `kv_cache_rotation` in `LoadOptions`.

    Raises:
        InvalidInputError: as `check_layer`.
        UnsupportedError: as `check_layer`; or values shall be rotated, but weights are packed; or the model is
            transformers' own module, or has no keys and values.
    """
    if rotation is None:
        return
    if isinstance(config, ModuleConfig):
        raise UnsupportedError(f"{OPTION}: {rotation!r}, expected None for transformers' own module")
    if not any(config.attends):
        raise UnsupportedError(f"{OPTION}: {rotation!r}, expected None, as no layer has keys and values")
    if rotation == KEYS_AND_VALUES and config.quantization is not None:
        raise values_error(rotation, "weights are packed")
    for index, layer in enumerate(config.attention):
        if config.attends[index]:
            check_layer(f"layer {index}", layer, rotation)


def cache_formats(
    dtype: torch.dtype, cache_dtypes: tuple[torch.dtype, torch.dtype], kept_layers: tuple[int, ...]
) -> dict[str, Any]:
    """Return the fields of PagedKvCacheConfig for keys and values of these dtypes. dtype: of the `kept_layers`."""
    k_dtype, v_dtype = cache_dtypes
    fields: dict[str, Any] = {"dtype": k_dtype}
    if v_dtype != k_dtype:
        fields["v_dtype"] = v_dtype
    if kept_layers:
        fields |= {"kept_layers": kept_layers, "kept_dtype": dtype}
    return fields


def chosen_block_size(config: DecoderConfig, block_size: int | None, device: torch.device) -> int:
    """Return the tokens of a block: `block_size`, or if that is None the device's default or whole pools.

    Raises:
        InvalidInputError: blocks of block_size do not consist of whole pools.
    """
    pool = whole_pools(config.attention)
    if block_size is None:
        return in_whole_pools(config, default_block_size(device_of(device).arch))
    if block_size % pool:
        raise InvalidInputError(f"block_size: {block_size}, expected a multiple of {pool}, the tokens of an entry")
    return block_size


def in_whole_pools(config: DecoderConfig, block_size: int) -> int:
    """Return the smallest number of tokens from `block_size` on that consists of whole pools."""
    pool = whole_pools(config.attention)
    return -(-block_size // pool) * pool


def sized_cache_config(
    config: DecoderConfig,
    dtype: torch.dtype,
    cache_dtypes: tuple[torch.dtype, torch.dtype],
    max_seq_len: int,
    load_options: LoadOptions,
    ranks: Ranks,
) -> PagedKvCacheConfig:
    """Return the cache configuration of a model, with as many blocks and states as every rank has memory for.

    Numbers of blocks and states in the options are taken unchanged. The weights, of `dtype`, are in memory already.
    """
    device = load_options.device
    cache = cache_config(
        config,
        block_size=chosen_block_size(config, load_options.block_size, device),
        enable_prefix_cache=load_options.enable_prefix_cache,
        **cache_formats(dtype, cache_dtypes, load_options.kv_cache_keep_layers),
        device=device,
        max_seq_len=max_seq_len,
        host_cache_bytes=load_options.host_cache_bytes,
        cache_folder=load_options.cache_folder,
        cache_folder_bytes=load_options.cache_folder_bytes,
        max_pinned_fraction=load_options.max_pinned_fraction,
        rotation=rotation_name(load_options.kv_cache_rotation),
    )
    state_bytes = 0
    if cache.recurrent is not None:
        fraction = 1.0
        if cache.has_kv:
            fraction = _STATE_FRACTION
        states = replace(cache.recurrent, conv_dtype=dtype, state_dtype=load_options.state_dtype)
        states = _with_slots(states, load_options, dtype, fraction)
        cache = replace(cache, recurrent=states)
        state_bytes = (states.num_slots + 1) * states.slot_bytes(dtype)
    groups: list[CacheGroup] = []
    for group in cache.groups or ():
        if isinstance(group, OpenPoolGroup):
            group = _with_row_slots(group, load_options)
            state_bytes = (group.num_row_slots + 1) * group.slot_bytes
        groups.append(group)
    if cache.groups is not None:
        cache = replace(cache, groups=groups)
    num_tables = len(cache.tables)
    num_blocks = (load_options.num_blocks or 0) * num_tables
    if not num_blocks:
        assert cache.dtype is not None
        num_blocks = ranks.least(blocks_that_fit(cache, cache.dtype, device, max_seq_len, state_bytes))
    return replace(cache, num_blocks=num_blocks, num_swap_blocks=load_options.num_swap_blocks * num_tables)


def blocks_that_fit(
    cache: PagedKvCacheConfig, dtype: torch.dtype, device: torch.device, max_seq_len: int, state_bytes: int = 0
) -> int:
    """Return how many blocks the device's free memory holds beside `state_bytes` of recurrent states, at least 1.

    On a CPU: enough for four sequences of max_seq_len tokens, but at most 1 GiB. Without K/V: enough for each state to
    belong to a sequence of max_seq_len tokens, but at most 2^20, or one sequence.
    """
    if not cache.has_kv:
        assert cache.recurrent is not None
        longest = cache.blocks_for(max_seq_len)
        return max(longest, min(cache.recurrent.num_slots * longest, _MOST_EMPTY_BLOCKS))
    block_bytes = cache.block_bytes(dtype)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return max(1, (int(free_bytes * GPU_FRACTION) - state_bytes) // block_bytes)
    num_blocks = _CPU_SEQUENCES * cache.blocks_for(max_seq_len)
    return max(1, min(num_blocks, _CPU_BYTES // block_bytes))


def _with_slots(
    recurrent: RecurrentSpec, load_options: LoadOptions, dtype: torch.dtype, fraction: float
) -> RecurrentSpec:
    """Return the sizes of states with the number of slots.

    It comes from the options, or from a fraction of the cache's memory.
    """
    append = load_options.max_drafts + 1
    recurrent = replace(recurrent, max_append=append, ring=max(DEFAULT_RING, append))
    num_slots = _num_slots(recurrent.slot_bytes(dtype), load_options, fraction)
    num_swap_slots = min(num_slots, load_options.num_swap_blocks)
    interval = load_options.snapshot_interval
    return replace(recurrent, num_slots=num_slots, num_swap_slots=num_swap_slots, snapshot_interval=interval)


def _with_row_slots(group: OpenPoolGroup, load_options: LoadOptions) -> OpenPoolGroup:
    """Return rows of open pools with the number of slots, from the options or a fraction of the cache's memory."""
    num_slots = _num_slots(group.slot_bytes, load_options, _OPEN_FRACTION)
    return replace(group, num_row_slots=num_slots, num_swap_slots=min(num_slots, load_options.num_swap_blocks))


def _num_slots(slot_bytes: int, load_options: LoadOptions, fraction: float) -> int:
    """Return the number of slots of this size: the option, or as many as a fraction of the cache's memory holds."""
    num_slots = load_options.num_state_slots
    if num_slots is None and load_options.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(load_options.device)
        num_slots = _default_slots(slot_bytes, free_bytes, fraction)
    elif num_slots is None:
        num_slots = min(_CPU_SLOTS, _CPU_BYTES // slot_bytes)
    return max(num_slots, 2)


def _default_slots(slot_bytes: int, free_bytes: int, fraction: float) -> int:
    """Return the number of slots on a GPU with `free_bytes`, of which the cache takes GPU_FRACTION."""
    return max(2, min(int(free_bytes * GPU_FRACTION * fraction) // slot_bytes, _MOST_SLOTS))


def default_slots_bytes(cache: PagedKvCacheConfig, dtype: torch.dtype, free_bytes: int) -> int:
    """Return the bytes of all slots of states, and of rows of open pools, that a GPU with `free_bytes` gets by default.

    dtype: of the weights, and of the states' convolutions.
    """
    sizes: list[tuple[int, float]] = []
    if cache.recurrent is not None and cache.has_kv:
        sizes.append((cache.recurrent.slot_bytes(dtype), _STATE_FRACTION))
    for group in cache.groups or ():
        if isinstance(group, OpenPoolGroup):
            sizes.append((group.slot_bytes, _OPEN_FRACTION))
    total = 0
    for slot_bytes, fraction in sizes:
        total += (_default_slots(slot_bytes, free_bytes, fraction) + 1) * slot_bytes
    return total
