"""The checked arguments of one paged attention call, as both implementations take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from paged.kernels.common.attention.mask import NO_LIMIT as NO_LIMIT


class AttentionCall(NamedTuple):
    """Arguments of `kernels.attention.paged_attention.paged_attention`, checked, with defaults filled in.

    Attributes:
        window: positions that a query sees left and right of its own; NO_LIMIT for all. Causal is 0 on the right.
        chunk_size: `attention_chunk_size`; 0 for no limit.
        is_causal: bool [num_seqs]; True sets the right window of that sequence to 0.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    is_causal: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    mask: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    softmax_scale: float
    window: tuple[int, int]
    chunk_size: int
    softcap: float
    deterministic: bool

    @property
    def head_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """k_scale and v_scale for each head, [], [1] or [num_kv_heads]; None if each row has its own."""
        return (None, None) if self.k_cache.dtype == torch.int8 else (self.k_scale, self.v_scale)

    @property
    def row_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """k_scale and v_scale for each row, [num_blocks, block_size, num_kv_heads]; None unless the cache is int8."""
        return (self.k_scale, self.v_scale) if self.k_cache.dtype == torch.int8 else (None, None)

    @property
    def shares_cache(self) -> bool:
        """Whether v_cache is a view of k_cache from its first element on, so that a key begins with its value."""
        k_cache, v_cache = self.k_cache, self.v_cache
        is_view = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
        return is_view and v_cache.shape[3] <= k_cache.shape[3]

    @property
    def num_products(self) -> Callable[[Mapping[str, Any]], int]:
        """A function that counts the multiplications of one query of each sequence, from `seq_lens` on the host."""
        of_a_key = self.q.shape[1] * (self.q.shape[2] + self.v_cache.shape[3])
        return lambda given: int(given["seq_lens"].sum()) * of_a_key
