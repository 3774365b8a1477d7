"""Choice of keys by an indexer in PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch

from ...common.attention.latent_cache import index_keys

# Float32 products of heads and keys in memory at once: 64 MB.
_MAX_PRODUCTS = 1 << 24


def best_keys(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return int32 [num_tokens, count], the columns with the highest scores, ascending; -1 for -inf.

    Ascending, because attention to the same keys in another order has other bits.
    """
    best_scores, indices = scores.topk(count, sorted=False)
    return torch.where(best_scores > float("-inf"), indices, -1).to(torch.int32).sort().values


def choose_keys_twin(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    **_: object,
) -> torch.Tensor:
    """PyTorch implementation of `choose_keys`."""
    block_size = key_cache.shape[1]
    indices = q.new_full((len(q), min(top_k, block_table.shape[1] * block_size)), -1, dtype=torch.int32)
    for seq, ((start, stop), seq_len) in enumerate(
        zip(pairwise(cu_seqlens_q.tolist()), seq_lens.tolist(), strict=True)
    ):
        positions = torch.arange(seq_len, device=q.device)
        blocks = block_table[seq].long()[positions // block_size]
        keys = index_keys(key_cache[blocks, positions % block_size], q.shape[2])  # [L, D]
        at_once = max(1, _MAX_PRODUCTS // max(1, q.shape[1] * seq_len))
        for first in range(start, stop, at_once):
            rows = slice(first, min(first + at_once, stop))
            products = (q[rows].float() @ keys.T).relu_()  # [n, H, L]
            scores = (weights[rows, None] @ products).squeeze(1)
            ends = torch.arange(rows.start + 1, rows.stop + 1, device=q.device) + seq_len - stop
            scores.masked_fill_(positions >= ends[:, None], float("-inf"))
            best = best_keys(scores, min(indices.shape[1], seq_len))
            indices[rows, indices.shape[1] - best.shape[1] :] = best
    return indices
