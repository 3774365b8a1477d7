"""From a checkpoint's configuration and headers to a network that holds its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from paged.errors import CheckpointError
from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.loading.weights import (
    StoredTensors,
    check_weights,
    load_kv_scales,
    load_weights,
    read_headers,
    read_tensor,
)

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"model\.layers\.(\d{1,9})\.\w+\.experts\.(\d{1,9})\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_network(
    network_class: type[Llama],
    config: DecoderConfig,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    has_fp8_cache: bool,
) -> Llama:
    """A network with the weights of a folder. Its headers are compared with the configuration first: until they agree,
    no memory is taken that either of them asks for.

    Raises:
        CheckpointError: a tensor is missing, unexpected, there twice, misshapen or of another dtype, or a file is
            missing, unreadable, truncated or outside of the folder.
    """
    stored = _without_mtp(_renamed(read_headers(folder), network_class.renames), config)
    config = replace(
        config,
        moe=tuple(
            _as_stored(moe, stored, f"model.layers.{layer}.{config.mlp_name}") for layer, moe in enumerate(config.moe)
        ),
    )
    _check_counts(stored, config, folder)
    if config.tie_word_embeddings and _has_head_of_its_own(stored):
        config = replace(config, tie_word_embeddings=False)  # the weights are right, as in transformers
    network = meta_network(network_class, config, dtype)
    check_weights(stored, network.weight_slots(), tied_head=config.tie_word_embeddings, folder=folder)
    network = network.to_empty(device=device)
    load_weights(stored, network.weight_slots())
    if has_fp8_cache:
        network.scale_caches(load_kv_scales(stored, config.num_layers, config.num_kv_heads, device))
    return network


def meta_network(network_class: type[Llama], config: DecoderConfig, dtype: torch.dtype) -> Llama:
    """A network without memory.

    Raises:
        CheckpointError: a weight would have more bytes than can be counted.
    """
    try:
        with torch.device("meta"):
            network = network_class(config)
        network.set_dtype(dtype)
    except RuntimeError as error:
        raise CheckpointError(f"sizes beyond any model's: {error}; {config}"[:1000]) from error
    return network


def _renamed(stored: StoredTensors, renames: Mapping[str, str]) -> StoredTensors:
    """The tensors by the names that a family has for them.

    Raises:
        CheckpointError: two have one name.
    """
    found: StoredTensors = {}
    for name, tensor in stored.items():
        for theirs, ours in renames.items():
            name = re.sub(theirs, ours, name)
        if name in found:
            raise CheckpointError(f"{tensor.name}: the same as {found[name].name}, in {tensor.file}")
        found[name] = tensor
    return found


def _without_mtp(stored: StoredTensors, config: DecoderConfig) -> StoredTensors:
    """The tensors but for those of layers that predict tokens further ahead."""
    last = config.num_layers + config.num_mtp_layers
    layers = ((name, _LAYER.match(name)) for name in stored)
    return {name: stored[name] for name, one in layers if not (one and config.num_layers <= int(one[1]) < last)}


def _as_stored(moe: MoeConfig | None, stored: StoredTensors, prefix: str) -> MoeConfig | None:
    """Experts one by one or stacked, as they are there."""
    is_stacked = f"{prefix}.experts.gate_up_proj" in stored
    return replace(moe, stacked=True) if moe is not None and is_stacked else moe


def _check_counts(stored: StoredTensors, config: DecoderConfig, folder: Path) -> None:
    """See that there are as many layers and experts: before a network is made of them one by one."""
    layers = {int(match[1]) for name in stored if (match := _LAYER.match(name))}
    if config.num_layers > len(layers):
        first = next(layer for layer in range(config.num_layers) if layer not in layers)
        raise CheckpointError(f"model.layers.{first}: no tensors in {folder}, expected {config.num_layers} layers")
    experts: dict[int, set[int]] = {}
    for match in filter(None, map(_EXPERT.match, stored)):
        experts.setdefault(int(match[1]), set()).add(int(match[2]))
    for layer, moe in enumerate(config.moe):
        if moe is not None and not moe.stacked and len(experts.get(layer, ())) < moe.num_experts:
            found = len(experts.get(layer, ()))
            raise CheckpointError(f"model.layers.{layer}: {found} experts in {folder}, expected {moe.num_experts}")


def _has_head_of_its_own(stored: StoredTensors) -> bool:
    if not {_EMBEDDING, _HEAD} <= stored.keys():
        return False
    if stored[_EMBEDDING].shape != stored[_HEAD].shape or stored[_EMBEDDING].dtype != stored[_HEAD].dtype:
        return True
    return not torch.equal(read_tensor(stored, _EMBEDDING), read_tensor(stored, _HEAD))
