"""Products of rows with the weights of linear layers."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..cpu import products


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `torch.nn.functional.linear` without gradients: x [..., in_features], weight [out_features, in_features].

    Weights that `products.pack` reordered work only in eager mode: a compiler cannot trace them.
    """
    if x.is_cuda or torch.compiler.is_dynamo_compiling():
        return functional.linear(x, weight, bias)
    return products.multiply(x, weight, bias)


def linear_and_silu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return silu(gate) * up for the halves of `linear(x, weight)`, rounded once; None if no numba kernel does it."""
    if torch.compiler.is_dynamo_compiling():
        return None
    return products.multiply_and_silu(x, weight)
