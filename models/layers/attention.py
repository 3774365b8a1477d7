"""A decoder layer's attention over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from paged.errors import UnsupportedError
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.cache.qk_norm_rope_and_cache import qk_norm_rope_and_cache
from paged.kernels.core.device import backend
from paged.kernels.core.operation import Bound
from paged.kernels.layers.rms_norm import rms_norm
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.attention_options import AxesRotation, HeadGate, HeadsOption, heads_options
from paged.models.layers.config import DecoderConfig
from paged.models.layers.head_rotation import hadamard_signs, rotated
from paged.models.layers.indexer import BlockIndexer, MeanIndexer
from paged.models.layers.modules import Linear, RmsNorm, empty_parameter
from paged.models.loading.weights import Destinations, join_destinations
from paged.step.metadata import AttentionMetadata, OutputRows

if TYPE_CHECKING:
    from paged.models.lora.checkpoint import LowRank


class HeldCaches:
    """A model's caches as separate tensors on the same memory, as compilers need them.

    Inductor copies a cache before and after every write if the cache is part of a larger storage. So each plane of the
    cache (see `KvCacheTensors`) is a storage of its own. Layers of different tables can share a plane. A compiler must
    then know that a write to one layer is a write to the other: both hold the same tensor, or two views of one storage
    if their heads differ.
    """

    def __init__(self) -> None:
        # The key says which memory a tensor sees: its address, shape, strides and dtype.
        self._planes: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._caches: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the tensor to hold for a layer's cache."""
        place = cache.data_ptr(), cache.shape, cache.stride(), cache.dtype
        if place not in self._caches:
            length = cache.shape[0] * cache.stride(0)
            offset = int(cache.storage_offset()) % length
            plane = self._plane(cache, offset, length)
            self._caches[place] = plane.as_strided(cache.shape, cache.stride(), plane.storage_offset() + offset)
        return self._caches[place]

    def _plane(self, cache: torch.Tensor, offset: int, length: int) -> torch.Tensor:
        """Return, as a storage of its own, the plane of `length` elements that the cache reads from `offset` on."""
        place = cache.data_ptr() - offset * cache.itemsize, length, cache.dtype
        if place not in self._planes:
            plane = cache.as_strided((length,), (1,), cache.storage_offset() - offset)
            # The exchange goes through bytes, because some DLPack versions lack 8-bit floats.
            self._planes[place] = from_dlpack(plane.view(torch.uint8)).view(cache.dtype)
        return self._planes[place]


class Attention(nn.Module):
    """Grouped-query attention over a paged KV cache: project, norm, rotate and write, attend, project.

    Shapes: T tokens, R rows that are returned, Hq query heads, Hkv heads of keys and values, D elements of a query or
    key, Dv elements of a value. A value is its stored number times its scale; a missing scale is 1. Caches with
    scales of rows may have one more for the table.

    Attributes:
        options: changes of queries, keys and values before they are written; most models have none.
        head_weights: weights of the norms of query and key heads; None for no norm.
        axes: rotation by several positions of a token; None for one position.
        query_factors: float32 [positions, 1, 1], factors for queries by position; None for no factors.
        hadamard_signs: of rotated queries and keys, see `models/layers/head_rotation.py`; None for no such rotation.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_table_scale: torch.Tensor | None = None
    v_table_scale: torch.Tensor | None = None
    table: int
    cos_sin_cache: torch.Tensor
    head_weights: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    axes: AxesRotation | None = None
    query_factors: torch.Tensor | None = None
    hadamard_signs: torch.Tensor | None = None
    paged_attention: Callable[..., Any]

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = layer = config.attention[index]
        self.eps = config.norms.eps
        sizes = _projected_sizes(layer)
        self.sizes = list(sizes.values())
        self.q_width = sizes["q_proj"] // layer.num_heads  # elements of a head's query and gate
        if layer.fused:
            sizes = {"qkv_proj": sum(self.sizes)}
        self.qkv_proj = Linear(config.hidden_size, sizes, bias=layer.qkv_bias)
        self.o_proj = Linear(layer.num_heads * layer.v_head_dim, {"o_proj": config.hidden_size}, bias=layer.o_bias)
        self.gate_proj: HeadGate | None = None
        if layer.head_gate is not None:
            self.gate_proj = HeadGate(config.hidden_size, layer)
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if layer.qk_norm == "head":
            self.q_norm = RmsNorm(layer.head_dim, config.norms)
            if layer.shares_kv_with is None:
                self.k_norm = RmsNorm(layer.head_dim, config.norms)
        self.indexer: BlockIndexer | None = None
        if layer.block_index is not None:
            kind = BlockIndexer if layer.block_index.pool_size == 1 else MeanIndexer
            self.indexer = kind(config, layer, layer.block_index)
        self.options = cast("Sequence[HeadsOption]", nn.ModuleList(heads_options(config, index)))
        self.sinks = empty_parameter(layer.num_heads) if layer.sinks else None
        self.window_size = layer.window_size
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.qk_norm_rope_and_cache = Bound(qk_norm_rope_and_cache)
        self.paged_attention = Bound(paged_attention)
        self.chosen_attention = Bound(paged_attention)  # has arguments that others lack

    def set_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor, table: int, cos_sin_cache: torch.Tensor) -> None:
        """Give the layer its cache, the index of its block table in the metadata, and its rotary table."""
        layer, device = self.config, cos_sin_cache.device
        self.k_cache, self.v_cache = k_cache, v_cache
        self.table, self.cos_sin_cache = table, cos_sin_cache
        if layer.qk_norm == "unit":
            unit = torch.ones(layer.head_dim, device=device)
            self.head_weights = unit, unit
        elif self.q_norm is not None:
            self.head_weights = self.q_norm.weight, None
            if self.k_norm is not None:
                self.head_weights = self.q_norm.weight, self.k_norm.weight
        for option in self.options:
            option.make_constants(device)
        if layer.rope is not None and layer.rope.mrope_section:
            self.axes = AxesRotation(layer.rope, cos_sin_cache)
        if layer.query_growth is not None:
            self.query_factors = layer.query_growth.factors(len(cos_sin_cache), device)

    def rotate_keys(self, device: torch.device) -> None:
        """Rotate queries and keys of all later steps."""
        self.hadamard_signs = hadamard_signs(self.config.head_dim, device)

    @torch.no_grad()
    def rotate_values(self) -> None:
        """Fold the rotation of values into plain weights: rows of values, and columns of the output."""
        layer = self.config
        num_rows = layer.num_kv_heads * layer.v_head_dim  # the last rows of the projection are values
        v_weight = self.qkv_proj.weight[-num_rows:]
        v_weight.copy_(rotated(v_weight.T, layer.v_head_dim).T)
        if self.qkv_proj.bias is not None:
            v_bias = self.qkv_proj.bias[-num_rows:]
            v_bias.copy_(rotated(v_bias, layer.v_head_dim))
        self.o_proj.weight.copy_(rotated(self.o_proj.weight, layer.v_head_dim))

    def rotate_adapter(self, changes: dict[tuple[Linear, int], LowRank]) -> None:
        """Fold the rotation of values into an adapter's changes of parts of projections, as `rotate_values`."""
        layer = self.config
        num_rows = layer.num_kv_heads * layer.v_head_dim
        v_part = self.qkv_proj, len(self.qkv_proj.parts) - 1
        if v_part in changes:
            before, rows = changes[v_part].b[:-num_rows], changes[v_part].b[-num_rows:]  # rows: [Hkv * Dv, rank]
            b = torch.cat([before, rotated(rows.T, layer.v_head_dim).T])
            changes[v_part] = replace(changes[v_part], b=b)
        o_part = self.o_proj, 0
        if o_part in changes:
            a = rotated(changes[o_part].a, layer.v_head_dim)  # [rank, Hq * Dv]
            changes[o_part] = replace(changes[o_part], a=a)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """Return [T, hidden_size], or the rows of `outputs`; write K and V of all tokens to the cache."""
        layer, embeds = self.config, metadata.embeds
        block_table, slot_mapping = metadata.table(self.table)

        # Project.
        num_tokens = hidden.shape[0]
        parts = self.qkv_proj(hidden, metadata.lora).split_with_sizes(self.sizes, -1)
        q = parts[0].view(num_tokens, layer.num_heads, self.q_width)  # [T, Hq, D]
        k = parts[1].view(num_tokens, layer.num_kv_heads, layer.head_dim)  # [T, Hkv, D]
        # Without a `v_proj`, the values are the keys.
        v = parts[-1].view(num_tokens, layer.num_kv_heads, layer.v_head_dim)  # [T, Hkv, Dv]
        gate: torch.Tensor | None = None
        if layer.output_gate:  # the gate is the second half of each query head
            q, gate = q.chunk(2, -1)  # both [T, Hq, D]
            gate = gate.sigmoid()
        elif self.gate_proj is not None:
            gate = self.gate_proj.heads(hidden)  # [T, Hq, 1 or Dv]

        # Norm, rotate and write.
        write: Callable[..., torch.Tensor] = self.qk_norm_rope_and_cache
        rotation, rotation_rows = self.cos_sin_cache, positions
        if self.axes is not None and embeds is not None and embeds.rope_positions is not None:
            rotation, rotation_rows = self.axes.of_step(embeds, embeds.rope_positions)
            write = qk_norm_rope_and_cache  # no `Bound`: this table has another shape in every step
        for option in self.options:
            q, k, v, rotation = option(q, k, v, rotation, rotation_rows)
        q_weight, k_weight = self.head_weights
        q = write(
            q,
            k,
            v,
            self.k_cache,
            self.v_cache,
            slot_mapping,
            rotation_rows,
            rotation,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=self.eps,
            interleaved=self.interleaved,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            k_table_scale=self.k_table_scale,
            v_table_scale=self.v_table_scale,
            hadamard_signs=self.hadamard_signs,
        )  # [T, Hq, D]
        chosen_blocks: torch.Tensor | None = None
        if self.indexer is not None:
            chosen_blocks = self.indexer(hidden, positions, metadata, outputs)  # [R, Hkv, k]
        return self.attend_and_project(q, gate, positions, block_table, metadata, outputs, chosen_blocks)

    def attend_and_project(
        self,
        q: torch.Tensor,
        gate: torch.Tensor | None,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
        chosen_blocks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [R, hidden_size]: attention of rotated queries to the cache, and the projection after it.

        Args:
            q: [T, Hq, D].
            gate: [T, Hq, 1 or Dv], multiplies the heads' outputs; None for no gate.
            positions: [T].
            block_table: the block table of the layer's cache.
            chosen_blocks: int32 [R, Hkv, k], the blocks that each query sees; None for all.
        """
        layer, mask = self.config, None
        queries: AttentionMetadata | OutputRows = metadata
        if outputs is not None:
            queries, q, positions = outputs, q[outputs.rows], positions[outputs.rows]  # q: [R, Hq, D]
            if gate is not None:
                gate = gate[outputs.rows]
        if self.query_factors is not None:
            q = (q * self.query_factors[positions]).to(q.dtype)

        # Attend.
        attend = self.paged_attention
        choice: dict[str, Any] = {}
        if chosen_blocks is not None and layer.block_index is not None:
            attend = self.chosen_attention
            choice = {"chosen_blocks": chosen_blocks, "chosen_block_size": layer.block_index.block_size}
        if metadata.embeds is not None and metadata.embeds.mask is not None:
            attend, mask = paged_attention, metadata.embeds.mask  # no `Bound`: few steps have a mask
        # A compiled model cannot read the context, and is never batch-invariant.
        is_invariant = not torch.compiler.is_dynamo_compiling() and backend().is_invariant
        out = q.new_empty(*q.shape[:-1], layer.v_head_dim)  # [R, Hq, Dv]
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
            k_table_scale=self.k_table_scale,
            v_table_scale=self.v_table_scale,
            mask=mask,
            deterministic=is_invariant,
            plan=queries.plan,
            out=out,
            **choice,
        )
        if gate is not None:
            out *= gate

        # Project.
        projected: torch.Tensor = self.o_proj(out.flatten(-2), queries.lora)  # [R, hidden_size]
        return projected

    def destinations(self, prefix: str) -> Destinations:
        beside = self.qkv_proj, self.o_proj, self.gate_proj, *self.options
        parts = {"q_norm": self.q_norm, "k_norm": self.k_norm, "indexer": self.indexer, "sinks": self.sinks}
        return join_destinations(prefix, *beside, **parts)


class SharedKvAttention(Attention):
    """Attention to the keys and values of an earlier layer (Gemma 4, 2026). The layer has no keys and values itself."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        layer = self.config
        has_gate = layer.output_gate or layer.head_gate is not None
        if layer.qk_norm in ("width", "layer") or has_gate or layer.norm_after_rope:
            raise UnsupportedError(
                f"layer {index} reads K/V of layer {layer.shares_kv_with}, expected norms of heads before the rotation "
                "and no gate"
            )
        self.rms_norm, self.rotary_embedding = Bound(rms_norm), Bound(rotary_embedding, by=1)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """Return [T, hidden_size], or the rows of `outputs`."""
        q = self.qkv_proj(hidden, metadata.lora).unflatten(-1, (self.config.num_heads, -1))  # [T, Hq, D]
        q_weight, _ = self.head_weights
        if q_weight is not None:
            q = self.rms_norm(q, q_weight, self.eps)
        q, _ = self.rotary_embedding(positions, q, None, self.cos_sin_cache, interleaved=self.interleaved)
        block_table, _ = metadata.table(self.table)
        return self.attend_and_project(q, None, positions, block_table, metadata, outputs)


def _projected_sizes(layer: AttentionConfig) -> dict[str, int]:
    """Return the output sizes of the projections before attention, by name."""
    sizes = {"q_proj": layer.num_heads * layer.head_dim}
    if layer.output_gate:
        sizes["q_proj"] *= 2  # a head's gate stands beside its query
    if layer.shares_kv_with is None:
        sizes["k_proj"] = layer.num_kv_heads * layer.head_dim
        if not layer.k_eq_v:
            sizes["v_proj"] = layer.num_kv_heads * layer.v_head_dim
    return sizes
