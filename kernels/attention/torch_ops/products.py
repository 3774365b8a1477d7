"""The two matrix products of attention on a CPU, over gathered keys and values or in the cache."""

from __future__ import annotations

import torch

from paged.kernels.attention.call import AttentionCall
from paged.kernels.attention.torch_ops.batches import RowLayout, SequenceBatch


class GatheredProducts:
    """Matrix products of a group's queries with gathered keys and values, for n sequences of Q queries and L keys.

    `keys` and `values` are [n, Hkv, L, D] and [n, Hkv, L, Dv] of `dtype`.
    """

    def __init__(self, call: AttentionCall, batch: SequenceBatch, dtype: torch.dtype = torch.float32) -> None:
        self.softmax_scale = call.softmax_scale
        self.keys, self.values = (
            _gather(cache, batch, batch.layout).to(dtype) for cache in (call.k_cache, call.v_cache)
        )
        k_scale, v_scale = call.row_scales
        if k_scale is not None and v_scale is not None:
            self.keys *= _gather(k_scale.unsqueeze(-1), batch, None)
            self.values *= _gather(v_scale.unsqueeze(-1), batch, None)

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Return scaled scores, float32 [n, Hq, Q, D] -> [n, Hq, Q, L]."""
        num_queries = queries.shape[2]
        grouped = queries.unflatten(1, (self.keys.shape[1], -1)).flatten(2, 3)  # [n, Hkv, G * Q, D]
        scores = (grouped @ self.keys.transpose(-1, -2)).mul_(self.softmax_scale)
        return scores.unflatten(2, (-1, num_queries)).flatten(1, 2)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weighted sums of values, float32 [n, Hq, Q, L] -> [n, Hq, Q, Dv]."""
        num_queries = weights.shape[2]
        attended = weights.unflatten(1, (self.values.shape[1], -1)).flatten(2, 3) @ self.values
        return attended.unflatten(2, (-1, num_queries)).flatten(1, 2)


class ProductsInPlace:
    """The same products by PyTorch's sparse operations, which read the cache by indices.

    Scores are a matrix product sampled at the pairs of a query and its keys. Weighted sums of values are an embedding
    bag.
    """

    def __init__(self, call: AttentionCall, pairs: torch.Tensor, layout: RowLayout) -> None:
        self.softmax_scale, self.pairs = call.softmax_scale, pairs
        self.k_rows, self.v_rows = layout.rows(call.k_cache), layout.rows(call.v_cache)

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        rows = queries.reshape(-1, queries.shape[-1])
        sampled = torch.sparse.sampled_addmm(self.pairs, rows, self.k_rows.T, beta=0.0, alpha=self.softmax_scale)
        return sampled.values().view(*queries.shape[:3], -1)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = torch.embedding_bag(
            self.v_rows,
            self.pairs.col_indices(),
            self.pairs.crow_indices(),
            per_sample_weights=weights.flatten(),
            include_last_offset=True,
        )[0]
        return attended.view(*weights.shape[:3], -1)


def _gather(cache: torch.Tensor, batch: SequenceBatch, layout: RowLayout | None) -> torch.Tensor:
    """Return gathered rows of a cache, [n, Hkv, L, D]."""
    slots, block_size = batch.slots, cache.shape[1]
    if layout is not None and not cache.is_contiguous():
        index = batch.cache_rows
        return layout.rows(cache).index_select(0, index.flatten()).view(*index.shape, -1)
    if cache.is_contiguous():
        rows = cache.flatten(0, 1).index_select(0, slots.flatten())
    else:
        rows = cache[slots // block_size, slots % block_size]
    return rows.view(*slots.shape, *cache.shape[2:]).transpose(1, 2)
