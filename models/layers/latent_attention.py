"""A decoder layer's latent attention (MLA) over a paged cache of latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paged.kernels.attention.paged_mla_attention import paged_mla_attention
from paged.kernels.cache.concat_and_cache_mla import mla_norm_rope_and_cache
from paged.kernels.core.operation import Bound
from paged.kernels.cpu.recording import recording
from paged.kernels.layers.linear import linear
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.layers.attention_config import LatentConfig
from paged.models.layers.attention_options import HeadGate, LogPositionGrowth
from paged.models.layers.config import DecoderConfig, NormConfig
from paged.models.layers.expanded_latents import AbsorbedPart, Split, attend_expanded, split_step
from paged.models.layers.indexer import HiddenIndexer, Indexer, PooledIndexer
from paged.models.layers.modules import Linear, RmsNorm, empty_parameter
from paged.models.loading.weights import Destinations, join_destinations
from paged.models.quantization.layouts import Layout, Quantization, Widened
from paged.models.quantization.packed_weights import UnpackedProjection
from paged.step.metadata import AttentionMetadata, OutputRows

Queries = AttentionMetadata | OutputRows | AbsorbedPart


class UpProjection(Linear):
    """A projection whose weights are read as matrices, one for each head or group of heads.

    They are plain: packed weights of a checkpoint are unpacked while they load.
    """

    layout: Layout | None = None

    def quantize(self, prefix: str, quantization: Quantization) -> None:
        """Unpack the weights of projection `prefix`.name while they load, if the checkpoint packs them."""
        (name,) = self._names(prefix)
        layout = quantization.common_layout([name])
        if isinstance(layout, Widened):  # plain for every projection
            super().quantize(prefix, quantization)
            return
        self.layout = layout
        if self.layout is not None:
            self.layout.check(name, len(self.weight), self.in_features)

    def pack(self, dtype: torch.dtype) -> None:
        """Keep the order of the weights."""

    def round_to(self, form: str) -> None:
        """Keep the weights."""

    def matrices(self, num_heads: int) -> torch.Tensor:
        """Return a view of the weights, [num_heads, rows of a head, in_features]."""
        return self.weight.view(num_heads, -1, self.in_features)

    def destinations(self, prefix: str) -> Destinations:
        if self.layout is None:
            return super().destinations(prefix)
        (name,) = self._names(prefix)
        destinations: Destinations = {}
        for end, destination in UnpackedProjection(self.layout, self.weight).destinations().items():
            destinations[f"{name}.{end}"] = destination
        return destinations


class LatentAttention(nn.Module):
    """Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): a token's latent is the key and value of all heads.

    A head's key is the up-projection of the latent, followed by rotated dimensions that all heads share. Queries absorb
    the up-projection of keys, so that they meet latents directly. The result then takes the up-projection of values.
    A layer with `shares_kv_with` reads the latents of an earlier layer with its own up-projections.

    Shapes: T tokens, R rows that are returned, H heads; rank, nope, rope and v as in `LatentConfig`.
    """

    kv_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None  # unused: a latent has one scale, the `k_scale`
    table: int
    cos_sin_cache: torch.Tensor
    up: torch.Tensor
    query_factors: torch.Tensor | None = None
    attend: Callable[..., Any]

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = layer = config.attention[index]
        assert layer.latent is not None
        self.sizes = sizes = layer.latent
        norms = NormConfig(eps=sizes.eps)
        hidden, q_head_size = config.hidden_size, sizes.nope_dim + sizes.rope_dim
        if layer.output_gate:
            q_head_size += sizes.v_head_dim  # a head's gate stands behind its query
        q_size = layer.num_heads * q_head_size
        self.down_sizes: dict[str, int] = {}
        self.q_b_proj: Linear | None = None
        if sizes.q_rank is None:
            self.q_proj = Linear(hidden, {"q_proj": q_size})
        else:
            self.down_sizes["q_a_proj"] = sizes.q_rank
            q_inputs = sizes.q_rank
            if sizes.reads_both:
                q_inputs *= 2
            self.q_b_proj = Linear(q_inputs, {"q_b_proj": q_size})
            self.q_norm = RmsNorm(sizes.q_rank, replace(norms, factor=sizes.q_factor))
        self.kv_norm: RmsNorm | None = None
        self.rope_norm: RmsNorm | None = None
        if layer.shares_kv_with is None:
            self.down_sizes["kv_a_proj_with_mqa"] = sizes.rank + sizes.rope_dim
            self.kv_norm = RmsNorm(sizes.rank, replace(norms, factor=sizes.kv_factor))
            if sizes.norms_rope:
                self.rope_norm = RmsNorm(sizes.rope_dim, norms)
        self.down_proj: Linear | None = None
        if self.down_sizes:
            self.down_proj = Linear(hidden, self.down_sizes, bias=layer.qkv_bias)
        self.indexer = _indexer(hidden, sizes)
        self.growth: LogPositionGrowth | None = None
        if sizes.learned_growth:
            self.growth = LogPositionGrowth(layer.num_heads)
        self.gate_proj: HeadGate | None = None
        if layer.head_gate is not None:
            self.gate_proj = HeadGate(hidden, layer)
        self.sinks = empty_parameter(layer.num_heads) if layer.sinks else None
        head_size = sizes.nope_dim + sizes.v_head_dim
        self.kv_b_proj = UpProjection(sizes.rank, {"kv_b_proj": layer.num_heads * head_size})
        self.o_proj = Linear(layer.num_heads * sizes.v_head_dim, {"o_proj": hidden}, bias=layer.o_bias)
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.write, self.attend = Bound(mla_norm_rope_and_cache), Bound(paged_mla_attention)
        self.rotate = Bound(rotary_embedding, by=1)

    def set_cache(self, k_cache: torch.Tensor, v_cache: torch.Tensor, table: int, cos_sin_cache: torch.Tensor) -> None:
        """Give the layer its cache, the index of its block table in the metadata, and its rotary table."""
        self.kv_cache, self.table, self.cos_sin_cache = k_cache.squeeze(2), table, cos_sin_cache
        if self.kv_cache.shape[2] != self.sizes.rank + self.sizes.rope_dim:
            self.kv_cache = self.kv_cache.view(torch.uint8)  # records
        if (growth := self.config.query_growth) is not None:
            self.query_factors = growth.factors(len(cos_sin_cache), cos_sin_cache.device)

    def derive_from_weights(self) -> None:
        """Read the up-projection as matrices; call it when the weights are at their final addresses."""
        self.up = self.kv_b_proj.matrices(self.config.num_heads)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """Return [T, hidden_size], or the rows of `outputs`; write latents of all tokens to the cache."""
        sizes = self.sizes
        block_table, slot_mapping = metadata.table(self.table)

        # Project.
        down: dict[str, torch.Tensor] = {}
        if self.down_proj is not None:
            parts = self.down_proj(hidden).split_with_sizes(list(self.down_sizes.values()), -1)
            down = dict(zip(self.down_sizes, parts, strict=True))
        q_latent = hidden
        if self.q_b_proj is None:
            q = self.q_proj(hidden, metadata.lora)
        else:
            q_latent, _ = self.q_norm(down["q_a_proj"])  # [T, q_rank]
            q_input = q_latent
            if sizes.reads_both:
                q_input = torch.cat([q_latent, down["q_a_proj"]], -1)  # [T, 2 * q_rank]
            q = self.q_b_proj(q_input)
        q = q.unflatten(-1, (self.config.num_heads, -1))  # [T, H, nope + rope], or with a gate of v behind it
        gate: torch.Tensor | None = None
        if self.config.output_gate:
            q, gate = q.split((sizes.nope_dim + sizes.rope_dim, sizes.v_head_dim), -1)

        # Norm, rotate and write. The rotated part of queries changes in place.
        q_rope = q[..., sizes.nope_dim :]  # [T, H, rope]
        if self.kv_norm is None:
            self.rotate(positions, q_rope, None, self.cos_sin_cache, interleaved=self.interleaved)
        else:
            latent, k_rope = down["kv_a_proj_with_mqa"].split((sizes.rank, sizes.rope_dim), -1)  # [T, rank], [T, rope]
            if self.rope_norm is not None:
                k_rope, _ = self.rope_norm(k_rope)
            self.write(
                q_rope,
                latent,
                k_rope,
                self.kv_cache,
                slot_mapping,
                positions,
                self.cos_sin_cache,
                self.kv_norm.weight,
                eps=sizes.eps,
                interleaved=self.interleaved,
                scale=self.k_scale,
            )

        # Attend.
        indices = self._chosen_keys(hidden, q_latent, positions, metadata, outputs)
        queries: AttentionMetadata | OutputRows = metadata
        if outputs is not None:
            queries, q, positions = outputs, q[outputs.rows], positions[outputs.rows]  # q: [R, H, nope + rope]
            if gate is not None:
                gate = gate[outputs.rows]  # [R, H, v]
        if self.query_factors is not None:
            q = (q * self.query_factors[positions]).to(q.dtype)
        if self.growth is not None:
            q = self.growth(q, positions)
        if outputs is None and indices is None:
            out = self._attend(q, block_table, metadata)  # [T, H, v]
        else:
            out = self._absorbed(q, block_table, metadata.seq_lens, queries, indices)  # [R, H, v]

        # Gate and project.
        if self.gate_proj is not None:
            gate_input = hidden
            if outputs is not None:
                gate_input = hidden[outputs.rows]
            out *= self.gate_proj.heads(gate_input)  # [R, H, 1 or v]
        if gate is not None:
            out *= gate.sigmoid()
        projected: torch.Tensor = self.o_proj(out.flatten(-2), queries.lora)  # [R, hidden_size]
        return projected

    def _chosen_keys(
        self,
        hidden: torch.Tensor,
        q_latent: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor | None:
        """Return the keys that each row attends to, int32 [R, columns]; None for all."""
        if self.indexer is None and not self.sizes.shares_choice:
            return None
        choices: dict[str, torch.Tensor | None] = metadata.plan.runs.setdefault("chosen keys", {})
        if self.indexer is not None:
            choices["last"] = self.indexer(hidden, q_latent, positions, metadata, outputs)
            return choices["last"]
        indices = choices["last"]  # [T, columns]: the earlier layer had no `outputs`
        if indices is None or outputs is None:
            return indices
        return indices[outputs.rows]

    def _attend(self, q: torch.Tensor, block_table: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Return attention of all rows, [T, H, nope + rope] -> [T, H, v]; expand latents if this is less work."""
        split = self._split(metadata)
        if split is None:
            return self._absorbed(q, block_table, metadata.seq_lens, metadata)
        expanded_q = q
        if split.rows is not None:
            expanded_q = q[split.rows]
        expanded = attend_expanded(
            expanded_q,
            self.kv_cache,
            split.pieces,
            self._expand,
            self.sizes,
            self.config.softmax_scale,
            self.k_scale,
            self.sinks,
        )  # [rows that expand, H, v]
        absorbed = split.absorbed
        if absorbed is None:
            return expanded
        out = expanded.new_empty(*q.shape[:2], self.sizes.v_head_dim)
        out[split.rows] = expanded
        table = block_table[absorbed.seqs]
        out[absorbed.rows] = self._absorbed(q[absorbed.rows], table, absorbed.seq_lens, absorbed)
        return out

    def _expand(self, latents: torch.Tensor) -> torch.Tensor:
        """Return keys and values of all heads, [T, rank] -> [T, H, nope + v]."""
        heads: torch.Tensor = linear(latents, self.up.flatten(0, 1)).unflatten(-1, (self.config.num_heads, -1))
        return heads

    def _split(self, metadata: AttentionMetadata) -> Split | None:
        """Return the division of the step, computed once a step; None if all sequences absorb.

        A step that is captured, compiled or recorded runs again with other lengths, so its lengths cannot decide.
        """
        host = metadata.host
        if (
            host is None
            or metadata.max_seqlen_q == 1
            or torch.compiler.is_dynamo_compiling()
            or recording() is not None
        ):
            return None
        splits: dict[object, Split | None] = metadata.plan.runs.setdefault("expanded latents", {})
        key = self.table, self.config
        if key not in splits:
            block_size, device = self.kv_cache.shape[1], self.kv_cache.device
            splits[key] = split_step(host, self.table, block_size, self.config, self.up.itemsize, device)
        return splits[key]

    def _absorbed(
        self,
        q: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        queries: Queries,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention to latents, q [R, H, nope + rope] -> [R, H, v]."""
        sizes = self.sizes
        nope, rope = q.split((sizes.nope_dim, sizes.rope_dim), -1)
        keys, values = self.up.split((sizes.nope_dim, sizes.v_head_dim), 1)  # [H, nope, rank], [H, v, rank]
        latent_q = torch.bmm(nope.transpose(0, 1), keys).transpose(0, 1)  # [R, H, rank]
        attended = latent_q.new_empty(*q.shape[:2], sizes.rank)
        self.attend(
            torch.cat([latent_q, rope], -1),
            self.kv_cache,
            v_head_dim=sizes.rank,
            block_table=block_table,
            cu_seqlens_q=queries.cu_seqlens_q,
            seq_lens=seq_lens,
            max_seqlen_q=queries.max_seqlen_q,
            softmax_scale=self.config.softmax_scale,
            sinks=self.sinks,
            window_size=self.config.window_size,
            k_scale=self.k_scale,
            indices=indices,
            plan=queries.plan,
            out=attended,
        )
        return torch.bmm(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def destinations(self, prefix: str) -> Destinations:
        if self.q_b_proj is None:
            queries = self.q_proj.destinations(prefix)
        else:
            queries = join_destinations(prefix, self.q_b_proj, q_a_layernorm=self.q_norm)
        return queries | join_destinations(
            prefix,
            *(self.down_proj, self.kv_b_proj, self.o_proj, self.gate_proj),
            kv_a_layernorm=self.kv_norm,
            k_rope_only_layernorm=self.rope_norm,
            indexer=self.indexer,
            softmax_scaling=self.growth,
            sinks=self.sinks,
        )


def _indexer(hidden_size: int, sizes: LatentConfig) -> Indexer | None:
    """Return the indexer of a layer with these sizes."""
    index = sizes.index
    if index is None:
        return None
    if index.reads_hidden:
        return HiddenIndexer(hidden_size, hidden_size, index)
    assert sizes.q_rank is not None
    if index.pool_size > 1:
        return PooledIndexer(hidden_size, sizes.q_rank, index)
    return Indexer(hidden_size, sizes.q_rank, index)
