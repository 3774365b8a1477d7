"""Our linear layers and norms, which replace the ones in transformers' modules."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from paged.models.generic.experts import ModuleExperts
from paged.models.layers.config import NormConfig
from paged.models.layers.modules import Linear, RmsNorm

# Possible names of a norm's attribute eps, which is added to the mean square.
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
# Factors of the input on which `_our_norm` compares norms. The small one makes the mean square about as large as eps.
_FACTORS = (1.0, 1e-3)


def use_our_layers(module: nn.Module, linears: Iterable[str], dtype: torch.dtype) -> None:
    """Replace linear layers, RMS norms and experts of a module with weights by ours.

    linears: names of the linear layers, from the probe's forward. dtype: dtype of activations.
    """
    names = frozenset(linears)
    ours: dict[int, nn.Module] = {}
    places = list(module.named_modules(remove_duplicate=False))
    for name, part in places:
        if name in names and type(part) in WATCHED:
            ours[id(part)] = ModuleLinear(name, part)
        elif type(part).__name__.endswith("RMSNorm"):
            norm = _our_norm(part, dtype)
            if norm is not None:
                ours[id(part)] = norm
        elif hasattr(part, "has_post_expert_norm"):
            ModuleExperts.attach(part)
    for name, part in places:
        if id(part) in ours:
            module.set_submodule(name, ours[id(part)])


class ModuleLinear(Linear):
    """Our product, which replaces a linear layer or GPT-2's `Conv1D`."""

    def __init__(self, name: str, theirs: nn.Module) -> None:
        """name: path in the module. theirs: the replaced layer; its parameters are moved, or copied if transposed."""
        weight: Any = theirs.weight
        if isinstance(theirs, Conv1D):
            weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
        self.out_features, in_features = weight.shape
        with torch.device("meta"):
            super().__init__(in_features, {name: self.out_features})
        self.weight = weight
        self.bias: Any = theirs.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the product with x [..., in_features]."""
        rows = x.reshape(-1, self.in_features)
        return super().forward(rows).view(*x.shape[:-1], self.out_features)


class ModuleNorm(RmsNorm):
    """Our RMS norm, which replaces a module's norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return x [..., size], normed over the last axis."""
        return self.rms_norm(x, self.weight, self.eps)


class _Watched(nn.Module):
    """Notes whether a linear layer is called, and whether other code reads its weight.

    Other code could not read a weight that is reordered for a CPU or quantised.
    """

    is_called = is_read = False
    bias: Any

    @property
    def weight(self) -> Any:
        """The weight, for other code."""
        self.is_read = True
        return self._parameters["weight"]

    def _called(self) -> Any:
        """Return the weight, for a call of the layer."""
        self.is_called = True
        return self._parameters["weight"]


class _WatchedLinear(_Watched, nn.Linear):  # type: ignore[misc, override]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._called(), self.bias)


class _WatchedConv1D(_Watched, Conv1D):  # type: ignore[misc, override]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._called().T, self.bias)


# Class of a linear layer -> class that watches it in the probe's forward.
WATCHED: dict[type[nn.Module], type[_Watched]] = {nn.Linear: _WatchedLinear, Conv1D: _WatchedConv1D}


def _eps_of(norm: nn.Module) -> float | None:
    for name in _EPS:
        eps = getattr(norm, name, None)
        if isinstance(eps, float):
            return eps
    return None


def _our_norm(theirs: nn.Module, dtype: torch.dtype) -> ModuleNorm | None:
    """Return our norm in place of a module's; None if our norm gives other numbers or dtypes."""
    eps = _eps_of(theirs)
    parameters = dict(theirs.named_parameters())
    if eps is None or list(parameters) != ["weight"] or list(theirs.buffers()):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, len(weight), generator=generator).to(weight.device)
    if theirs(rows.to(dtype)).dtype != dtype or theirs(rows).dtype != torch.float32:
        return None
    in_float32 = deepcopy(theirs).float()
    for zero_centred in (False, True):
        ours = ModuleNorm(0, NormConfig(eps=eps, zero_centred=zero_centred))
        ours.weight = weight
        if zero_centred:  # weights stored minus 1 stay float32, see `RmsNorm`
            ours.weight = nn.Parameter(weight.float() + 1, requires_grad=False)
        if all(torch.allclose(ours(rows * factor), in_float32(rows * factor), 1e-5, 1e-6) for factor in _FACTORS):
            return ours
    return None
