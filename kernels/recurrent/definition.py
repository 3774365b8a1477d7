"""Recurrent layers as formulas; see `kernels.layers.definition` for what a definition is.

Unlike other definitions they write their state, in place and in its dtype. With a state in float64 everything is exact.
Scans run one sequence after another, in chunks, because single tokens would take too long for prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from .metadata import CHUNK_SIZE, RecurrentBatch, RecurrentState, Rings, Row

# Tokens of a chunk if each channel of a key has its own decay: the decays between all pairs of tokens are in memory.
CHANNEL_CHUNK_SIZE = 16


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: RecurrentState,
    batch: RecurrentBatch,
    *,
    activation: str | None = "silu",
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return sum_j weight[:, j] x[t - W + 1 + j] + bias, then silu, [num_tokens, channels].

    Inputs before the start of a sequence are 0.
    """
    conv = state.conv
    before = weight.shape[1] - 1
    taps = weight.to(compute).unbind(1)  # W of [channels]
    out = torch.zeros(x.shape, dtype=compute, device=x.device)
    for row in batch.rows():
        tokens = slice(row.first, row.first + row.length)
        history = conv.new_zeros(before, x.shape[1])
        if row.read_slot >= 0:
            history = conv[row.read_slot, row.cursor : row.cursor + before]
        inputs = torch.cat([history, x[tokens].to(conv.dtype)])  # [W - 1 + length, channels]
        total = out[tokens]
        if bias is not None:
            total += bias.to(compute)
        for tap in range(before + 1):
            total += inputs[tap : tap + row.length].to(compute) * taps[tap]
        if activation is not None:
            total.copy_(functional.silu(total))
        if row.length > batch.max_append:
            conv[row.write_slot, :before] = inputs[row.length :]
            if row.snapshot_slot >= 0:
                taken = row.snapshot_len - row.start
                conv[row.snapshot_slot, :before] = inputs[taken : taken + before]
        elif row.write_slot == row.read_slot:
            end = before + row.cursor
            conv[row.write_slot, end : end + row.length] = inputs[before:]
        else:
            conv[row.write_slot, : before + row.length] = inputs
    return out


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
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """S <- S exp(g); u = beta (v - S k); S <- S + u k^T; return S q, [num_tokens, HV, V] (Yang et al., 2024).

    q and k have length 1, and q is divided by sqrt(K). g is a number of a head, or of a head and channel of K. With
    erase vectors, S <- S exp(g) + (S erase_read) erase_write^T + v k^T, and q and k are used as they are.
    """
    rings = state.rings()
    _, num_heads, value_dim, key_dim = rings.state.shape
    sizes = [num_k_heads * key_dim, num_k_heads * key_dim, num_heads * value_dim]
    q, k, v = mixed.to(compute).split(sizes, 1)
    q = q.unflatten(1, (num_k_heads, key_dim))  # [num_tokens, HK, K], as k
    k = k.unflatten(1, (num_k_heads, key_dim))
    v = v.unflatten(1, (num_heads, value_dim))
    g = _log_decay(a.to(compute), A_log.to(compute), dt_bias.to(compute), lower_bound)
    if g.dim() == 2:
        g = g.unsqueeze(-1)  # [num_tokens, HV, 1], or K in place of 1
    if erase_read is not None and erase_write is not None:
        removed = -erase_read.to(compute)
        zeros = torch.zeros_like(removed), torch.zeros_like(v), torch.zeros_like(g)
        return _run(
            _Rows(
                q=q,
                keys=_alternating(erase_write.to(compute), k),
                values=_alternating(zeros[1], v),
                erase=_alternating(removed, zeros[0]),
                g=_alternating(g, zeros[2]),
                rank=2,
            ),
            rings,
            batch,
        )
    assert b is not None
    q, k = _normalised(q, eps) * key_dim**-0.5, _normalised(k, eps)
    beta = beta_scale * b.to(compute).sigmoid().unsqueeze(-1)  # [num_tokens, HV, 1]
    return _run(_Rows(q, keys=k, values=beta * v, erase=beta * _of_value_heads(k, v), g=g), rings, batch)


def _log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Return the logarithm of each token's decay, [num_tokens, HV] or [num_tokens, HV, K], as a."""
    rate = A_log.exp().view(-1, *[1] * (a.dim() - 2))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * (a + dt_bias))
    return -rate * functional.softplus(a + dt_bias, threshold=40)


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
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """S <- exp(dt A) S + (dt x) B^T; return S C + D x, [num_tokens, HV, V], with A = -exp(A_log) (Dao and Gu, 2024)."""
    rings = state.rings()
    _, num_heads, value_dim, key_dim = rings.state.shape
    x, B, C = mixed.to(compute).split([num_heads * value_dim, num_groups * key_dim, num_groups * key_dim], 1)
    x = x.unflatten(1, (num_heads, value_dim))
    B, C = B.unflatten(1, (num_groups, key_dim)), C.unflatten(1, (num_groups, key_dim))
    delta = functional.softplus(dt.to(compute) + dt_bias.to(compute), threshold=40)  # [num_tokens, HV]
    if dt_limits is not None:
        delta = delta.clamp(*dt_limits)
    g = -delta * A_log.to(compute).exp()
    rows = _Rows(q=C, keys=B, values=delta.unsqueeze(-1) * x, erase=None, g=g.unsqueeze(-1))
    return _run(rows, rings, batch) + D.to(compute)[:, None] * x


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    norm_first: bool,
    group_size: int | None = None,
    activation: str = "silu",
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return weight * rms(x) * act(z) if the norm is first, else weight * rms(x * act(z)).

    rms divides by the root mean square of a group of a token's values; x, z: [num_tokens, num_heads, size].
    """
    gate = torch.sigmoid(z.to(compute))
    if activation == "silu":
        gate = gate * z.to(compute)
    values = x.to(compute)
    if not norm_first:
        values = values * gate
    groups = values.flatten(1)  # [num_tokens, num_heads * size]
    groups = groups.unflatten(1, (-1, group_size or x.shape[-1]))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed = normed.flatten(1).unflatten(1, (-1, weight.numel())) * weight.to(compute)
    normed = normed.view(x.shape)
    if norm_first:
        normed = normed * gate
    return normed


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class _Rows(NamedTuple):
    """What a scan reads: each row makes S exp(g) S + u keys^T, with u = values - S erase.

    A token has `rank` rows and reads S behind the last one. If there are two, the first one erases: it reads S before
    its decay, and the second one has g = 0.
    """

    q: torch.Tensor  # [num_tokens, HK, K]
    keys: torch.Tensor  # [rank num_tokens, HK, K]
    values: torch.Tensor  # [rank num_tokens, HV, V]
    erase: torch.Tensor | None  # [rank num_tokens, HV, K]; None for zeros
    g: torch.Tensor  # [rank num_tokens, HV, 1 or K]
    rank: int = 1


def _alternating(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the rows of two tensors in turn."""
    return torch.stack([first, second], 1).flatten(0, 1)


def _run(rows: _Rows, rings: Rings, batch: RecurrentBatch) -> torch.Tensor:
    num_tokens, (num_heads, value_dim), rank = len(rows.q), rows.values.shape[1:], rows.rank
    out = rows.values.new_zeros(num_tokens, num_heads, value_dim)
    chunk_size = CHUNK_SIZE
    if rows.g.shape[2] > 1:
        chunk_size = CHANNEL_CHUNK_SIZE
    for row in batch.rows():
        tokens = slice(row.first, row.first + row.length)
        S = state_at(row, rings, out.dtype)
        if row.length > batch.max_append:
            # The first chunk ends at the next multiple of the chunk size.
            first = chunk_size - row.start % chunk_size
            for start in range(first - chunk_size, row.length, chunk_size):
                part = slice(row.first + max(start, 0), row.first + min(start + chunk_size, row.length))
                S, out[part], _ = _chunk(S, part, rows)
                if row.snapshot_slot >= 0 and row.start + start + chunk_size == row.snapshot_len:
                    rings.write_state(row.snapshot_slot, S)
            rings.write_state(row.write_slot, S)
            continue
        base = row.cursor
        if row.write_slot != row.read_slot:
            rings.write_state(row.write_slot, S)
            base = 0
        _, out[tokens], u = _chunk(S, tokens, rows)
        of_tokens = slice(rank * tokens.start, rank * tokens.stop)
        entries = row.write_slot, slice(rank * base, rank * (base + row.length))
        rings.k[entries], rings.u[entries] = rows.keys[of_tokens], u
        decays = rings.g[row.write_slot, base : base + row.length]
        decays.copy_(rows.g[of_tokens][::rank].view_as(decays))
    return out


def state_at(row: Row, rings: Rings, compute: torch.dtype) -> torch.Tensor:
    """Return S [HV, V, K] at the position that a row reads."""
    if row.read_slot < 0:
        return torch.zeros_like(rings.state[0], dtype=compute)
    S = rings.read_state(row.read_slot, compute)
    if row.cursor == 0:
        return S
    rank = rings.rank
    entries = row.read_slot, slice(0, rank * row.cursor)
    g = rings.g[row.read_slot, : row.cursor].to(compute)
    g = g.view(row.cursor, len(S), -1).cumsum(0)  # [cursor, HV, 1 or K]
    u = rings.u[entries].to(compute)
    keys = _of_value_heads(rings.k[entries].to(compute), u)
    keys = keys * (g[-1] - g).exp().repeat_interleave(rank, 0)
    return S * g[-1].exp().unsqueeze(1) + torch.einsum("thv,thk->hvk", u, keys)


def _of_value_heads(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(v.shape[1] // x.shape[1], 1)


def _chunk(S: torch.Tensor, tokens: slice, rows: _Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return S after the tokens, their outputs and the u of their rows: the chunked form of Yang et al. (2024)."""
    rank = rows.rank
    part = slice(rank * tokens.start, rank * tokens.stop)
    u, g = rows.values[part], rows.g[part]
    q, keys = _of_value_heads(rows.q[tokens], u), _of_value_heads(rows.keys[part], u)
    sums = g.double().cumsum(0)  # [R, HV, 1 or K]; float32 differences of sums near -1,000 would be off by 6e-5
    if rows.erase is not None:
        erase, sums_before = rows.erase[part], sums
        if rank == 2:
            sums_before = sums - g
        scaled = _decayed_products(erase, keys, sums_before, sums).tril(-1)
        seen = torch.einsum("hvk,thk->htv", S, erase * sums_before.to(g.dtype).exp())
        u = torch.linalg.solve_triangular(scaled, u.transpose(0, 1) - seen, upper=False, unitriangular=True)
        u = u.transpose(0, 1)
    of_outputs = sums[rank - 1 :: rank]
    products = _decayed_products(q, keys, of_outputs, sums)
    out = torch.einsum("hvk,thk->thv", S, q * of_outputs.to(g.dtype).exp()) + torch.einsum("hij,jhv->ihv", products, u)
    keys = keys * (sums[-1] - sums).to(g.dtype).exp()
    S = S * sums[-1].to(g.dtype).exp().unsqueeze(1) + torch.einsum("thv,thk->hvk", u, keys)
    return S, out, u


def _decayed_products(
    x: torch.Tensor,  # [N, HV, K]
    keys: torch.Tensor,  # [R, HV, K]; R / N rows for each row of x
    sums_of_x: torch.Tensor,  # float64 [N, HV, 1 or K]
    sums: torch.Tensor,  # float64 [R, HV, 1 or K]
) -> torch.Tensor:
    """Return sum_c x_i[c] keys_j[c] exp(sums_of_x_i[c] - sums_j[c]), [HV, N, R]; 0 for keys after x."""
    rank = len(keys) // len(x)
    is_later = torch.arange(len(keys), device=x.device) // rank > torch.arange(len(x), device=x.device).unsqueeze(1)
    between = sums_of_x.transpose(0, 1).unsqueeze(2) - sums.transpose(0, 1).unsqueeze(1)  # [HV, N, R, 1 or K]
    between = between.masked_fill(is_later.unsqueeze(-1), -torch.inf)  # later keys could overflow
    decay = between.to(x.dtype).exp()
    if decay.shape[3] == 1:
        return decay.squeeze(3) * torch.einsum("ihk,jhk->hij", x, keys)
    return torch.einsum("ihk,jhk,hijk->hij", x, keys, decay)
