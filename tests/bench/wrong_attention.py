"""Paged attention as strangers write it, each with one mistake."""

from typing import Any

import torch

import paged

_RIGHT = paged.paged_attention


def next_key(*, window_size: tuple[int, int] = (-1, -1), **call: Any) -> Any:
    """Each query also sees the key after it."""
    return _RIGHT(**call | {"causal": False, "window_size": (window_size[0], 1)})


def wrong_scale(*, q: torch.Tensor, **call: Any) -> Any:
    return _RIGHT(q, **call | {"softmax_scale": 1 / q.shape[2]})


def stale_block(*, block_table: torch.Tensor, k_cache: torch.Tensor, seq_lens: torch.Tensor, **call: Any) -> Any:
    """The last sequence's last block is the one that was there before."""
    stale = block_table.clone()
    last = -(-int(seq_lens[-1]) // k_cache.shape[1]) - 1
    stale[-1, last] = stale[-1, 0]
    return _RIGHT(k_cache=k_cache, block_table=stale, seq_lens=seq_lens, **call)


def int32_offsets(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Decode steps and chunks without any option; a block's offset is computed in 32 bits."""

    def elements(cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(cache[0].numel(), dtype=torch.int32)
        starts = block_ids * torch.tensor(cache.stride(0)).to(torch.int32)
        storage = cache.as_strided((cache.untyped_storage().nbytes() // cache.element_size(),), (1,), 0)
        places = starts[:, None] + offsets + cache.storage_offset()
        return storage[places.long()].view(-1, *cache.shape[2:]).float()

    out, group = torch.zeros_like(q), q.shape[1] // k_cache.shape[2]
    for seq, (first, last) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), strict=False)):
        seq_len = int(seq_lens[seq])
        block_ids = block_table[seq, : -(-seq_len // k_cache.shape[1])]
        keys, values = (elements(cache, block_ids)[:seq_len] for cache in (k_cache, v_cache))
        for row in range(first, last):
            visible = seq_len - (last - row) + 1
            for head in range(q.shape[1]):
                scores = keys[:visible, head // group] @ q[row, head].float() * q.shape[2] ** -0.5
                out[row, head] = torch.softmax(scores, 0) @ values[:visible, head // group]
    return out
