"""Layers that attend to snapshots of the residual stream, in place of reading its sum (Moonshot AI, "Kimi K3", 2026).

The residual stream of such layers is a tensor [S + 1, T, hidden_size]: S snapshots, and the sum of everything since the
last snapshot. Every `snapshot_period`-th layer moves the sum to the snapshots and begins a new one.
"""

from __future__ import annotations

import torch
from torch import nn

from paged.kernels.core.operation import Bound
from paged.kernels.layers.mix_snapshots import mix_snapshots
from paged.models.families.decoder_layer import DecoderLayer
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import RmsNorm, empty_parameter, stream_norm
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class ResidualMix(nn.Module):
    """A weighted sum of rows of the residual stream; the weights are a softmax of one learned score a row.

    Attributes:
        name: beginning of the names of its two tensors in a checkpoint.
        num_snapshots: snapshots that it reads, the first ones.
        has_output: whether a part's output is added to the stream first.
    """

    def __init__(self, config: DecoderConfig, name: str, num_snapshots: int, *, has_output: bool = True) -> None:
        super().__init__()
        self.name = name
        # Attributes, since only modules with equal ones share a bound operation.
        self.num_snapshots, self.has_output = num_snapshots, has_output
        self.norm = stream_norm(config)
        self.score = empty_parameter(1, config.hidden_size)
        self.mix_snapshots = Bound(mix_snapshots)

    def forward(self, rows: torch.Tensor, output: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """Return the norm of a sum of snapshots and the stream, [T, hidden_size]; the stream takes `output` first.

        rows: [S + 1, T, hidden_size], S snapshots and the stream.
        """
        return self.mix_snapshots(
            rows,
            output if self.has_output else None,
            self.norm.weight,
            self.score[0],
            norm.weight,
            self.num_snapshots,
            eps=self.norm.eps,
            norm_eps=norm.eps,
        )

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
        # The first layer's input is the stream.
        self.attention_mix = ResidualMix(config, "self_attention_res", self.num_before, has_output=index > 0)
        self.mlp_mix = ResidualMix(config, "mlp_res", self.num_before + self.takes_snapshot)

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
        mixed = self.attention_mix(residual, hidden, self.before_attention)
        attended = self.ranks.sum(self.attend(mixed, positions, metadata, outputs))
        lora = metadata.lora
        if outputs is not None:
            residual, lora = residual[:, outputs.rows], outputs.lora
        if self.takes_snapshot:
            residual[self.num_before] = residual[-1]
            residual[-1].zero_()

        # The MLP, or experts.
        mixed = self.mlp_mix(residual, attended, self.before_mlp)
        return self.ranks.sum(self.ffn(mixed, lora)), residual

    def destinations(self, prefix: str) -> Destinations:
        mixes = self.attention_mix.destinations(prefix) | self.mlp_mix.destinations(prefix)
        return super().destinations(prefix) | mixes


class SnapshotNorm(RmsNorm):
    """The final norm, of a mix of all snapshots and the sum."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.norms)
        self.mix = ResidualMix(config, "output_attn_res", -(-config.num_layers // config.snapshot_period))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed, residual). x: the last layer's output. residual: [S + 1, T, hidden_size]."""
        assert residual is not None
        return self.mix(residual, x, self), residual

    def destinations(self, prefix: str) -> Destinations:
        parent = prefix.rpartition(".")[0]
        return super().destinations(prefix) | self.mix.destinations(parent)
