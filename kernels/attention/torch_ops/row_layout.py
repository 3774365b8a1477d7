"""How caches lie in rows of one width, so that attention on a CPU reads others' layouts as it reads its own."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged.kernels.attention.call import AttentionCall


class RowLayout(NamedTuple):
    """Rows as wide as a key, and as a value, of which the caches have every one or, interleaved, every other.

    So [num_blocks, block_size, num_kv_heads, 2 * head_dim] is read as two matrices, whichever way its dimensions are
    ordered: gathering takes 1.0 to 1.4 times as long as from a contiguous cache, by indices of blocks and positions
    2.3 to 7 times.

    steps: how many rows two blocks, two positions and two heads are apart, the same for keys and values.
    """

    steps: tuple[int, int, int]
    block_size: int
    num_kv_heads: int

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of all heads at slots [n, L]: int64 [n, num_kv_heads, L]."""
        block_step, position_step, head_step = self.steps
        rows = slots // self.block_size * block_step + slots % self.block_size * position_step
        return rows.unsqueeze(1) + torch.arange(self.num_kv_heads, device=slots.device)[:, None] * head_step

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """The cache's memory from its first element to its last: [num_rows, head_dim], contiguous."""
        last = sum((size - 1) * step for size, step in zip(cache.shape[:3], self.steps, strict=True))
        return cache.as_strided((last + 1, cache.shape[3]), (cache.shape[3], 1))


def row_layout(call: AttentionCall) -> RowLayout | None:
    """None where the caches are not such rows: with values narrower than the keys beside them, or empty ones."""
    caches = call.k_cache, call.v_cache
    strides = [(cache.stride(0), cache.stride(1), cache.stride(2), cache.shape[3]) for cache in caches]
    k_steps, v_steps = ((block // width, position // width, head // width) for block, position, head, width in strides)
    is_whole = all(stride % width == 0 for *steps, width in strides for stride in steps)
    if k_steps != v_steps or not is_whole or not call.k_cache.numel():
        return None
    return RowLayout(k_steps, *call.k_cache.shape[1:3])
