"""A decoder layer's attention over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.cache.qk_norm_rope_and_cache import qk_norm_rope_and_cache
from paged.kernels.common.operation import Bound
from paged.kernels.layers.rms_norm import rms_norm
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.metadata import AttentionMetadata, EmbeddedRows, OutputRows
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder import Linear, RmsNorm, empty_parameter
from paged.models.layers.rope import rope_axes
from paged.models.loading.weights import WeightSlots


class HeldCaches:
    """A model's caches as separate tensors on the same memory, which suits compilers.

    Inductor copies a cache before and after every write if it is part of a larger storage. So each slot of the cache
    (see `KvCacheTensors`) is a storage of its own. If layers of different tables share a slot, a compiler must know
    that a write to one is a write to the other: they hold one tensor, or two views of one storage if their heads
    differ.
    """

    def __init__(self) -> None:
        # Keys say which memory a tensor sees: its address, shape, strides and dtype.
        self._slots: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._caches: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the tensor to hold for a layer's cache."""
        place = cache.data_ptr(), cache.shape, cache.stride(), cache.dtype
        if place not in self._caches:
            length = cache.shape[0] * cache.stride(0)
            offset = int(cache.storage_offset()) % length
            slot = self._slot(cache, offset, length)
            self._caches[place] = slot.as_strided(cache.shape, cache.stride(), slot.storage_offset() + offset)
        return self._caches[place]

    def _slot(self, cache: torch.Tensor, offset: int, length: int) -> torch.Tensor:
        """Return the slot of `length` elements in which the cache begins at `offset`, as a storage of its own."""
        place = cache.data_ptr() - offset * cache.itemsize, length, cache.dtype
        if place not in self._slots:
            slot = cache.as_strided((length,), (1,), cache.storage_offset() - offset)
            # As bytes: some DLPack versions lack 8-bit floats.
            self._slots[place] = from_dlpack(slot.view(torch.uint8)).view(cache.dtype)
        return self._slots[place]


class Attention(nn.Module):
    """Grouped-query attention over a paged KV cache.

    Values are the stored ones times the scales; a missing scale is 1. int8 caches have a scale per row. mean_of_ranks:
    averages a tensor over ranks in place, if all have equal parts of the heads.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    table: int
    cos_sin_cache: torch.Tensor
    rope_axes: torch.Tensor | None = None
    unit_weight: torch.Tensor | None = None
    query_factors: torch.Tensor | None = None
    mean_of_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    paged_attention: Callable[..., Any]

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = layer = config.attention[index]
        self.eps = config.norms.eps
        q_size, k_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        has_k = layer.shares_kv_with is None
        sizes = {
            "q_proj": 2 * q_size if layer.output_gate else q_size,
            **({"k_proj": k_size} if has_k else {}),
            **({"v_proj": layer.num_kv_heads * layer.v_head_dim} if has_k and not layer.k_eq_v else {}),
        }
        self.sizes = list(sizes.values())
        parts = {"qkv_proj": sum(self.sizes)} if layer.fused else sizes
        self.qkv_proj = Linear(config.hidden_size, parts, bias=layer.qkv_bias)
        self.o_proj = Linear(layer.num_heads * layer.v_head_dim, {"o_proj": config.hidden_size}, bias=layer.o_bias)
        widths = {"head": (layer.head_dim, layer.head_dim), "width": (q_size, k_size)}
        q_width, k_width = widths.get(layer.qk_norm or "", (0, 0))
        self.q_norm = RmsNorm(q_width, config.norms) if q_width else None
        self.k_norm = RmsNorm(k_width, config.norms) if k_width and has_k else None
        self.sinks = empty_parameter(layer.num_heads) if layer.sinks else None
        # A window of W tokens is the token itself and W - 1 before it.
        self.window_size = (-1, -1) if layer.window is None else (layer.window - 1, -1)
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.rms_norm, self.rotary_embedding = Bound(rms_norm), Bound(rotary_embedding, by=1)
        self.qk_norm_rope_and_cache, self.paged_attention = Bound(qk_norm_rope_and_cache), Bound(paged_attention)

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, table: int, cos_sin_cache: torch.Tensor) -> None:
        """Give the layer its cache, the index of its block table in the metadata, and its rotary table."""
        self.k_cache, self.v_cache = k_cache, v_cache
        self.table, self.cos_sin_cache, device = table, cos_sin_cache, cos_sin_cache.device
        if self.config.rope is not None and self.config.rope.mrope_section:
            self.rope_axes = rope_axes(self.config.rope).to(device)
        if self.config.qk_norm == "unit" or self.config.v_norm:
            self.unit_weight = torch.ones(self.config.head_dim, device=device)
        if (growth := self.config.query_growth) is not None:
            self.query_factors = growth.factors(len(cos_sin_cache), device)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """Return [num_tokens, hidden_size], or the rows of `outputs`; write K and V of all tokens to the cache."""
        layer, queries, embeds = self.config, metadata if outputs is None else outputs, metadata.embeds
        mask = None if embeds is None else embeds.mask
        block_table, slot_mapping = metadata.table(self.table)
        q, *kv = self.qkv_proj(hidden, metadata.lora).split_with_sizes(self.sizes, -1)
        keys, values = kv[:1], kv[-1:]
        if layer.qk_norm == "width":
            q, *keys = self._norm_width(q, *keys)
        q = q.unflatten(-1, (layer.num_heads, -1))
        q_weight = k_weight = self.unit_weight if layer.qk_norm == "unit" else None
        if layer.qk_norm == "head":
            assert self.q_norm is not None
            q_weight, k_weight = self.q_norm.weight, None if self.k_norm is None else self.k_norm.weight
        if layer.output_gate:
            q, gate = q.chunk(2, -1)
        if keys:
            k, v = keys[0].unflatten(-1, (-1, layer.head_dim)), values[0].unflatten(-1, (-1, layer.v_head_dim))
            if layer.v_norm and self.unit_weight is not None:
                v = self.rms_norm(v, self.unit_weight, self.eps)
            rotation = self.cos_sin_cache
            write: Callable[..., torch.Tensor] = self.qk_norm_rope_and_cache
            if embeds is not None and embeds.rope_positions is not None:
                # Bound to tables of another shape.
                (rotation, positions), write = self._rotation(embeds), self.qk_norm_rope_and_cache.operation
            if layer.norm_after_rope:
                q, k = self.rotary_embedding(positions, q, k, rotation, interleaved=self.interleaved)
                rotation = rotation[:, :0]
            q = write(
                q,
                k,
                v,
                self.k_cache,
                self.v_cache,
                slot_mapping,
                positions,
                rotation,
                q_weight=q_weight,
                k_weight=k_weight,
                eps=self.eps,
                interleaved=self.interleaved,
                k_scale=self.k_scale,
                v_scale=self.v_scale,
            )
        else:
            q = q if q_weight is None else self.rms_norm(q, q_weight, self.eps)
            q, _ = self.rotary_embedding(positions, q, None, self.cos_sin_cache, interleaved=self.interleaved)
        if outputs is not None:
            q, positions = q[outputs.rows], positions[outputs.rows]
        if self.query_factors is not None:
            q = (q * self.query_factors[positions]).to(q.dtype)
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)
        # Bound without a mask, which only some steps with embeddings have.
        attend = self.paged_attention if mask is None else paged_attention
        attend(
            q,
            self.k_cache,
            self.v_cache,
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            max_seqlen_q=queries.max_seqlen_q,
            softmax_scale=layer.softmax_scale,
            causal=mask is None,
            window_size=self.window_size,
            attention_chunk_size=layer.chunk_size or 0,
            softcap=layer.softcap,
            sinks=self.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            mask=mask,
            plan=queries.plan,
            out=out,
        )
        if layer.output_gate:
            out *= (gate if outputs is None else gate[outputs.rows]).sigmoid()
        projected: torch.Tensor = self.o_proj(out.flatten(-2), queries.lora)
        return projected

    def _rotation(self, embeds: EmbeddedRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for each token of a step with several axes, and each token's row there."""
        rope, axes = embeds.rope_positions, self.rope_axes
        assert rope is not None
        assert axes is not None
        key = id(self.cos_sin_cache)
        if key not in embeds.rotations:
            columns = torch.arange(len(axes), device=rope.device)
            rows = torch.arange(rope.shape[1], device=rope.device)
            embeds.rotations[key] = self.cos_sin_cache[rope[axes].T, columns].contiguous(), rows
        return embeds.rotations[key]

    def _norm_width(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Normalise queries, and keys if given, over all heads of all ranks, with one all-reduce."""
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        if self.mean_of_ranks is None:
            return [norm(x)[0] for norm, x in zip(norms, parts, strict=True)]
        wide = [x.float() for x in parts]
        means = self.mean_of_ranks(torch.stack([x.square().mean(-1, keepdim=True) for x in wide]))
        return [
            (x * (mean + self.eps).rsqrt() * norm.weight).to(part.dtype)
            for x, mean, norm, part in zip(wide, means, norms, parts, strict=True)
        ]

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = self.qkv_proj.weight_slots(prefix) | self.o_proj.weight_slots(prefix)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                slots |= norm.weight_slots(f"{prefix}.{name}")
        if self.sinks is not None:
            slots[f"{prefix}.sinks"] = self.sinks
        return slots
