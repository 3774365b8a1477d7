"""Cache writes in PyTorch."""

from __future__ import annotations

import torch

from ...common.cache_kinds import SMALLEST
from ...common.checks import NARROW_DTYPES
from ...common.fp8 import as_kernel_argument
from ...common.id_checks import check_ids_on_host
from ...common.torch_ops.rows import rms_norm, rotary_embedding


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """PyTorch implementation of `kernels.cache.reshape_and_cache`."""
    slots = slot_mapping
    if len(slots) == 0:
        return
    num_blocks, block_size = k_cache.shape[:2]
    last_slot = num_blocks * block_size - 1
    lowest, highest = slots.aminmax()  # one pass for what is skipped and what is refused
    if int(highest) > last_slot:
        check_ids_on_host("slot_mapping", slots, None, last_slot)
    if int(lowest) < 0:
        rows = (slots >= 0).nonzero().squeeze(1)
        key, value, slots = key[rows], value[rows], slots[rows]
    for source, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        if scale is None and cache.dtype not in NARROW_DTYPES:
            written = [(cache, source.to(cache.dtype))]
        else:
            stored, row_scales = cast_to_cache(source, scale, cache.dtype)
            # As bytes: not every device indexes 8-bit floats.
            written = [(as_kernel_argument(cache), as_kernel_argument(stored))]
            if scale is not None and row_scales is not None:
                written.append((scale, row_scales))
        for target, rows in written:
            if target.is_contiguous():
                target.flatten(0, 1).index_copy_(0, slots, rows)
            else:
                target[slots // block_size, slots % block_size] = rows


def qk_norm_rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch implementation of `kernels.cache.qk_norm_rope_and_cache`: float32 inside, each result rounded once."""
    wide = torch.cat((q, k), 1).float()
    wide_q, wide_k = wide.split((q.shape[1], k.shape[1]), 1)
    if q_weight is not None and k_weight is not None:
        rms_norm(wide_q, q_weight, eps, out=wide_q)
        rms_norm(wide_k, k_weight, eps, out=wide_k)
    rotary_embedding(positions, wide, None, cos_sin_cache, interleaved=interleaved)
    reshape_and_cache(wide_k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q.copy_(wide_q)


def cast_to_cache(
    rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows [..., num_kv_heads, head_dim] in the cache's dtype, divided by their heads' scale.

    8-bit floats saturate. With int8 rows are divided by their own scales, which are returned too: float32 [...,
    num_kv_heads].
    """
    if dtype == torch.int8:
        wide = rows.float()
        largest, not_finite = wide.abs().amax(-1), (wide * 0.0).sum(-1)
        inverse = 127.0 / largest.clamp(min=SMALLEST)
        values = (wide * inverse.unsqueeze(-1)).round().clamp(-127, 127).to(dtype)
        return values, largest / 127.0 + not_finite
    if scale is not None:
        rows = rows.float() * scale.reciprocal().unsqueeze(-1)
    if dtype in NARROW_DTYPES:
        limit = torch.finfo(dtype).max
        rows = rows.clamp(-limit, limit)
    return rows.to(dtype), None
