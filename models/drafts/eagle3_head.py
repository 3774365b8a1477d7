"""EAGLE-3 heads (Li et al., 2025): one decoder layer in a folder of its own, beside the target's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paged.models.drafts.head import DraftHead
from paged.models.drafts.later_attention import HeadLayer
from paged.models.families.decoder_layer import rows_of
from paged.models.families.network import Network
from paged.models.layers.attention import Attention
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import Linear, RmsNorm, stream_norm
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class _EagleLayer(HeadLayer):
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
