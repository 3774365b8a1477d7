"""Attention in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import math

import torch

from ..common.reference import f64


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool | torch.Tensor = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    attention_chunk_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention`'s out and lse, one row and one head at a time."""
    q, k_cache, v_cache = f64(q), f64(k_cache), f64(v_cache)
    if k_scale is not None:
        k_cache = k_cache * f64(k_scale)[..., None]
    if v_scale is not None:
        v_cache = v_cache * f64(v_scale)[..., None]
    num_tokens, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim)
    if isinstance(causal, bool):
        is_causal = [causal] * len(seq_lens)
    else:
        is_causal = causal.tolist()
    window_left, window_right = window_size
    out = q.new_zeros(num_tokens, num_q_heads, v_cache.shape[3])
    lse = torch.full((num_q_heads, num_tokens), -math.inf, dtype=torch.float64)
    offsets, lengths, table = cu_seqlens_q.tolist(), seq_lens.tolist(), block_table.tolist()
    for seq, seq_len in enumerate(lengths):
        first, last = offsets[seq], offsets[seq + 1]
        slots = [(table[seq][j // block_size], j % block_size) for j in range(seq_len)]
        for row in range(first, last):
            position = seq_len - (last - first) + (row - first)
            low, high = 0, seq_len
            if window_left >= 0:
                low = max(low, position - window_left)
            if window_right >= 0:
                high = min(high, position + window_right + 1)
            if is_causal[seq]:
                high = min(high, position + 1)
            new = seq_len - (last - first)  # position of the first query
            keys = [j for j in range(low, high) if mask is None or j < new or mask[row, j - new]]
            if attention_chunk_size:
                keys = [j for j in keys if j // attention_chunk_size == position // attention_chunk_size]
            blocks = torch.tensor([slots[j][0] for j in keys], dtype=torch.int64)
            offs = torch.tensor([slots[j][1] for j in keys], dtype=torch.int64)
            for head in range(num_q_heads):
                scores = k_cache[blocks, offs, head // group] @ q[row, head] * softmax_scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores -= float(alibi_slopes[head]) * (position - torch.tensor(keys, dtype=torch.float64)).abs()
                if sinks is not None:
                    scores = torch.cat([scores, f64(sinks)[head : head + 1]])
                if len(scores):
                    lse[head, row] = torch.logsumexp(scores, 0)
                    weights = torch.exp(scores - lse[head, row])
                    out[row, head] = weights[: len(keys)] @ v_cache[blocks, offs, head // group]
    return out, lse


def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attn_states` by its formula."""
    out_a, lse_a, out_b, lse_b = f64(out_a), f64(lse_a), f64(out_b), f64(lse_b)
    lse_a, lse_b = (torch.where(lse == math.inf, -math.inf, lse) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse == -math.inf, 0.0, torch.exp(part_lse - lse))
        out += torch.where(weight.T.unsqueeze(-1) == 0, 0.0, weight.T.unsqueeze(-1) * part)
    return out, lse
