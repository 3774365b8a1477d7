"""Norms, rotation, gated activations and streams as formulas, each written once, in a dtype that the caller chooses.

A definition takes an operation's arguments and returns new tensors in `compute`, unrounded. In float64, the default,
tests and `paged verify` compare kernels with it. In float32 it runs on a CPU without numba, and with
PAGED_BACKEND=torch.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ..core.ids import check_ids_on_host


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, compute: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, 2019)."""
    x, weight = x.to(compute), weight.to(compute)
    # vector_norm needs no temporary as large as x, whose page faults take longer than the sums.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]  # [..., 1]
    return (x * (mean_square + eps).rsqrt()).mul_(weight)


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return x [num_tokens, num_heads, head_dim] with the first rotary_dim elements rotated (Su et al., 2021).

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). Pair i has elements i and i + rotary_dim / 2, or 2i and 2i + 1
    if interleaved. Raises InvalidInputError naming the first position out of range.
    """
    try:
        angles = cos_sin_cache.index_select(0, positions)  # [num_tokens, rotary_dim]
    except (IndexError, RuntimeError):
        # PyTorch has checked every position, so none is read before: a recorded step could not repeat that.
        check_ids_on_host("positions", positions, 0, len(cos_sin_cache) - 1)
        raise
    cos, sin = angles.to(compute).unsqueeze(1).chunk(2, -1)  # [num_tokens, 1, rotary_dim / 2]
    rotary_dim = cos_sin_cache.shape[1]
    rotated = x.to(compute, copy=True)
    pairs = rotated[..., :rotary_dim]
    if interleaved:
        a, b = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = pairs.chunk(2, -1)
    new_a = a * cos - b * sin
    b.mul_(cos).addcmul_(a, sin)
    a.copy_(new_a)
    return rotated


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, activation: str, *, compute: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return activation(gate) * up for "silu", "gelu", "gelu_tanh" (Shazeer, 2020) and the names below.

    "swiglu_oai" is min(gate, 7) sigmoid(1.702 min(gate, 7)) (1 + up), with up clamped to [-7, 7] (OpenAI, 2025). "situ"
    is 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25) (Moonshot AI, "Kimi K3", 2026). "silu_10" is silu(min(gate, 10))
    up, with up clamped to [-10, 10] (Z.ai, "GLM-5.3", 2026).
    """
    gate, up = gate.to(compute), up.to(compute)
    if activation == "silu":
        return functional.silu(gate).mul_(up)  # silu(z) = z / (1 + exp(-z))
    if activation == "gelu":
        return functional.gelu(gate).mul_(up)  # gelu(z) = z (1 + erf(z / sqrt(2))) / 2
    if activation == "gelu_tanh":
        # z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2
        return functional.gelu(gate, approximate="tanh").mul_(up)
    if activation == "situ":
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))
    if activation == "silu_10":
        return functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    assert activation == "swiglu_oai", activation
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (1 + up)


def silu_and_mul(x: torch.Tensor, activation: str = "silu", *, compute: torch.dtype = torch.float64) -> torch.Tensor:
    """Return activation(gate) * up, [..., size]; the first half of the last axis of x is the gate."""
    gate, up = x.chunk(2, -1)
    return gated_activation(gate, up, activation, compute=compute)


def join_streams(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    joins: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the new streams of `mix_streams`, [num_tokens, N, size]: gains * output + shares^T @ streams.

    joins: N gains, and optionally N * N shares, rows of old streams. None returns the streams.
    """
    wide, count = streams.to(compute), streams.shape[1]
    if output is None or joins is None:
        return wide
    gains, shares = joins.to(compute).split((count, joins.shape[1] - count), -1)
    if shares.shape[1]:
        wide = shares.unflatten(-1, (count, count)).mT @ wide
    return torch.addcmul(wide, gains.unsqueeze(-1), output.to(compute).unsqueeze(1))


def stream_logits(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    *,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the logits of `mix_streams`, [num_tokens, num_weights]: scale * fn (streams / rms(streams)) + base."""
    wide, count = streams.to(compute).flatten(1), streams.shape[1]
    root = (wide.square().mean(-1, keepdim=True) + norm_eps).rsqrt()  # [num_tokens, 1]
    # Columns of each factor. The sum of the counts is known, so that steps on a CPU can be recorded.
    sections = [count, count, count * count][: len(scale)]
    factors = torch.cat([scale[kind : kind + 1].expand(size) for kind, size in enumerate(sections)]).to(compute)
    return (wide @ fn.to(compute).T) * root * factors + base.to(compute)


def mix_streams(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    joins: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    magnitude: float = 2.0,
    num_iterations: int = 0,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the next part's input, the new streams, and the next joins; see the operation `mix_streams`.

    The new streams are returned unrounded. Everything else is made of them as rounded to their dtype.
    """
    count = streams.shape[1]
    joined = join_streams(streams, output, joins, compute=compute)
    rounded = joined.to(streams.dtype).to(compute)
    logits = stream_logits(rounded, fn, base, scale, norm_eps, compute=compute)
    own_weights = logits[:, :count].sigmoid() + eps
    next_joins: list[torch.Tensor] = []
    if weights is None:
        weights = own_weights
    else:
        next_joins.append(own_weights)
    x = rms_norm((weights.to(compute).unsqueeze(-1) * rounded).sum(1), norm_weight, norm_eps, compute=compute)
    gains = magnitude * logits[:, count : 2 * count].sigmoid()
    if num_iterations == 0:
        return x, joined, torch.cat([*next_joins, gains + eps], -1)
    shares = logits[:, 2 * count :].unflatten(-1, (count, count)).softmax(-1) + eps  # [num_tokens, old, new]
    shares = shares / (shares.sum(-2, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        shares = shares / (shares.sum(-1, keepdim=True) + eps)
        shares = shares / (shares.sum(-2, keepdim=True) + eps)
    return x, joined, torch.cat([*next_joins, gains, shares.flatten(1)], -1)


def gate_streams(
    streams: torch.Tensor,
    output: torch.Tensor | None,
    gains: torch.Tensor | None,
    norm_weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    *,
    eps: float = 1e-6,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the next part's input, the new streams, and the next gains; see the operation `gate_streams`.

    The new streams are returned unrounded. Everything else is made of them as rounded to their dtype.
    """
    count, rank = streams.shape[1], up.shape[1]
    joined = join_streams(streams, output, gains, compute=compute)
    normed = rms_norm(joined.to(streams.dtype), norm_weight.view(count, -1), eps, compute=compute)  # [T, N, size]
    sums = normed.flatten(1) @ down.to(compute).T / count  # [T, rank + N]
    gates = (functional.silu(sums[:, :rank]) @ up.to(compute).T).sigmoid()  # [T, N * size]
    return (gates.view_as(normed) * normed).mean(1), joined, 2 * sums[:, rank:].sigmoid()


def mix_snapshots(
    rows: torch.Tensor,
    output: torch.Tensor | None,
    score_norm_weight: torch.Tensor,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    num_snapshots: int,
    *,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised sum and the new stream; see the operation `mix_snapshots`. Nothing is written.

    The new stream is returned unrounded. Everything else is made of it as rounded to its dtype.
    """
    stream = rows[-1].to(compute)
    if output is not None:
        stream = stream + output.to(compute)
    mixed_rows = torch.cat([rows[:num_snapshots], stream.to(rows.dtype)[None]]).to(compute)  # [num_rows, T, size]
    scores = rms_norm(mixed_rows, score_norm_weight, eps, compute=compute) @ score_weight.to(compute)  # [num_rows, T]
    mixed = (scores.softmax(0).unsqueeze(-1) * mixed_rows).sum(0)
    return rms_norm(mixed, norm_weight, norm_eps, compute=compute), stream
