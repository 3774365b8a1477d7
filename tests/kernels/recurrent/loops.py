"""Recurrent layers in float64, token by token and head by head: the rule that chunks of the definition hide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from paged.kernels.recurrent.metadata import RecurrentBatch, RecurrentState, Row
from tests.float64 import f64

Step = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""S of a head [V, K], the token and the head -> the output [V], k [rank, K], u [rank, V] and g [1 or K], of which S
becomes S exp(g) + u^T k before the output."""


class Written(NamedTuple):
    """An operation's result and what its state holds after it."""

    out: torch.Tensor
    conv: torch.Tensor
    state: torch.Tensor | None = None
    ring_k: torch.Tensor | None = None
    ring_u: torch.Tensor | None = None
    ring_g: torch.Tensor | None = None
    state_scale: torch.Tensor | None = None


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    activation: str | None = "silu",
) -> Written:
    """out[t] = sum_j weight[:, j] x[t - W + 1 + j] + bias, then silu; rows before the sequence are 0."""
    x, weight, conv, channels = f64(x), f64(weight), f64(state.conv).clone(), x.shape[1]
    out, before = torch.zeros_like(x), weight.shape[1] - 1
    for row in batch.rows():
        raw = torch.zeros(before + row.length, channels, dtype=torch.float64)
        if row.read_slot >= 0:
            raw[:before] = conv[row.read_slot, row.cursor : row.cursor + before]
        raw[before:] = x[row.first : row.first + row.length]
        for token in range(row.length):
            total = torch.zeros(channels, dtype=torch.float64)
            if bias is not None:
                total += f64(bias)
            for tap in range(before + 1):
                total += weight[:, tap] * raw[token + tap]
            if activation is not None:
                total = total / (1 + torch.exp(-total))
            out[row.first + token] = total
        slot = conv[row.write_slot]
        if row.length > batch.max_append:
            slot[:before] = raw[row.length :]
            if row.snapshot_slot >= 0:
                taken = row.snapshot_len - row.start
                conv[row.snapshot_slot, :before] = raw[taken : taken + before]
        elif row.write_slot == row.read_slot:
            slot[before + row.cursor : before + row.cursor + row.length] = raw[before:]
        else:
            slot[: before + row.length] = raw
    return Written(out, conv)


def gated_delta_rule(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    num_k_heads: int,
    beta_scale: float = 1.0,
    eps: float = 1e-6,
    lower_bound: float | None = None,
    erase_read: torch.Tensor | None = None,
    erase_write: torch.Tensor | None = None,
) -> Written:
    """S <- S exp(g); u = beta (v - S k); S <- S + u k^T; out = S q, per value head (Yang et al., 2024).

    With erase vectors S <- S exp(g) + (S erase_read) erase_write^T + v k^T, with S before its decay.
    """
    num_heads, value_dim, key_dim, q_end, k_end = _sizes(state, num_k_heads)
    rows, a, A_log, dt_bias = f64(mixed), f64(a), f64(A_log), f64(dt_bias)

    def step(S: torch.Tensor, token: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = rows[token, :q_end], rows[token, q_end:k_end], rows[token, k_end:]
        key_head = head // (num_heads // num_k_heads)
        q, k = (heads.view(num_k_heads, key_dim)[key_head] for heads in (q, k))
        v = v.view(num_heads, value_dim)[head]
        gate = (a[token, head] + dt_bias[head]).reshape(-1)
        if lower_bound is None:
            g = -A_log[head].exp() * torch.tensor([_softplus(float(channel)) for channel in gate], dtype=torch.float64)
        else:
            g = lower_bound / (1 + torch.exp(-A_log[head].exp() * gate))
        decayed = S * g.exp()
        if erase_read is not None and erase_write is not None:
            removed = S @ f64(erase_read)[token, head]
            keys, us = torch.stack([f64(erase_write)[token, head], k]), torch.stack([removed, v])
            return (decayed + us.T @ keys) @ q, keys, us, g
        assert b is not None
        q, k = (vector / math.sqrt(float(vector @ vector) + eps) for vector in (q, k))
        q = q / math.sqrt(key_dim)
        beta = beta_scale / (1 + _exp(-float(f64(b)[token, head])))
        u = beta * (v - decayed @ k)
        return (decayed + torch.outer(u, k)) @ q, k[None], u[None], g

    return _run(step, state, batch, num_k_heads, mixed.shape[0])


def mamba2_scan(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    D: torch.Tensor,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    num_groups: int,
    dt_limits: tuple[float, float] | None = None,
) -> Written:
    """S <- exp(dt A) S + (dt x) B^T; out = S C + D x, with A = -exp(A_log), per head (Dao and Gu, 2024)."""
    num_heads, value_dim, key_dim, _, _ = _sizes(state, num_groups)
    rows, dt, x_end = f64(mixed), f64(dt), num_heads * value_dim
    dt_min, dt_max = dt_limits or (0.0, math.inf)

    def step(S: torch.Tensor, token: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x = rows[token, :x_end].view(num_heads, value_dim)[head]
        B, C = rows[token, x_end:].view(2, num_groups, key_dim)[:, head // (num_heads // num_groups)]
        delta = min(max(_softplus(float(dt[token, head]) + float(dt_bias[head])), dt_min), dt_max)
        g = -delta * _exp(float(A_log[head]))
        out = (_exp(g) * S + torch.outer(delta * x, B)) @ C + float(D[head]) * x
        return out, B[None], (delta * x)[None], torch.tensor([g], dtype=torch.float64)

    return _run(step, state, batch, num_groups, mixed.shape[0])


def _sizes(state: RecurrentState, num_k_heads: int) -> tuple[int, int, int, int, int]:
    assert state.state is not None
    _, num_heads, value_dim, key_dim = state.state.shape
    return num_heads, value_dim, key_dim, num_k_heads * key_dim, 2 * num_k_heads * key_dim


def _exp(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).exp())  # infinity where Python's would raise


def _softplus(x: float) -> float:
    if x > 40:
        return x
    return math.log1p(_exp(x))


def _run(step: Step, layer_state: RecurrentState, batch: RecurrentBatch, num_k_heads: int, num_tokens: int) -> Written:
    assert layer_state.state is not None
    assert layer_state.ring_k is not None
    assert layer_state.ring_u is not None
    assert layer_state.ring_g is not None
    conv, state, ring_k, ring_u, ring_g = (
        f64(tensor).clone()
        for tensor in (layer_state.conv, layer_state.state, layer_state.ring_k, layer_state.ring_u, layer_state.ring_g)
    )
    _, num_heads, value_dim, _ = state.shape
    out = torch.zeros(num_tokens, num_heads, value_dim, dtype=torch.float64)
    for row in batch.rows():
        for head in range(num_heads):
            _run_head(step, batch, row, head, head // (num_heads // num_k_heads), out, state, (ring_k, ring_u, ring_g))
    return Written(out, conv, state, ring_k, ring_u, ring_g)


def _run_head(
    step: Step,
    batch: RecurrentBatch,
    row: Row,
    head: int,
    key_head: int,
    out: torch.Tensor,
    state: torch.Tensor,
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    ring_k, ring_u, ring_g = rings
    rank = ring_k.shape[1] // ring_g.shape[1]
    S = torch.zeros_like(state[0, head])
    if row.read_slot >= 0:
        slot = row.read_slot
        S = state[slot, head].clone()
        for entry in range(row.cursor):
            S = S * ring_g[slot, entry, head].exp()
            for at in range(rank * entry, rank * (entry + 1)):
                S = S + torch.outer(ring_u[slot, at, head], ring_k[slot, at, key_head])
    is_scanned, next_entry = row.length > batch.max_append, row.cursor
    if row.read_slot != row.write_slot:
        next_entry = 0
        if not is_scanned:
            state[row.write_slot, head] = S
    for index in range(row.length):
        out[row.first + index, head], k, u, g = step(S, row.first + index, head)
        S = S * g.exp() + u.T @ k
        if not is_scanned:
            slot, entry = row.write_slot, next_entry + index
            at = slice(rank * entry, rank * (entry + 1))
            ring_k[slot, at, key_head], ring_u[slot, at, head] = k, u
            ring_g[slot, entry, head] = g.view(ring_g.shape[3:])
        elif row.snapshot_slot >= 0 and row.start + index + 1 == row.snapshot_len:
            state[row.snapshot_slot, head] = S
    if is_scanned:
        state[row.write_slot, head] = S


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    norm_first: bool,
    group_size: int | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """weight * rms(x) * act(z) if the norm is first, else weight * rms(x * act(z)); rms over groups of a token."""
    shape, size = x.shape, group_size or x.shape[-1]
    sigmoid = 1 / (1 + torch.exp(-f64(z)))
    gate = sigmoid.flatten(1)
    if activation != "sigmoid":
        gate = gate * f64(z).flatten(1)
    values, weight = f64(x).flatten(1), f64(weight).repeat(shape[1] * shape[2] // weight.numel())
    out = torch.empty_like(values)
    for token in range(shape[0]):
        row = values[token]
        if not norm_first:
            row = row * gate[token]
        for first in range(0, len(row), size):
            group = row[first : first + size]
            normed = group / math.sqrt(float(group @ group) / size + eps)
            out[token, first : first + size] = normed * weight[first : first + size]
        if norm_first:
            out[token] *= gate[token]
    return out.view(shape)
