"""Share one `Bound` operation among all layers of a network that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from paged.kernels.core.operation import Bound, layout
from paged.kernels.moe.weights import ExpertLinear
from paged.models.layers.attention_config import AttentionConfig, BlockIndexConfig, IndexConfig, LatentConfig
from paged.models.layers.config import MoeConfig
from paged.models.layers.recurrent_config import RecurrentConfig

# Types of attributes, besides tensors, that distinguish layers: only equal layers share `Bound`s.
_CONSTANT = (
    *(bool, int, float, str, type(None)),
    *(AttentionConfig, BlockIndexConfig, IndexConfig, LatentConfig, MoeConfig, RecurrentConfig),
)


def share_bound(network: nn.Module) -> None:
    """Let modules with equal weights, caches and sizes share their `Bound`s, so that each is bound once.

    Call it once weights and caches are at their final addresses.
    """
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
            yield name, (value.shape, value.dtype) if value.is_mkldnn else layout(value)
        elif isinstance(value, ExpertLinear):
            yield name, layout(*value)
        elif isinstance(value, dict) and not name.startswith("_"):  # nn.Module's own dicts have an underscore
            yield name, *value.items()
        elif isinstance(value, _CONSTANT):
            yield name, value
