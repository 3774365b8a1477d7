"""Several residual streams that a layer mixes before and behind each of its parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from paged.models.layers.config import DecoderConfig, StreamsConfig
from paged.models.layers.decoder import empty_parameter
from paged.models.loading.weights import Destinations


class Mixed(NamedTuple):
    """The input of a layer's part, and how its output joins N streams.

    Attributes:
        x: the input, [T, hidden_size].
        gains: factor for the output in each stream, float32 [T, N, 1].
        carried: share of each old stream (last axis) in each new one, float32 [T, N, N].
    """

    x: torch.Tensor
    gains: torch.Tensor
    carried: torch.Tensor

    def rows(self, rows: torch.Tensor) -> Mixed:
        """Return these rows of all tensors."""
        return Mixed(self.x[rows], self.gains[rows], self.carried[rows])

    def join(self, output: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Return the new streams, [T, N, hidden_size]. output: [T, hidden_size]."""
        dtype = streams.dtype
        return self.gains.to(dtype) * output[:, None] + self.carried.to(dtype) @ streams


class HyperConnection(nn.Module):
    """Manifold-constrained hyper-connections (Xie et al., 2026): weights of streams are made of the streams themselves.

    name: beginning of the names of its tensors in a checkpoint.
    """

    def __init__(self, config: DecoderConfig, sizes: StreamsConfig, name: str) -> None:
        super().__init__()
        self.name, self.sizes, self.eps = name, sizes, config.norms.eps
        num_weights = (2 + sizes.count) * sizes.count
        self.fn = empty_parameter(num_weights, sizes.count * config.hidden_size)
        self.base = empty_parameter(num_weights)
        self.scale = empty_parameter(3)

    def keep_float32(self) -> None:
        """Convert offsets and factors back to float32."""
        self.base.data, self.scale.data = self.base.float(), self.scale.float()

    def forward(self, streams: torch.Tensor) -> Mixed:
        """Mix streams [T, N, hidden_size]; computed in float32."""
        count, eps = self.sizes.count, self.sizes.eps
        wide = streams.flatten(1).float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        sections = count, count, count * count
        pre, post, comb = (wide @ self.fn.float().T).split(sections, -1)
        pre_base, post_base, comb_base = self.base.split(sections)
        pre_scale, post_scale, comb_scale = self.scale.unbind()
        x = (((pre * pre_scale + pre_base).sigmoid() + eps).unsqueeze(-1) * streams).sum(1).to(streams.dtype)
        gains = 2 * (post * post_scale + post_base).sigmoid()

        # Sinkhorn's iterations let every row and every column sum to 1.
        logits = comb * comb_scale + comb_base
        shares = logits.unflatten(-1, (count, count)).softmax(-1) + eps  # [T, N, N], old streams first
        shares = shares / (shares.sum(-2, keepdim=True) + eps)
        for _ in range(self.sizes.num_iterations - 1):
            shares = shares / (shares.sum(-1, keepdim=True) + eps)
            shares = shares / (shares.sum(-2, keepdim=True) + eps)
        return Mixed(x, gains.unsqueeze(-1), shares.mT)

    def destinations(self, prefix: str) -> Destinations:
        """Return the three tensors; prefix: name of the layer."""
        return {f"{prefix}.{self.name}_{part}": getattr(self, part) for part in ("fn", "base", "scale")}
