"""Norm, rotary embedding and gated activations in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..id_checks import check_ids_on_host


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """PyTorch implementation of `kernels.layers.rms_norm`; `out` may be x.

    It makes one temporary as large as x: three of them made 2,048 rows fifteen times as slow, because of the pages that
    memory came in.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = x.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    torch.mul(wide * mean_square.add_(float(eps)).rsqrt_(), weight.float(), out=out.view(x.shape))
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch implementation of `kernels.layers.fused_add_rms_norm`."""
    rms_norm(residual.add_(x), weight, eps, out=x)
    return x, residual


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """PyTorch implementation of `kernels.layers.rotary_embedding`: query and key change in place."""
    half = cos_sin_cache.shape[1] // 2
    try:
        rows = cos_sin_cache.index_select(0, positions)  # a CPU checks every index anyway
    except (IndexError, RuntimeError):  # the latter of a table without rows
        check_ids_on_host("positions", positions, 0, len(cos_sin_cache) - 1)
        raise
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    # The first of a pair becomes a cos - b sin, the second b cos + a sin: x cos + swapped (-sin, sin).
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    tensors = [query]
    if key is not None:
        tensors.append(key)
    for x in tensors:
        rotated = x[..., : 2 * half]
        wide = rotated.float()
        if interleaved:
            swapped = wide.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
        else:
            swapped = wide.roll(half, -1)
        wide.mul_(cos).addcmul_(swapped, sin)
        if wide is not rotated:
            rotated.copy_(wide)
    return query, key


def gated_activation(x: torch.Tensor, activation: str, interleaved: bool) -> torch.Tensor:
    """PyTorch implementation of `kernels.common.gated_activation`; gate and up are halves of x or alternate.

    "relu2" has no gate: x is up.
    """
    if activation == "relu2":
        return x.relu().square_()
    if interleaved:
        gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate, up = x.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "swiglu_oai":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return functional.gelu(gate, approximate=approximate) * up


def silu_and_mul(x: torch.Tensor, *, activation: str = "silu", out: torch.Tensor | None = None) -> torch.Tensor:
    """PyTorch implementation of `kernels.layers.silu_and_mul`: float32 inside, rounded once into `out`."""
    if out is None:
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    if activation == "silu" and x.dtype == torch.float32:
        # Without a temporary: the pages of one and the copy out of it took a twelfth of a prompt of 2,048 tokens.
        gate, up = x.chunk(2, -1)
        torch.ops.aten.silu.out(gate, out=out).mul_(up)
    else:
        out.copy_(gated_activation(x.float(), activation, interleaved=False))
    return out
