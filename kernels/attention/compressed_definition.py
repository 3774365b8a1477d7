"""Attention over a window and compressed entries as a formula; see `kernels.layers.definition`."""

from __future__ import annotations

import math

import torch

from ..cache.latent_cache import stored_rows
from .definition import attend
from .latent_definition import _queries


def paged_compressed_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    entry_cache: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    sliding_window: int,
    entry_table: torch.Tensor | None = None,
    pool_size: int = 1,
    indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(softmax_scale * q k) @ k, [num_tokens, H, D], and the log-sum-exps, [H, num_tokens].

    k are the rows of the last `sliding_window` positions and the entries of closed pools, or those of `indices`.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=compute, device=q.device)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=compute, device=q.device)
    if sinks is not None:
        sinks = sinks.to(compute)
        lse[: int(cu_seqlens_q[-1])] = sinks  # also of rows that see no key
    offsets = torch.arange(1 - sliding_window, 1, device=q.device)  # [W]
    num_entries = 0
    if indices is not None:
        num_entries = indices.shape[1]
    elif entry_cache is not None and len(seq_lens):
        num_entries = int(seq_lens.max()) // pool_size
    for queries in _queries(cu_seqlens_q, seq_lens, num_heads + head_dim, sliding_window + num_entries):
        rows, positions = queries.rows, queries.positions[:, None]  # [n, 1]
        keys = positions + offsets  # [n, W]
        visible = keys >= 0
        numbers = _numbers(kv_cache, block_table[queries.seq], keys, visible, compute)  # [n, W, D]
        if entry_cache is not None:
            assert entry_table is not None
            entries = torch.arange(queries.seq_len // pool_size, device=q.device).expand(len(keys), -1)  # [n, E]
            if indices is not None:
                entries = indices[rows].long()
            is_seen = (entries >= 0) & (entries < (positions + 1) // pool_size)
            entry_numbers = _numbers(entry_cache, entry_table[queries.seq], entries, is_seen, compute)
            numbers = torch.cat([numbers, entry_numbers], 1)  # [n, W + E, D]
            visible = torch.cat([visible, is_seen], 1)
        scores = q[rows].to(compute) @ numbers.transpose(-1, -2) * softmax_scale  # [n, H, W + E]
        scores.masked_fill_(~visible[:, None], -math.inf)
        attended, lse[rows] = attend(scores, numbers, sinks)
        if cos_sin_cache is not None:
            _rotate_back(attended, queries.positions.clamp(min=0), cos_sin_cache)
        out[rows] = attended
    return out, lse.T


def _numbers(
    cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """Return the numbers of keys [n, L] of a sequence, [n, L, D]; 0 if they are not visible."""
    block_size = cache.shape[1]
    seen = keys[visible]  # [m]
    stored = cache[blocks[seen // block_size].long(), seen % block_size]
    rows = stored_rows(stored, compute)  # [m, D]
    numbers = torch.zeros(*keys.shape, rows.shape[-1], dtype=compute, device=cache.device)
    numbers[visible] = rows
    return numbers


def _rotate_back(out: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Rotate the last rotary_dim numbers of heads [n, H, D] by the negative angles of their positions, in place."""
    cos, sin = cos_sin_cache[positions].to(out.dtype).unsqueeze(1).chunk(2, -1)  # [n, 1, rotary_dim / 2]
    pairs = out[..., out.shape[-1] - cos_sin_cache.shape[1] :].unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    pairs.copy_(torch.stack([a * cos + b * sin, b * cos - a * sin], -1))
