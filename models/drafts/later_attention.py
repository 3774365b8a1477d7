"""Attention of draft heads, which does not see position 0: it has no input there, see `head`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paged.kernels.cache.latent_cache import dequantized
from paged.kernels.core.dtypes import as_kernel_argument, kv_kind
from paged.models.families.decoder_layer import DecoderLayer
from paged.models.layers.attention import Attention
from paged.models.layers.config import DecoderConfig
from paged.models.layers.latent_attention import LatentAttention
from paged.step.metadata import AttentionMetadata


class LaterAttention(Attention):
    """Attention that does not see position 0."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self._whole_attention, self.paged_attention = self.paged_attention, self._attend_from_1

    def _attend_from_1(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, out: torch.Tensor, **options: Any
    ) -> None:
        _, lse = self._whole_attention(q, k_cache, v_cache, **options, out=out, return_lse=True)
        blocks = _first_blocks(len(q), options)
        keys = _first_rows(k_cache, options["k_scale"], blocks, options["k_table_scale"])
        values = _first_rows(v_cache, options["v_scale"], blocks, options["v_table_scale"])
        _leave_out(out, lse, q, keys, values, options["softmax_scale"])


class LaterLatentAttention(LatentAttention):
    """Latent attention that does not see position 0."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self._whole_attention, self.attend = self.attend, self._attend_from_1

    def _split(self, metadata: AttentionMetadata) -> None:
        """Expand no latents, because expanded attention sees position 0."""

    def _attend_from_1(self, q: torch.Tensor, kv_cache: torch.Tensor, *, out: torch.Tensor, **options: Any) -> None:
        _, lse = self._whole_attention(q, kv_cache, **options, out=out, return_lse=True)
        blocks = _first_blocks(len(q), options)
        rows = kv_cache[:, 0].view(torch.uint8)[blocks].view(kv_cache.dtype)  # [T, latent + rope], or bytes of records
        keys = dequantized(rows, options["k_scale"]).unsqueeze(1)  # [T, 1, latent + rope]
        _leave_out(out, lse, q, keys, keys[..., : out.shape[2]], options["softmax_scale"])


def _first_blocks(num_tokens: int, options: Mapping[str, Any]) -> torch.Tensor:
    """Return the first block of each token's sequence."""
    offsets: torch.Tensor = options["cu_seqlens_q"]
    first: torch.Tensor = options["block_table"][:, 0].long()
    rows = torch.arange(num_tokens, device=first.device)
    return first[torch.searchsorted(offsets[1:], rows, right=True).clamp_(max=len(first) - 1)]


def _leave_out(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> None:
    """Remove the share of one key per token from `out`, the attention over this key and others.

    If w is the weight of its value v, (out - w v) / (1 - w) is the softmax over the other keys.

    keys, values: float32 [num_tokens, num_kv_heads, size].
    """
    queries = q.float().unflatten(1, (keys.shape[1], -1))
    scores = (queries * keys[:, :, None]).sum(-1).mul_(scale)
    weights = (scores.flatten(1) - lse.T).exp_()[..., None]
    values = values.repeat_interleave(queries.shape[2], 1)
    out.copy_((out - weights * values) / (1 - weights).clamp_(min=1e-6))


def _first_rows(
    cache: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, table_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the first rows of blocks in float32, multiplied by their scales, [n, num_kv_heads, head_dim]."""
    kind = kv_kind(cache.dtype)
    rows = cache[:, 0].view(torch.uint8)[blocks].view(cache.dtype)
    row_scales = None
    if kind.has_scales:
        assert scale is not None
        row_scales = as_kernel_argument(scale)[blocks, 0].view(scale.dtype)
        scale = table_scale
    numbers = kind.decode(rows, row_scales, torch.float32)
    if scale is None:
        return numbers
    return numbers * scale.expand(cache.shape[2])[:, None]


class HeadLayer(DecoderLayer):
    """A decoder layer whose attention does not see position 0."""

    attention_class, latent_class = LaterAttention, LaterLatentAttention
