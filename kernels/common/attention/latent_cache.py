"""What a cache of latents holds: one row a token, the latent and its rotated dimensions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged.kernels.common.attention.tile import MAX_HEAD_DIM
from paged.kernels.common.cache_kinds import cache_kind
from paged.kernels.common.checks import check_last_dim_contiguous, check_tensor
from paged.kernels.common.errors import InvalidInputError

# A row of the published fp8 form (FlashMLA, vLLM's "fp8_ds_mla"): 512 e4m3 latents, a float32 scale for each 128 of
# them, 64 bfloat16 rotated dimensions.
PACKED_BYTES, PACKED_LATENT, PACKED_ROPE, PACKED_GROUP = 656, 512, 64, 128


def latent_kind(kv_cache: torch.Tensor) -> str:
    """Return the kind of a latent cache: one of `cache_kinds`, or "packed" for the published fp8 form."""
    return "packed" if kv_cache.dtype == torch.uint8 else cache_kind(kv_cache.dtype)


class LatentParts(NamedTuple):
    """Views of a latent cache: [num_blocks, block_size, size] each.

    rope: int16 bits of bfloat16 in the published fp8 form. scales: float32, of that form alone.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor | None


def latent_parts(kv_cache: torch.Tensor, v_head_dim: int) -> LatentParts:
    """Return the parts of a cache that `check_latent_cache` accepts."""
    if kv_cache.dtype != torch.uint8:
        return LatentParts(kv_cache[..., :v_head_dim], kv_cache[..., v_head_dim:], None)
    start = PACKED_BYTES - 2 * PACKED_ROPE
    scales = kv_cache[..., PACKED_LATENT:start].view(torch.float32)
    return LatentParts(kv_cache[..., :PACKED_LATENT], kv_cache[..., start:].view(torch.int16), scales)


def check_latent_cache(kv_cache: torch.Tensor, v_head_dim: int, dtype: torch.dtype) -> int:
    """Return a row's numbers, latent and rotated dimensions together.

    Raises:
        InvalidInputError: the cache is none for queries or latents of `dtype`.
    """
    allowed = (dtype, torch.float8_e4m3fn, torch.uint8)
    check_tensor("kv_cache", kv_cache, ("num_blocks", "block_size", "latent + rope"), allowed)
    check_last_dim_contiguous("kv_cache", kv_cache)
    if kv_cache.shape[1] == 0:
        raise InvalidInputError("kv_cache: block_size 0, expected at least 1")
    size = kv_cache.shape[2]
    if kv_cache.dtype == torch.uint8:
        if (size, v_head_dim) != (PACKED_BYTES, PACKED_LATENT):
            raise InvalidInputError(
                f"kv_cache: {size} bytes a token and v_head_dim {v_head_dim}, expected {PACKED_BYTES} and "
                f"{PACKED_LATENT} of a uint8 cache"
            )
        if kv_cache.data_ptr() % 4 or any(stride % 4 for stride in kv_cache.stride()[:2]):
            raise InvalidInputError(f"kv_cache: strides {kv_cache.stride()}, expected multiples of 4 bytes")
        return PACKED_LATENT + PACKED_ROPE
    rope = size - v_head_dim
    if not 16 <= v_head_dim <= MAX_HEAD_DIM or v_head_dim % 16:
        raise InvalidInputError(f"v_head_dim: {v_head_dim}, expected a multiple of 16 from 16 to {MAX_HEAD_DIM}")
    if rope < 0 or rope % 16 or rope > MAX_HEAD_DIM:
        raise InvalidInputError(
            f"kv_cache: {size} numbers a token, expected v_head_dim {v_head_dim} and a multiple of 16 up to "
            f"{MAX_HEAD_DIM}"
        )
    return size


def dequantized(rows: torch.Tensor, v_head_dim: int, k_scale: torch.Tensor | None) -> torch.Tensor:
    """Return rows of a latent cache as float32 [..., latent + rope]."""
    if rows.dtype != torch.uint8:
        return rows.float() if k_scale is None else rows.float() * k_scale
    latent, rope, scales = latent_parts(rows, v_head_dim)
    assert scales is not None
    numbers = latent.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, PACKED_GROUP)) * scales.unsqueeze(-1)
    return torch.cat([numbers.flatten(-2), rope.view(torch.bfloat16).float()], -1)
