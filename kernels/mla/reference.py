"""Latent attention in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import math

import torch

from ..common.reference import f64


def numbers(kv_cache: torch.Tensor, k_scale: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers that a latent cache stands for; uint8 is the published fp8 form."""
    if kv_cache.dtype != torch.uint8:
        if k_scale is None:
            return f64(kv_cache)
        return f64(kv_cache) * f64(k_scale)
    rows = kv_cache.cpu().contiguous()
    codes, scales = rows[..., :512].view(torch.float8_e4m3fn), rows[..., 512:528].view(torch.float32)
    scale_of = torch.arange(512) // 128
    return torch.cat([f64(codes) * f64(scales)[..., scale_of], f64(rows[..., 528:].view(torch.bfloat16))], -1)


def paged_mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    v_head_dim: int,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_mla_attention`'s out and lse, one row and one head at a time.

    values: [num_blocks, block_size, v_head_dim] in place of the cache's latents.
    """
    q, cache, block_size = f64(q), numbers(kv_cache, k_scale), kv_cache.shape[1]
    values = cache[..., :v_head_dim] if values is None else f64(values)
    num_tokens, num_heads, _ = q.shape
    out = q.new_zeros(num_tokens, num_heads, v_head_dim)
    lse = torch.full((num_heads, num_tokens), -math.inf, dtype=torch.float64)
    offsets, lengths, table = cu_seqlens_q.tolist(), seq_lens.tolist(), block_table.tolist()
    for seq, seq_len in enumerate(lengths):
        for row in range(offsets[seq], offsets[seq + 1]):
            position = seq_len - offsets[seq + 1] + row
            end = seq_len
            if causal:
                end = min(position + 1, seq_len)
            keys = list(range(end))
            if indices is not None:
                keys = [key for key in indices[row].tolist() if 0 <= key < end]
            slots = [(table[seq][key // block_size], key % block_size) for key in keys]
            places = tuple(torch.tensor(slots, dtype=torch.int64).view(-1, 2).T)
            for head in range(num_heads):
                scores = cache[places] @ q[row, head] * softmax_scale
                if sinks is not None:
                    scores = torch.cat([scores, f64(sinks)[head : head + 1]])
                if len(scores):
                    lse[head, row] = torch.logsumexp(scores, 0)
                    out[row, head] = torch.exp(scores[: len(keys)] - lse[head, row]) @ values[places]
    return out, lse


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> list[torch.Tensor]:
    """The scores of every token and the keys that it sees, in the order of `choose_keys`' formula."""
    keys, block_size, head_dim = key_cache.cpu(), key_cache.shape[1], q.shape[2]
    if keys.dtype == torch.uint8:
        codes, scales = keys[..., :head_dim].contiguous(), keys[..., head_dim:].contiguous()
        wide = f64(codes.view(torch.float8_e4m3fn)) * f64(scales.view(torch.float32))
    else:
        wide = f64(keys)
    q, weights, offsets, table = f64(q), f64(weights), cu_seqlens_q.tolist(), block_table.tolist()
    keys_of_token = [torch.zeros(0, dtype=torch.float64)] * len(q)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        for row in range(offsets[seq], offsets[seq + 1]):
            end = seq_len - offsets[seq + 1] + row + 1
            seen = [wide[table[seq][key // block_size], key % block_size] for key in range(end)]
            keys_of_token[row] = torch.tensor(
                [float(weights[row] @ (q[row] @ key).clamp(min=0)) for key in seen], dtype=torch.float64
            )
    return keys_of_token


def choose_keys(
    q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, *, top_k: int, **sequences: torch.Tensor
) -> torch.Tensor:
    """`choose_keys`, each row in ascending order."""
    scores = index_scores(q, weights, key_cache, **sequences)
    count = min(top_k, sequences["block_table"].shape[1] * key_cache.shape[1])
    indices = torch.full((len(q), count), -1, dtype=torch.int32)
    for row, scores_of_row in enumerate(scores):
        best = scores_of_row.argsort(descending=True)[:count].sort().values.int()
        indices[row, count - len(best) :] = best
    return indices
