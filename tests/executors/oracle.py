"""PagedAttentionExecutors, whose answers are known in closed form, and what to ask them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paged.batch import DecodeInput, PrefillInput, UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.executors.paged_attention_executor import PagedAttentionExecutor, PagedExecutorConfig


def make_executor(
    device: torch.device,
    *,
    num_blocks: int = 32,
    block_size: int = 8,
    max_seq_len: int | None = None,
    num_swap_blocks: int = 0,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> PagedAttentionExecutor:
    """An executor over a cache of its own; `sizes` go to its configuration."""
    config = PagedExecutorConfig(**sizes)
    cache = PagedKvCacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        device=device,
        max_seq_len=max_seq_len,
        num_swap_blocks=num_swap_blocks,
    )
    return PagedAttentionExecutor(config, PagedKvCacheManager(cache))


def prompt(*rows: Sequence[int], **fields: Any) -> PrefillInput:
    """A prefill of rows of equal length."""
    return PrefillInput(torch.tensor(rows), **fields)


def step(handle: KvCacheHandle | Sequence[KvCacheHandle], *tokens: int, **fields: Any) -> DecodeInput:
    """A decode of one token a sequence."""
    return DecodeInput(torch.tensor(tokens)[:, None], handle, **fields)


def batch(*items: UnifiedBatchItem) -> UnifiedBatch:
    """A batch of these items."""
    return UnifiedBatch(list(items))
