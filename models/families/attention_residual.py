"""Layers that attend to snapshots of the residual stream, in place of reading its sum (Moonshot AI, "Kimi K3", 2026).

The residual stream of such layers is a tensor [S + 1, T, hidden_size]: S snapshots, and the sum of everything since the
last snapshot. Every `snapshot_period`-th layer moves the sum to the snapshots and begins a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paged.models.families.network import DecoderLayer
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder import RmsNorm, empty_parameter, stream_norm
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class ResidualMix(nn.Module):
    """A weighted sum of rows of the residual stream; the weights are a softmax of one learned score a row.

    name: beginning of the names of its two tensors in a checkpoint.
    """

    def __init__(self, config: DecoderConfig, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm = stream_norm(config)
        self.score = empty_parameter(1, config.hidden_size)

    def forward(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of rows, each [T, hidden_size]; computed in float32."""
        query = self.norm.weight.float() * self.score[0].float()  # [hidden_size]
        scores: list[torch.Tensor] = []
        for row in rows:
            wide = row.float()
            root = (wide.square().mean(-1) + self.norm.eps).rsqrt()
            scores.append((wide @ query) * root)
        weights = torch.stack(scores, -1).softmax(-1)  # [T, number of rows]
        mixed = rows[0] * weights[:, :1]
        for index, row in enumerate(rows[1:], 1):
            mixed.addcmul_(row, weights[:, index : index + 1])
        return mixed.to(rows[0].dtype)

    def destinations(self, prefix: str) -> Destinations:
        """Return the two tensors; prefix: name of the module that has them."""
        return {
            **self.norm.destinations(f"{prefix}.{self.name}_norm"),
            f"{prefix}.{self.name}_proj.weight": self.score,
        }


class SnapshotLayer(DecoderLayer):
    """A layer whose attention and MLP each read a mix of the snapshots and the sum."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.num_snapshots = -(-config.num_layers // config.snapshot_period)
        self.num_before = -(-index // config.snapshot_period)
        self.takes_snapshot = index % config.snapshot_period == 0
        self.attention_mix = ResidualMix(config, "self_attention_res")
        self.mlp_mix = ResidualMix(config, "mlp_res")

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer as `DecoderLayer.forward`; residual: [S + 1, T, hidden_size], or None in the first layer."""
        assert self.before_attention is not None
        assert self.before_mlp is not None
        # Attention, or the recurrent part.
        if residual is None:
            residual = hidden.new_empty(self.num_snapshots + 1, *hidden.shape)
            residual[-1] = hidden
        else:
            residual[-1].add_(hidden)
        mixed = self.attention_mix([*residual[: self.num_before], residual[-1]])
        attended = self.attend(self.before_attention(mixed)[0], positions, metadata, outputs)
        if self.ranks.size > 1:
            attended = self.ranks.sum(attended)
        lora, num_snapshots = metadata.lora, self.num_before
        if outputs is not None:
            residual, lora = residual[:, outputs.rows], outputs.lora
        if self.takes_snapshot:
            residual[num_snapshots] = residual[-1]
            residual[-1] = attended
            num_snapshots += 1
        else:
            residual[-1].add_(attended)

        # The MLP, or experts.
        mixed = self.mlp_mix([*residual[:num_snapshots], residual[-1]])
        hidden = getattr(self, self.mlp_name)(self.before_mlp(mixed)[0], lora)
        if self.ranks.size > 1:
            hidden = self.ranks.sum(hidden)
        return hidden, residual

    def destinations(self, prefix: str) -> Destinations:
        mixes = self.attention_mix.destinations(prefix) | self.mlp_mix.destinations(prefix)
        return super().destinations(prefix) | mixes


class SnapshotNorm(RmsNorm):
    """The final norm, of a mix of all snapshots and the sum."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.norms)
        self.mix = ResidualMix(config, "output_attn_res")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed, residual). x: the last layer's output. residual: [S + 1, T, hidden_size]."""
        assert residual is not None
        residual[-1].add_(x)
        normed, _ = super().forward(self.mix(list(residual)))
        return normed, residual

    def destinations(self, prefix: str) -> Destinations:
        parent = prefix.rpartition(".")[0]
        return super().destinations(prefix) | self.mix.destinations(parent)
