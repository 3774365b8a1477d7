"""Writes to a latent cache in PyTorch."""

from __future__ import annotations

import torch

from ...common.attention.latent_cache import PACKED_GROUP
from ...common.cache_kinds import SMALLEST
from ...common.fp8 import as_kernel_argument
from ...common.id_checks import check_ids_on_host
from ...common.torch_ops.rows import rms_norm, rotary_embedding
from .reshape_and_cache import cast_to_cache


def concat_and_cache_mla(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """PyTorch implementation of `kernels.cache.concat_and_cache_mla`."""
    num_blocks, block_size = kv_cache.shape[:2]
    check_ids_on_host("slot_mapping", slot_mapping, None, num_blocks * block_size - 1)
    if kv_cache.dtype == torch.uint8:
        stored = _packed(latent, k_rope)
    else:
        rows = torch.cat([latent, k_rope], 1)
        stored = as_kernel_argument(cast_to_cache(rows, scale, kv_cache.dtype)[0])
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[written]
    as_kernel_argument(kv_cache)[slots // block_size, slots % block_size] = stored[written]


def mla_norm_rope_and_cache(
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    latent_weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch implementation of `mla_norm_rope_and_cache`: float32 inside, each result rounded once."""
    wide = rms_norm(latent.float(), latent_weight, eps)
    rotated = torch.cat([q_rope, k_rope.unsqueeze(1)], 1).float()
    rotary_embedding(positions, rotated, None, cos_sin_cache, interleaved=interleaved)
    concat_and_cache_mla(wide, rotated[:, -1], kv_cache, slot_mapping, scale)
    return q_rope.copy_(rotated[:, :-1])


def _packed(latent: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Return rows of the published fp8 form, uint8 [num_tokens, 656]."""
    groups = latent.float().unflatten(1, (-1, PACKED_GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST)
    codes = (groups * (448.0 / largest)).clamp_(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    scales = (largest / 448.0).squeeze(-1) + (groups * 0.0).sum(-1)
    return torch.cat([part.view(torch.uint8) for part in (codes, scales, k_rope.to(torch.bfloat16).contiguous())], 1)
