"""Description of a checkpoint and its memory needs, from config.json and the headers of its weight files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paged.errors import CheckpointError, PagedError
from paged.models.cache_sizes import (
    GPU_FRACTION,
    cache_config,
    cache_formats,
    check_cache_dtypes,
    check_rotation,
    check_state_dtype,
    default_slots_bytes,
    in_whole_pools,
)
from paged.models.families.network import Network
from paged.models.generic.config import ModuleConfig
from paged.models.layers.config import DecoderConfig
from paged.models.layers.engram import has_packed_tables, table_bytes
from paged.models.layers.recurrent_config import EngramConfig
from paged.models.loading.checkpoint_folder import missing_files
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import CacheDtype, keys_and_values
from paged.models.loading.weights import StoredTensors, num_weights, read_header
from paged.models.network_loader import meta_network, rank_network, text_tensors, with_stored_layout
from paged.models.parallel.share import Share, ring_bytes, step_bytes
from paged.models.quantization.read import as_stored, read_config
from paged.models.registry import chosen_config

_SIZES = ("num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "vocab_size")


class Needs(NamedTuple):
    """Memory needs. kv_tokens: number of tokens that fit besides the weights. For other fields see `summarize`."""

    parameters: int
    weight_bytes: int
    host_bytes: int | None
    kv_bytes_per_token: int
    growth_bytes: int | None
    sequence_bytes: int | None
    kv_tokens: int | None
    state_bytes: int | None
    conv_bytes: int | None


def summarize(
    folder: Path,
    *,
    device_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    kv_cache_dtype: CacheDtype = None,
    kept_layers: tuple[int, ...] = (),
    kv_rotation: str | None = None,
    state_dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    spreads: Sequence[Share] = (),
) -> dict[str, Any]:
    """Describe a folder in Hugging Face layout; an unsupported model is described as far as possible.

    kv_rotation: rotation of heads, see `check_rotation`.
    spreads: configurations of one rank, for each way to distribute the model.

    Returns these values by name, None if unknown:
        reason: why the model is not supported, with the option's name.
        backend: "native", or the class of transformers and the reason; None if the model cannot run.
        unknown_keys: unread keys of config.json that may change the answers.
        missing: absent files.
        parameters: count after loading; number of stored elements if the model is not supported.
        tensors: number of elements by dtype.
        stored_bytes: size of the weight files.
        weight_bytes: size after loading; packed weights stay packed, all others have `dtype`.
        host_bytes: part of them that stays in host memory beside a GPU; None for no such weights.
        kv_bytes_per_token: K and V of all layers; entries alone if all rows lie in windows.
        growth_bytes, sequence_bytes: those of layers that see all tokens, and what a long sequence takes besides; None
            without windows.
        state_bytes, conv_bytes: recurrent states of a sequence, and rows of their convolutions.
        kv_tokens: tokens of all sequences, in whole blocks, that fit into `device_bytes` besides the weights and the
            slots of sequences; None also for a model without K/V.
        sliding_layers: number of layers with a sliding window.
        ranks: these values for each of `spreads`; `sent_bytes` counts the bytes sent per token with logits.

    Raises:
        CheckpointError: config.json or a weight file is missing or malformed.
    """
    hf = read_config(folder)
    stored: StoredTensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= read_header(file)
    tensors: Counter[str] = Counter()
    files = set()
    for tensor in stored.values():
        files.add(tensor.file)
        tensors[tensor.dtype] += math.prod(tensor.shape)
    summary: dict[str, Any] = {
        "folder": str(folder),
        "architectures": hf.items("architectures", str),
        "model_type": hf.text("model_type", "unknown"),
        "supported": True,
        "backend": "native",
        "reason": None,
        "unknown_keys": [],
        "missing": missing_files(folder),
        "parameters": sum(tensors.values()) or None,
        "tensors": dict(tensors),
        "dtype": _name(dtype),
        "kv_cache_dtype": None,
        "num_layers": _integer(hf, "num_hidden_layers"),
        "sliding_layers": None,
        "num_attention_heads": _integer(hf, "num_attention_heads"),
        "num_kv_heads": _integer(hf, "num_key_value_heads"),
        "head_dim": _integer(hf, "head_dim"),
        "num_experts": None,
        "vocab_size": _integer(hf, "vocab_size"),
        "max_seq_len": _integer(hf, "max_position_embeddings"),
        "stored_bytes": sum(file.stat().st_size for file in files),
        "weight_bytes": None,
        "host_bytes": None,
        "kv_bytes_per_token": None,
        "growth_bytes": None,
        "sequence_bytes": None,
        "block_size": block_size,
        "device_bytes": device_bytes,
        "kv_tokens": None,
        "state_bytes": None,
        "conv_bytes": None,
        "ranks": [],
    }
    try:
        network_class, config = chosen_config(folder)
        if isinstance(config, ModuleConfig):
            summary["backend"] = f"transformers' {config.architecture}: there is no family of this architecture"
        if stored and not isinstance(config, ModuleConfig):
            named = text_tensors(network_class, config, stored)
            config = with_stored_layout(replace(config, quantization=as_stored(config.quantization, named)), named)
        if config.quantization is not None:
            meta_network(network_class, config, config.dtype)  # raises if a layer's sizes cannot be packed
        if dtype is None:
            dtype = config.dtype
        cache_dtypes = keys_and_values(kv_cache_dtype, dtype)
        check_cache_dtypes(config, dtype, cache_dtypes, kept_layers)
        check_state_dtype(config, state_dtype)
        check_rotation(config, kv_rotation)
        formats = cache_formats(dtype, cache_dtypes, kept_layers)
        summary["block_size"] = block_size = in_whole_pools(config, block_size)
        needs = partial(_needs, network_class, config, dtype, formats, state_dtype, block_size, device_bytes)
        summary |= needs(Share())._asdict()
    except PagedError as error:
        return summary | {"supported": False, "backend": None, "reason": str(error).removeprefix(f"{hf.source}: ")}
    for name in _SIZES:
        summary[name] = getattr(config, name)
    num_experts = None
    for moe in config.moe:
        if moe is not None:
            num_experts = moe.num_experts
            break
    return summary | {
        "dtype": _name(dtype),
        "kv_cache_dtype": ",".join(str(_name(cache_dtype)) for cache_dtype in dict.fromkeys(cache_dtypes)),
        "sliding_layers": sum(window is not None for window in config.windows),
        "unknown_keys": list(config.unknown_keys),
        "num_experts": num_experts,
        "max_seq_len": config.max_position_embeddings,
        "ranks": [_rank(network_class, config, dtype, share, needs) for share in spreads],
    }


def _rank(
    network_class: type[Network],
    config: DecoderConfig,
    dtype: torch.dtype,
    share: Share,
    needs: Callable[[Share], Needs],
) -> dict[str, Any]:
    rank: dict[str, Any] = {"tensor_parallel_size": share.size, "reason": None}
    rank |= dict.fromkeys([*Needs._fields, "sent_bytes"])
    try:
        rank |= needs(share)._asdict()
    except PagedError as error:
        return rank | {"reason": str(error)}
    sent = step_bytes(
        config,
        num_sums=network_class.num_sums(config),
        last_sums=0,
        num_tokens=1,
        num_rows=1,
        size=share.size,
        itemsize=dtype.itemsize,
    )
    return rank | {"sent_bytes": round(ring_bytes(sent, share.size))}


def _needs(
    network_class: type[Network],
    config: DecoderConfig,
    dtype: torch.dtype,
    formats: Mapping[str, Any],
    state_dtype: torch.dtype,
    block_size: int,
    device_bytes: int | None,
    share: Share,
) -> Needs:
    cache = cache_config(share.config(config), block_size=block_size, **formats)
    cache_dtype = cache.dtype
    assert cache_dtype is not None
    if cache.recurrent is not None:
        cache = replace(cache, recurrent=replace(cache.recurrent, conv_dtype=dtype, state_dtype=state_dtype))
    parameters, weight_bytes = _loaded(network_class, config, dtype, share)
    host_bytes: int | None = None
    if isinstance(config, DecoderConfig):
        host_bytes = _host_bytes(config, dtype) or None
    kv_tokens = None
    if device_bytes is not None and cache.has_kv:
        kv_tokens = 0
        free_bytes = device_bytes - (weight_bytes - (host_bytes or 0))
        slots_bytes = default_slots_bytes(cache, dtype, free_bytes)
        num_blocks = (int(free_bytes * GPU_FRACTION) - slots_bytes) // cache.block_bytes(cache_dtype)
        if num_blocks > 0:
            kv_tokens = replace(cache, num_blocks=num_blocks).capacity_tokens
    growth_bytes = sequence_bytes = None
    if cache.sequence_bytes(cache_dtype):
        growth_bytes, sequence_bytes = cache.growth_bytes(cache_dtype), cache.sequence_bytes(cache_dtype)
    token_bytes = cache.token_bytes(cache_dtype)
    needs = Needs(
        parameters, weight_bytes, host_bytes, token_bytes, growth_bytes, sequence_bytes, kv_tokens, None, None
    )
    if cache.recurrent is None:
        return needs
    return needs._replace(state_bytes=cache.recurrent.state_bytes, conv_bytes=cache.recurrent.conv_bytes(dtype))


def _host_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of all tables of n-grams."""
    num_bytes = 0
    for index, ngrams in enumerate(config.ngrams):
        if isinstance(ngrams, EngramConfig):
            num_bytes += table_bytes(ngrams, dtype, is_packed=has_packed_tables(config, index))
        elif ngrams is not None:
            num_bytes += ngrams.num_table_elements * dtype.itemsize
    return num_bytes


def _loaded(network_class: type[Network], config: DecoderConfig, dtype: torch.dtype, share: Share) -> tuple[int, int]:
    """Return parameters and bytes after loading. Plain weights are counted for one layer of each kind and multiplied.

    Raises:
        UnsupportedError: loading would fail.
    """
    if isinstance(config, ModuleConfig):
        parameters = sum(parameter.numel() for parameter in network_class(config).parameters())
        return parameters, parameters * dtype.itemsize
    has_sharing = any(
        layer.compressed is not None and layer.compressed.sharing is not None for layer in config.attention
    )
    if config.quantization is not None or has_sharing:
        return _size(network_class, config, dtype, share)
    fields = ("attention", "moe", "intermediate_size", "recurrent", "ngrams", "attends")
    nothing: dict[str, Any] = dict.fromkeys(fields, ())
    none = replace(config, **nothing)
    base_parameters, base_bytes = _size(network_class, none, dtype, share)
    num_parameters, num_bytes = base_parameters, base_bytes
    columns = [getattr(config, name) for name in fields]
    layers = Counter(zip(*columns, strict=True))
    for values, count in layers.items():
        one_layer: dict[str, Any] = {}
        for name, value in zip(fields, values, strict=True):
            one_layer[name] = (value,)
        parameters, size = _size(network_class, replace(config, **one_layer), dtype, share)
        num_parameters += count * (parameters - base_parameters)
        num_bytes += count * (size - base_bytes)
    return num_parameters, num_bytes


def _size(network_class: type[Network], config: DecoderConfig, dtype: torch.dtype, share: Share) -> tuple[int, int]:
    network, _ = rank_network(meta_network(network_class, config, dtype), config, dtype, share)
    return num_weights(network), sum(parameter.nbytes for parameter in network.parameters())


def _integer(hf: HfConfig, key: str) -> int | None:
    try:
        return hf.optional_integer(key)
    except CheckpointError:
        return None


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
