"""Cache writes in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.common.id_checks import check_ids_on_host


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Twin of `kernels.cache.reshape_and_cache`."""
    slots, block_size = slot_mapping, k_cache.shape[1]
    if len(slots) == 0:
        return
    least, most = slots.aminmax()  # one pass for what is skipped and what is refused
    last_slot = k_cache.shape[0] * block_size - 1
    if int(most) > last_slot:
        check_ids_on_host("slot_mapping", slots, None, last_slot)
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
