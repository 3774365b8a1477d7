"""Small operations as strangers write them, each with one mistake."""

import torch
from torch.nn import functional


def returns_nothing(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    x.copy_(functional.rms_norm(x, weight.shape, weight, eps))


def returns_half(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps).bfloat16()


def returns_double(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return functional.rms_norm(x.double(), weight.shape, weight.double(), eps)


def raises(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    raise ValueError("too wide")


def swaps_halves(x: torch.Tensor) -> torch.Tensor:
    """It takes no other activation than the default."""
    gate, up = x.chunk(2, -1)
    return functional.silu(up) * gate
