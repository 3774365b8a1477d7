"""Draft heads: one decoder layer that guesses further tokens from the target's hidden states.

The input at position j is the embedding of token j and the target's hidden state of token j - 1. So a head's keys and
values depend on the tokens up to j alone, like the target's, and lie in the same blocks. Sharing, forking, swapping or
truncating a sequence therefore covers the head too. Position 0 has no input, and attention leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paged.kernels.cache.latent_cache import dequantized
from paged.kernels.core.dtypes import as_kernel_argument, kv_kind
from paged.models.families.decoder_layer import DecoderLayer, rows_of
from paged.models.families.network import Network, quantize
from paged.models.layers.attention import Attention
from paged.models.layers.config import DecoderConfig
from paged.models.layers.draft_head import DraftHead
from paged.models.layers.latent_attention import LatentAttention
from paged.models.layers.modules import Linear, RmsNorm, stream_norm
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


@dataclass(frozen=True)
class HeadNames:
    """Names of a multi-token head's tensors in a checkpoint, and how it combines its inputs.

    Attributes:
        prefix: prefix of all tensors of the head; {} stands for the target's number of layers.
        layer: further prefix of the decoder layer.
        token_norm, hidden_norm, projection: modules that join embedding and hidden state.
        embedding, lm_head: copies of the target's, which may be absent.
        hidden_first: whether the projection takes the hidden state before the embedding.
        normed: whether the head, after its own draft, reads its hidden state after the final norm.
    """

    prefix: str
    layer: str = ""
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    embedding: str = "embed_tokens"
    lm_head: str = "shared_head.head"
    hidden_first: bool = False
    normed: bool = False


# model_type of the target -> the head's tensor names. GLM has the names of DeepSeek-V3 (2024).
MULTI_TOKEN_HEADS: Mapping[str, HeadNames] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), HeadNames("model.layers.{}")),
    "deepseek_v4": HeadNames("mtp.0", norm="norm", embedding="emb.tok_emb", lm_head="head"),
    "hy_v3": HeadNames("model.layers.{}", norm="final_layernorm", normed=True),
    "mimo": HeadNames(
        "model.mtp_layers.0",
        token_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        lm_head="lm_head",
        hidden_first=True,
        normed=True,
    ),
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        HeadNames(
            "mtp",
            "layers.0",
            token_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc",
            norm="norm",
            lm_head="lm_head",
            normed=True,
        ),
    ),
}


class _Attention(Attention):
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


class _LatentAttention(LatentAttention):
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


class _Layer(DecoderLayer):
    attention_class, latent_class = _Attention, _LatentAttention


class _EagleLayer(_Layer):
    """A decoder layer whose attention reads embeddings and hidden states side by side (EAGLE-3, Li et al., 2025).

    norms_residual: whether the residual stream begins with the normalised hidden states.
    """

    def __init__(self, config: DecoderConfig, index: int, *, norms_residual: bool) -> None:
        super().__init__(config, index)
        assert isinstance(self.self_attn, Attention)
        projection = self.self_attn.qkv_proj
        self.self_attn.qkv_proj = Linear(2 * config.hidden_size, projection.parts, bias=projection.bias is not None)
        self.hidden_norm = stream_norm(config)
        self.norms_residual = norms_residual

    def run(
        self, tokens: torch.Tensor, hidden: torch.Tensor, metadata: AttentionMetadata, outputs: OutputRows | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (hidden, residual) after the layer; hidden is not yet added to the residual."""
        assert self.before_attention is not None
        assert self.before_mlp is not None
        normed = self.hidden_norm(hidden)[0]
        joined = torch.cat([self.before_attention(tokens)[0], normed], -1)
        attended = self.attend(joined, metadata.positions, metadata, outputs)
        if self.norms_residual:
            hidden = normed
        residual = rows_of(hidden.clone(), outputs)
        mixed, residual = self.before_mlp(attended, residual)
        return self.ffn(mixed, None), residual


class NamedHead(DraftHead):
    """A head in the target's own checkpoint, under the names of `HeadNames`; several drafts run it repeatedly."""

    def __init__(
        self,
        target: Network,
        config: DecoderConfig,
        layer: DecoderLayer,
        names: HeadNames,
        projections: Sequence[Linear],
    ) -> None:
        """config: the target's configuration with one more layer. projections: those that join the inputs."""
        super().__init__(target, config, [layer], config.vocab_size)
        self.names, self.prefix = names, names.prefix.format(config.num_layers - 1)
        self.layer_prefix = f"{self.prefix}.{names.layer}".removesuffix(".")
        self.token_norm, self.hidden_norm = stream_norm(config), stream_norm(config)
        self.projections = nn.ModuleList(projections)
        if config.quantization is not None:
            for projection in projections:
                projection.quantize(self.prefix, config.quantization)
            quantize(layer, self.layer_prefix, config, config.quantization)

    def destinations(self) -> Destinations:
        names, prefix = self.names, self.prefix
        destinations: Destinations = self.layer.destinations(self.layer_prefix)
        for projection in self.projections:
            assert isinstance(projection, Linear)
            destinations |= projection.destinations(prefix)
        norms = {names.token_norm: self.token_norm, names.hidden_norm: self.hidden_norm, names.norm: self.norm}
        for name, norm in norms.items():
            destinations |= norm.destinations(f"{prefix}.{name}")
        for name, copy in ((names.embedding, self.embed_tokens), (names.lm_head, self.lm_head)):
            if copy is not None:
                destinations[f"{prefix}.{name}.weight"] = copy
        return destinations


class MultiTokenHead(NamedHead):
    """A head with one projection of the embedding and the hidden state side by side."""

    def __init__(self, target: Network, config: DecoderConfig, names: HeadNames) -> None:
        """config: the target's configuration with one more layer."""
        projection = Linear(2 * config.hidden_size, {names.projection: config.hidden_size})
        super().__init__(target, config, _Layer(config, config.num_layers - 1), names, [projection])

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = [self.token_norm(self.embed(input_ids))[0], self.hidden_norm(features)[0]]
        if self.names.hidden_first:
            inputs.reverse()
        (projection,) = self.projections
        joined = projection(torch.cat(inputs, -1))
        normed, stream = self.norm(*self.layer(joined, None, metadata.positions, metadata, outputs))
        if self.names.normed:
            return normed, normed
        return normed, stream


@dataclass(frozen=True)
class Eagle3Norms:
    """Norms that an EAGLE-3 head may have, as in vLLM 0.33.

    Attributes:
        begins_residual: whether the residual stream begins with the normalised hidden states.
        taps_joined: whether all hidden states of the target are normalised together, before the projection.
        taps_apart: whether the hidden state of each layer is normalised, after `taps_joined`.
        output: whether the head, after its own draft, reads its hidden state after the final norm.
    """

    begins_residual: bool = False
    taps_joined: bool = False
    taps_apart: bool = False
    output: bool = False


class Eagle3Head(DraftHead):
    """A head in a folder of its own, which reads the inputs of several of the target's layers (EAGLE-3)."""

    def __init__(
        self,
        target: Network,
        config: DecoderConfig,
        *,
        taps: tuple[int, ...],
        num_logits: int,
        norms: Eagle3Norms,
        layer_name: str,
    ) -> None:
        """config: configuration of the head, with one layer. layer_name: name of the layer in the checkpoint."""
        layer = _EagleLayer(config, 0, norms_residual=norms.begins_residual)
        super().__init__(target, config, [layer], num_logits)
        self.taps, self.layer_name, self.norms = taps, layer_name, norms
        tap_size = target.config.hidden_size
        self.fc = Linear(len(taps) * tap_size, {"fc": config.hidden_size})
        self.input_norm: RmsNorm | None = None
        if norms.taps_joined:
            self.input_norm = RmsNorm(len(taps) * tap_size, config.norms)
        self.fc_norms = nn.ModuleList()
        if norms.taps_apart:
            self.fc_norms.extend(RmsNorm(tap_size, config.norms) for _ in taps)
        self.offsets = nn.Parameter(torch.empty(num_logits, dtype=torch.int64), requires_grad=False)

    def features(self, hidden: torch.Tensor, boundaries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        joined = torch.cat([boundaries[index] for index in self.taps], -1)  # [T, taps * hidden_size]
        if self.input_norm is not None:
            joined, _ = self.input_norm(joined)
        if self.norms.taps_apart:
            parts = []
            for norm, part in zip(self.fc_norms, joined.chunk(len(self.taps), -1), strict=True):
                normed, _ = norm(part.contiguous())
                parts.append(normed)
            joined = torch.cat(parts, -1)
        fused: torch.Tensor = self.fc(joined)
        return fused

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self.layer, _EagleLayer)
        normed, stream = self.norm(*self.layer.run(self.embed(input_ids), features, metadata, outputs))
        if self.norms.output:
            return normed, normed
        return normed, stream

    def destinations(self) -> Destinations:
        assert isinstance(self.layer, _EagleLayer)
        destinations = self.layer.destinations(self.layer_name) | self.layer.hidden_norm.destinations(
            f"{self.layer_name}.hidden_norm"
        )
        destinations |= self.norm.destinations("norm") | self.fc.destinations("")
        if self.input_norm is not None:
            destinations |= self.input_norm.destinations("input_norm")
        for index, norm in enumerate(self.fc_norms):
            assert isinstance(norm, RmsNorm)
            destinations |= norm.destinations(f"fc_norm.{index}")
        copies = {"embed_tokens.weight": self.embed_tokens, "lm_head.weight": self.lm_head, "d2t": self.offsets}
        for name, copy in copies.items():
            if copy is not None:
                destinations[name] = copy
        return destinations
