"""Cache writes in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.cache.write import CacheWrite
from paged.kernels.common.id_checks import check_ids_on_host


def reshape_and_cache(write: CacheWrite) -> None:
    """PyTorch implementation of `kernels.cache.reshape_and_cache`."""
    key, value, k_cache, v_cache, slots, k_scale, v_scale = write
    if len(slots) == 0:
        return
    block_size = k_cache.shape[1]
    least, most = slots.aminmax()  # one pass for what is skipped and what is refused
    if int(most) > write.slots.high:
        check_ids_on_host(*write.slots)
    if int(least) < 0:
        rows = (slots >= 0).nonzero().squeeze(1)
        key, value, slots = key[rows], value[rows], slots[rows]
    for source, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        stored = scaled_cast(source, scale, cache.dtype)
        if cache.dtype == torch.float8_e4m3fn:  # bytes, as not every device has indexing of 8-bit floats
            cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
        if cache.is_contiguous():
            cache.flatten(0, 1).index_copy_(0, slots, stored)
        else:
            cache[slots // block_size, slots % block_size] = stored


def scaled_cast(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """rows [..., num_kv_heads, head_dim] divided by their heads' scale, in the cache's dtype, e4m3 saturated."""
    if scale is not None:
        rows = rows.float() * scale.reciprocal().unsqueeze(-1)
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        rows = rows.clamp(-largest, largest)
    return rows.to(dtype)
