"""The gated delta rule and the scan of Mamba-2 in PyTorch: chunks in float32, one sequence after the other."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..metadata import CHUNK_SIZE, RecurrentBatch, Rings, Row


def gated_delta_rule(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    rings: Rings,
    batch: RecurrentBatch,
    *,
    beta_scale: float,
    eps: float,
) -> torch.Tensor:
    """PyTorch implementation of `kernels.recurrent.gated_delta_rule`."""
    key_heads, key_dim = rings.k.shape[2:]
    q, k, v = mixed.float().split([key_heads * key_dim, key_heads * key_dim, rings.u[0, 0].numel()], 1)
    q, k = (_normalised(part.unflatten(1, (key_heads, key_dim)), eps) for part in (q, k))
    g = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    v = v.unflatten(1, rings.u.shape[2:])
    return _run(q * key_dim**-0.5, k, v, g, beta_scale * b.float().sigmoid(), rings, batch).to(mixed.dtype)


def mamba2_scan(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    D: torch.Tensor,
    rings: Rings,
    batch: RecurrentBatch,
    *,
    dt_limits: tuple[float, float],
) -> torch.Tensor:
    """PyTorch implementation of `kernels.recurrent.mamba2_scan`."""
    groups, key_dim = rings.k.shape[2:]
    x, B, C = mixed.float().split([rings.u[0, 0].numel(), groups * key_dim, groups * key_dim], 1)
    B, C = (part.unflatten(1, (groups, key_dim)) for part in (B, C))
    x = x.unflatten(1, rings.u.shape[2:])
    delta = functional.softplus(dt.float() + dt_bias.float()).clamp(*dt_limits)
    out = _run(C, B, delta.unsqueeze(-1) * x, -delta * A_log.float().exp(), None, rings, batch)
    return (out + D.float()[:, None] * x).to(mixed.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _run(
    q: torch.Tensor,  # [num_tokens, HK, K], as k
    k: torch.Tensor,
    v: torch.Tensor,  # [num_tokens, HV, V]; u if there is no beta
    g: torch.Tensor,  # [num_tokens, HV], as beta
    beta: torch.Tensor | None,
    rings: Rings,
    batch: RecurrentBatch,
) -> torch.Tensor:
    out = torch.zeros_like(v)
    for row in batch.rows():
        tokens = slice(row.first, row.first + row.length)
        S = _state_at(row, rings)
        if row.length > batch.max_append:
            # The first chunk ends at the next multiple of CHUNK_SIZE.
            first = CHUNK_SIZE - row.start % CHUNK_SIZE
            for start in range(first - CHUNK_SIZE, row.length, CHUNK_SIZE):
                part = slice(row.first + max(start, 0), row.first + min(start + CHUNK_SIZE, row.length))
                S, out[part], _ = _chunk(S, part, q, k, v, g, beta)
                if row.snapshot_slot >= 0 and row.start + start + CHUNK_SIZE == row.snapshot_len:
                    rings.state[row.snapshot_slot] = S
            rings.state[row.write_slot] = S
            continue
        base = row.cursor
        if row.write_slot != row.read_slot:
            rings.state[row.write_slot], base = S, 0
        at = row.write_slot, slice(base, base + row.length)
        _, out[tokens], u = _chunk(S, tokens, q, k, v, g, beta)
        rings.k[at], rings.u[at], rings.g[at] = k[tokens], u, g[tokens]
    return out


def _state_at(row: Row, rings: Rings) -> torch.Tensor:
    """Return S [HV, V, K] at the position that a row reads."""
    if row.read_slot < 0:
        return torch.zeros_like(rings.state[0], dtype=torch.float32)
    valid = row.read_slot, slice(0, row.cursor)
    g = rings.g[valid].cumsum(0)
    if row.cursor == 0:
        return rings.state[row.read_slot].float()
    grown = _outer(rings.u[valid] * (g[-1] - g).exp().unsqueeze(-1), rings.k[valid])
    return rings.state[row.read_slot].float() * g[-1].exp()[:, None, None] + grown


def _outer(u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of u k^T, [HV, V, K]."""
    return torch.einsum("thv,thk->hvk", u, _of_value_heads(k, u))


def _of_value_heads(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(v.shape[1] // x.shape[1], 1)


def _chunk(
    S: torch.Tensor,
    tokens: slice,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return S after the tokens, their outputs and their u: the chunked form of Yang et al. (2024)."""
    q, k, v, g = q[tokens], k[tokens], v[tokens], g[tokens]
    q, keys = _of_value_heads(q, v), _of_value_heads(k, v)
    exact = g.double().cumsum(0)  # in float32, differences of sums of -1,000 would be off by 6e-5
    between = (exact.T[:, :, None] - exact.T[:, None, :]).tril()  # of later tokens it could overflow
    decay, decay_to_end, sums = between.float().exp().tril(), (exact[-1] - exact).float(), exact.float()
    u = v
    if beta is not None:
        beta = beta[tokens]
        scaled = beta.T[:, :, None] * decay * torch.einsum("ihk,jhk->hij", keys, keys)
        seen = torch.einsum("hvk,thk->thv", S, keys) * sums.exp().unsqueeze(-1)
        rows = (beta.unsqueeze(-1) * (v - seen)).transpose(0, 1)
        u = torch.linalg.solve_triangular(scaled, rows, upper=False, unitriangular=True).transpose(0, 1)
    inside = torch.einsum("hij,jhv->ihv", decay * torch.einsum("ihk,jhk->hij", q, keys), u)
    out = torch.einsum("hvk,thk->thv", S, q) * sums.exp().unsqueeze(-1) + inside
    S = S * sums[-1].exp()[:, None, None] + _outer(u * decay_to_end.exp().unsqueeze(-1), k)
    return S, out, u
