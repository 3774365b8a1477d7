"""What a model's layers bind: one `Bound` for all that are alike, so that the first of them binds for the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from paged.kernels.common.operation import Bound, layout
from paged.kernels.moe.weights import ExpertLinear
from paged.models.layers.config import AttentionConfig, MoeConfig

_CONSTANT = (bool, int, float, str, type(None), AttentionConfig, MoeConfig)


def share_bound(network: nn.Module) -> None:
    """Give modules whose weights, caches and numbers are alike the same `Bound`s. Weights and caches are where they
    will be."""
    shared: dict[Hashable, Any] = {}
    for module in network.modules():
        bounds = {name: value for name, value in vars(module).items() if isinstance(value, Bound)}
        if bounds:
            likeness = type(module), *_likeness(module)
            for name, bound in bounds.items():
                setattr(module, name, shared.setdefault((name, likeness), Bound(bound.operation, bound.by)))


def _likeness(module: nn.Module) -> Iterator[Hashable]:
    for name, value in (*vars(module).items(), *module.named_parameters(), *module.named_buffers()):
        if isinstance(value, torch.Tensor):
            yield name, layout(value)
        elif isinstance(value, ExpertLinear):
            yield name, layout(*value)
        elif isinstance(value, dict) and not name.startswith("_"):  # parts of a product, not what nn.Module keeps
            yield name, *value.items()
        elif isinstance(value, _CONSTANT):
            yield name, value
