"""Replace the weights of a running model: check and read all new weights first, then copy them into place."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paged.errors import CheckpointError, UnsupportedError
from paged.folder_path import as_folder
from paged.kernels.cpu.products import pack
from paged.models.families.network import Network
from paged.models.generic.config import ModuleConfig
from paged.models.layers.modules import Linear
from paged.models.layers.sparse_moe import SparseMoe
from paged.models.loading.given_tensors import GivenTensors
from paged.models.loading.weights import PackedModule
from paged.models.network_loader import load_network, with_stored_layout
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import read_model_config

Source = str | Path | Iterable[tuple[str, torch.Tensor]]


def read_new_weights(model: PagedCausalLM, source: Source, *, check_finite: bool) -> Network:
    """Return a network in host memory with this rank's part of the new weights; the model does not change.

    Raises:
        CheckpointError: as loading the model; or settings of the folder's config.json are not the model's; or, with
            check_finite, a weight is infinite or NaN.
        InvalidInputError: the source is neither a folder nor pairs of names and tensors.
        UnsupportedError: the model is transformers' own module.
    """
    old = model.network
    if isinstance(old.config, ModuleConfig):
        raise UnsupportedError("update_weights: not supported for transformers' own module")
    network_class, config = type(old), old.config
    origin: Path | GivenTensors
    if isinstance(source, str | Path):
        origin = as_folder("source", source)
        network_class, config = read_model_config(origin)
    else:
        origin = GivenTensors(source)
    new = load_network(
        network_class,
        config,
        origin,
        dtype=model.dtype,
        device=torch.device("cpu"),
        cache_kinds=None,
        ranks=model.ranks,
        kv_rotation=old.kv_rotation,
    )
    # The same weights may be stored in another layout.
    new_config, old_config = with_stored_layout(new.config, {}), with_stored_layout(old.config, {})
    if type(new) is not type(old) or new_config != old_config:
        names: list[str] = []
        for field in fields(old_config):
            if getattr(new_config, field.name) != getattr(old_config, field.name):
                names.append(field.name)
        raise CheckpointError(f"{origin}: {', '.join(names) or type(new).__name__} differ from the model's")
    if check_finite:
        for name, weight in new.named_parameters():
            if weight.is_floating_point() and not _is_finite(weight):
                raise CheckpointError(f"{origin}: {name} holds infinity or NaN")
    return new


@torch.no_grad()
def replace_weights(model: PagedCausalLM, new: Network) -> None:
    """Replace the model's weights, and derive again what the model derived from the old weights.

    Plain weights keep their addresses, so graphs stay valid. If other weights move, captured graphs are captured again.
    """
    # Count first: after an error halfway, weights are mixed, and no result may pass for one of the old generation.
    model.weights_generation += 1
    model.kv_manager.clear_prefix_cache()
    # Files with K/V of the old weights stay, because other processes may use them. A random fingerprint keeps the new
    # weights' K/V apart.
    model.kv_manager.set_fingerprint(os.urandom(32))
    is_moved = False
    for path, new_module in list(new.named_modules()):
        if isinstance(new_module, Linear | SparseMoe):
            old_module: Any = model.network.get_submodule(path)
            with model.network.computing():
                is_moved |= old_module.take_products(new_module, model.dtype)
    for path, new_module in new.named_modules():
        module = model.network.get_submodule(path)
        is_moved |= isinstance(module, PackedModule)
        for name, weight in new_module.named_parameters(recurse=False):
            held = getattr(module, name)
            if held.is_mkldnn:
                with model.network.computing():
                    setattr(module, name, nn.Parameter(pack(weight), requires_grad=False))
                is_moved = True
            else:
                held.copy_(weight)
    if is_moved or model.device.type == "cpu":
        model.network.derive_from_weights()
        if model.graphs.are_captured:
            model.graphs.capture()


def _is_finite(weight: torch.Tensor) -> bool:
    if weight.dtype.itemsize == 1:
        weight = weight.float()
    # The least and largest value suffice, because any NaN makes both NaN. `isfinite` over all values takes 28 times as
    # long.
    return not weight.numel() or bool(torch.stack(weight.aminmax()).isfinite().all())
