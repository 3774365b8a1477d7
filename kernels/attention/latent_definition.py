"""Latent attention and an indexer's choice of keys or blocks as formulas; see `kernels.layers.definition`.

Sequences run one after another. Queries are cut so that memory stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from ..cache.latent_cache import dequantized, index_cache_parts, index_numbers
from .definition import attend

# Most scores, or numbers of chosen keys, in memory at once: 64 MB in float32.
_MAX_NUMBERS = 1 << 24


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
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(softmax_scale * q k) @ v, [num_tokens, H, v_head_dim], and the log-sum-exps, [H, num_tokens].

    k is a cached latent with its rotated part, v its first v_head_dim numbers. indices: the keys that a query may see.
    """
    num_tokens, num_heads, head_dim = q.shape
    out = torch.zeros(num_tokens, num_heads, v_head_dim, dtype=compute, device=q.device)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=compute, device=q.device)
    if sinks is not None:
        sinks = sinks.to(compute)
        lse[: int(cu_seqlens_q[-1])] = sinks  # also of rows that see no key
    # Chosen keys are gathered for each query.
    numbers_per_key, num_keys = (num_heads, None) if indices is None else (num_heads + head_dim, indices.shape[1])
    for queries in _queries(cu_seqlens_q, seq_lens, numbers_per_key, num_keys):
        rows = queries.rows
        starts, ends = _visible_range(queries, causal, window_size)  # [n]
        if indices is None:
            keys = torch.arange(max(0, int(starts[0])), max(0, int(ends[-1])), device=q.device)  # [L]
            visible = (keys >= starts[:, None]) & (keys < ends[:, None])  # [n, L]
        else:
            keys = indices[rows].long()  # [n, L]
            visible = (keys >= 0) & (keys < ends[:, None])
            keys = keys.where(visible, 0)
        if visible.any():
            stored = _rows(kv_cache, block_table[queries.seq], keys)
            latents = dequantized(stored, k_scale, compute)  # [L, D] or [n, L, D]
            scores = q[rows].to(compute) @ latents.transpose(-1, -2) * softmax_scale  # [n, H, L]
            scores.masked_fill_(~visible[:, None], -math.inf)
            out[rows], lse[rows] = attend(scores, latents[..., :v_head_dim], sinks)
    return out, lse.T


def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pool_size: int = 1,
    candidates: torch.Tensor | None = None,
    candidate_size: int = 1,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the top_k keys of each query by the scores sum_h weights[h] max(q[h] k, 0), int32, as `best_keys`.

    A key is that of a pool of positions, and a query sees the closed ones, or those in blocks of candidate_size keys.
    """
    num_tokens, num_heads, head_dim = q.shape
    key_parts = index_cache_parts(key_cache, head_dim)
    count, numbers_per_key = min(top_k, block_table.shape[1] * key_parts[0].shape[1]), num_heads
    if candidates is not None:
        count = min(top_k, candidates.shape[1] * candidate_size)
        numbers_per_key += candidates.shape[1]
    indices = torch.full((num_tokens, count), -1, dtype=torch.int32, device=q.device)
    for queries in _queries(cu_seqlens_q, seq_lens, numbers_per_key):
        rows, num_keys = queries.rows, queries.seq_len // pool_size
        keys = torch.arange(num_keys, device=q.device)  # [L]
        wide_keys = _index_rows(key_parts, block_table[queries.seq], keys, compute)  # [L, D]
        products = (q[rows].to(compute) @ wide_keys.T).relu_()  # [n, H, L]
        scores = (weights[rows, None].to(compute) @ products).squeeze(1)  # [n, L]
        scores.masked_fill_(keys >= (queries.positions[:, None] + 1) // pool_size, -math.inf)
        if candidates is not None:
            is_candidate = (keys // candidate_size == candidates[rows, :, None]).any(1)  # [n, L]
            scores.masked_fill_(~is_candidate, -math.inf)
        best = best_keys(scores, min(count, num_keys))
        indices[rows, count - best.shape[1] :] = best
    return indices


def best_keys(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return int32 [num_tokens, count], the columns with the highest scores, ascending; -1 for -inf.

    Ascending, because attention to the same keys in another order has other bits.
    """
    best_scores, indices = scores.topk(count, sorted=False)
    return torch.where(best_scores > float("-inf"), indices, -1).to(torch.int32).sort().values


def choose_blocks(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    chosen_block_size: int,
    weights: torch.Tensor | None = None,
    pool_size: int = 1,
    reduction: str = "max",
    local_blocks: int = 1,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the blocks of positions with the best scores of an indexer, int32 [num_tokens, lists, columns], ascending.

    A head's score of a key is q k, and each head has a list; with weights, one list has the scores
    sum_h weights[h] max(q[h] k, 0). A block's score is the largest or the mean of its visible keys.
    """
    num_tokens, num_heads, head_dim = q.shape
    key_parts = index_cache_parts(key_cache, head_dim)
    num_lists = num_heads
    if weights is not None:
        num_lists = 1
    keys_per_block = chosen_block_size // pool_size
    most_blocks = -(-block_table.shape[1] * key_cache.shape[1] // keys_per_block)
    num_columns = min(block_columns(top_k, pool_size, local_blocks), most_blocks)
    chosen = torch.full((num_tokens, num_lists, num_columns), -1, dtype=torch.int32, device=q.device)
    for queries in _queries(cu_seqlens_q, seq_lens, num_heads):
        rows, ends = queries.rows, (queries.positions + 1)[:, None]  # [n, 1], one past the query
        num_keys = queries.seq_len // pool_size
        num_blocks = -(-queries.seq_len // chosen_block_size)
        shape = num_blocks, keys_per_block
        padding = num_blocks * keys_per_block - num_keys
        keys = torch.arange(num_keys, device=q.device)  # [L]
        wide_keys = _index_rows(key_parts, block_table[queries.seq], keys, compute)  # [L, D]
        scores = q[rows].to(compute) @ wide_keys.T  # [n, H, L]
        if weights is not None:
            scores = weights[rows, None].to(compute) @ scores.relu_()  # [n, 1, L]
        scores = functional.pad(scores, (0, padding)).unflatten(2, shape)  # [n, lists, blocks, keys]
        visible = functional.pad(keys < ends // pool_size, (0, padding)).unflatten(1, shape)[:, None]
        if reduction == "max":
            scores = scores.masked_fill(~visible, -math.inf).amax(-1)  # [n, lists, blocks]
        else:
            scores = scores.masked_fill(~visible, 0.0).sum(-1) / visible.sum(-1)
            scores.masked_fill_(~visible.any(-1), -math.inf)
        blocks = torch.arange(num_blocks, device=q.device)
        own_block = (ends - 1) // chosen_block_size  # [n, 1], the query's block
        is_open = (ends % pool_size > 0) & (local_blocks == 0)  # [n, 1]
        is_local = (blocks > own_block - local_blocks) | (is_open & (blocks == own_block))
        is_forced = (blocks <= own_block) & is_local  # [n, blocks]
        scores.masked_fill_(is_forced[:, None], math.inf)
        best, ids = scores.sort(dim=-1, descending=True, stable=True)  # of equal scores, the lowest id is the first
        listed = listed_blocks(ids, best > -math.inf, is_open, top_k)[..., :num_columns]
        chosen[rows, :, : listed.shape[2]] = listed
    return chosen.sort(-1).values


def block_columns(top_k: int, pool_size: int, local_blocks: int) -> int:
    """Return the blocks that a query may choose: one more than top_k if its block may have an open pool."""
    if pool_size > 1 and local_blocks == 0:
        return top_k + 1
    return top_k


def listed_blocks(ids: torch.Tensor, is_block: torch.Tensor, is_open: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return int32 ids, best first, and -1 for those that are none or behind the last that a query may choose.

    ids, is_block: [n, lists, blocks]. is_open: bool [n, 1], whether a query chooses its block besides the top_k.
    """
    place = torch.arange(ids.shape[-1], device=ids.device)
    is_chosen = is_block & (place < top_k + is_open.long())[:, None]
    return torch.where(is_chosen, ids, -1).to(torch.int32)


class _Queries(NamedTuple):
    """Consecutive queries of a sequence. positions: int64 [n]."""

    seq: int
    seq_len: int
    rows: slice
    positions: torch.Tensor


def _queries(
    cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, numbers_per_key: int, num_keys: int | None = None
) -> Iterator[_Queries]:
    """Yield all queries, in pieces whose numbers fit into _MAX_NUMBERS.

    num_keys: of each query; None for all keys of its sequence.
    """
    offsets, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for seq, (start, stop) in enumerate(pairwise(offsets)):
        seq_len = lengths[seq]
        at_once = max(1, _MAX_NUMBERS // max(1, numbers_per_key * (num_keys or seq_len)))
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            positions = torch.arange(first, last, device=seq_lens.device) + seq_len - stop
            yield _Queries(seq, seq_len, slice(first, last), positions)


def _visible_range(queries: _Queries, causal: bool, window_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and one past the last key that each query sees, int64 [n]."""
    positions, (window_left, window_right) = queries.positions, window_size
    starts, ends = torch.zeros_like(positions), torch.full_like(positions, queries.seq_len)
    if window_left >= 0:
        starts = (positions - window_left).clamp(min=0)
    if window_right >= 0:
        ends = ends.minimum(positions + window_right + 1)
    if causal:
        ends = ends.minimum(positions + 1)
    return starts, ends


def _rows(cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sequence's keys, [*keys.shape, size]. blocks: the sequence's row of the table."""
    block_size = cache.shape[1]
    codes = cache
    if cache.element_size() == 1:  # not every 8-bit dtype can be indexed
        codes = cache.view(torch.uint8)
    return codes[blocks[keys // block_size].long(), keys % block_size].view(cache.dtype)


def _index_rows(
    key_parts: tuple[torch.Tensor, torch.Tensor | None], blocks: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a sequence's indexer keys as numbers, [*keys.shape, head_dim]. blocks: as in `_rows`."""
    numbers, scales = key_parts
    if scales is not None:
        scales = _rows(scales, blocks, keys)
    return index_numbers(_rows(numbers, blocks, keys), scales, dtype)
