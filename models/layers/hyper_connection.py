"""Several residual streams that a layer mixes before and behind each of its parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from paged.models.layers.config import DecoderConfig, GatedStreamsConfig, StreamsConfig
from paged.models.layers.decoder import RmsNorm, empty_parameter
from paged.models.loading.weights import Destinations


class Mixed(NamedTuple):
    """The input of a layer's part, and how its output joins N streams.

    Attributes:
        x: the input, [T, hidden_size].
        gains: factor for the output in each stream, float32 [T, N, 1].
        carried: share of each old stream (last axis) in each new one, float32 [T, N, N]; None if streams do not mix.
    """

    x: torch.Tensor
    gains: torch.Tensor
    carried: torch.Tensor | None = None

    def rows(self, rows: torch.Tensor) -> Mixed:
        """Return these rows of all tensors."""
        carried = self.carried
        if carried is not None:
            carried = carried[rows]
        return Mixed(self.x[rows], self.gains[rows], carried)

    def join(self, output: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Return the new streams, [T, N, hidden_size]. output: [T, hidden_size]."""
        wide = streams.float()
        if self.carried is not None:
            wide = self.carried @ wide
        return torch.addcmul(wide, self.gains, output[:, None].float()).to(streams.dtype)


class StreamWeights(nn.Module):
    """Weights of streams that are made of the streams themselves; all in float32.

    prefix: beginning of the names of its three tensors in a checkpoint, below the module that has them.
    """

    def __init__(
        self, config: DecoderConfig, sizes: StreamsConfig, prefix: str, num_weights: int, num_factors: int
    ) -> None:
        super().__init__()
        self.prefix, self.sizes, self.eps = prefix, sizes, config.norms.eps
        self.fn = empty_parameter(num_weights, sizes.count * config.hidden_size)
        self.base = empty_parameter(num_weights)
        self.scale = empty_parameter(num_factors)

    def keep_float32(self) -> None:
        """Convert the parameters back to float32."""
        self.float()

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return `fn` times the streams divided by their root mean square, float32 [T, num_weights].

        streams: [T, N, hidden_size].
        """
        wide = streams.flatten(1).float()
        root = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide @ self.fn.T) * root

    def collapsed(self, streams: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the sum of streams times sigmoid(logits) + eps, [T, hidden_size]. logits: [T, N]."""
        weights = logits.sigmoid() + self.sizes.eps
        return (weights.unsqueeze(-1) * streams).sum(1).to(streams.dtype)

    def destinations(self, parent: str) -> Destinations:
        """Return the three tensors; parent: name of the module that has them."""
        return {f"{parent}.{self.prefix}_{part}": getattr(self, part) for part in ("fn", "base", "scale")}


class HyperConnection(StreamWeights):
    """Manifold-constrained hyper-connections (Xie et al., 2026), or independent ones, whose streams do not mix."""

    def __init__(self, config: DecoderConfig, sizes: StreamsConfig, prefix: str) -> None:
        count = sizes.count
        if sizes.num_iterations:
            super().__init__(config, sizes, prefix, (2 + count) * count, 3)
        else:
            super().__init__(config, sizes, prefix, 2 * count, 2)

    def forward(self, streams: torch.Tensor) -> Mixed:
        """Mix streams [T, N, hidden_size]; computed in float32."""
        sizes, count = self.sizes, self.sizes.count
        logits = self.logits(streams)
        pre_scale, post_scale = self.scale[0], self.scale[1]
        x = self.collapsed(streams, logits[:, :count] * pre_scale + self.base[:count])
        post = slice(count, 2 * count)
        gains = sizes.magnitude * (logits[:, post] * post_scale + self.base[post]).sigmoid()
        if not sizes.num_iterations:
            return Mixed(x, (gains + sizes.eps).unsqueeze(-1), None)

        # Sinkhorn's iterations let every row and every column sum to 1.
        comb = logits[:, 2 * count :] * self.scale[2] + self.base[2 * count :]
        shares = comb.unflatten(-1, (count, count)).softmax(-1) + sizes.eps  # [T, N, N], old streams first
        shares = shares / (shares.sum(-2, keepdim=True) + sizes.eps)
        for _ in range(sizes.num_iterations - 1):
            shares = shares / (shares.sum(-1, keepdim=True) + sizes.eps)
            shares = shares / (shares.sum(-2, keepdim=True) + sizes.eps)
        return Mixed(x, gains.unsqueeze(-1), shares.mT)


class StreamsHead(StreamWeights):
    """The weighted sum of all streams behind the last layer."""

    def __init__(self, config: DecoderConfig, sizes: StreamsConfig) -> None:
        super().__init__(config, sizes, "hc_head", sizes.count, 1)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden_size]. streams: [T, N, hidden_size]."""
        return self.collapsed(streams, self.logits(streams) * self.scale + self.base)


class StreamsRmsNorm(RmsNorm):
    """An RMS norm of each stream, with weights of its own for every stream."""

    def __init__(self, config: DecoderConfig, count: int) -> None:
        super().__init__(count * config.hidden_size, config.norms)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed, x), both [T, N, hidden_size]; computed in float32."""
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * self.weight.view(x.shape[1:])).to(x.dtype), x


class GatedMix(nn.Module):
    """The mean of normalised streams, each channel times a gate that low-rank projections of all streams make.

    From Qwen4-Exp (Qwen, 2026): x = mean_i(sigmoid(up silu(down n / N))_i * n_i), where n are the N streams after their
    norm. Checkpoints never pack these weights.

    name: name of the module in a checkpoint; empty if `destinations` is given the module's own name.
    """

    def __init__(self, config: DecoderConfig, sizes: GatedStreamsConfig, name: str = "") -> None:
        super().__init__()
        self.name, self.count = name, sizes.count
        wide = sizes.count * config.hidden_size
        self.norm = StreamsRmsNorm(config, sizes.count)
        self.down = empty_parameter(sizes.rank, wide)
        self.up = empty_parameter(wide, sizes.rank)

    def mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x [T, hidden_size], normalised streams [T, N * hidden_size]). streams: [T, N, hidden_size]."""
        normed, _ = self.norm(streams)  # [T, N, hidden_size]
        wide = normed.flatten(1)  # [T, N * hidden_size]
        inner = functional.silu(functional.linear(wide, self.down) / self.count)  # [T, rank]
        gates = functional.linear(inner, self.up).sigmoid()  # [T, N * hidden_size]
        return (gates.view_as(normed) * normed).mean(1), wide

    def destinations(self, prefix: str) -> Destinations:
        """Return the tensors; prefix: name of the module's parent."""
        path = ".".join(filter(None, (prefix, self.name)))
        return {
            **self.norm.destinations(f"{path}.hc_norm"),
            f"{path}.input_mix_weight_down.weight": self.down,
            f"{path}.input_mix_weight_up.weight": self.up,
        }


class GatedResidual(GatedMix):
    """The gated residual of Qwen4-Exp: each stream gets the output times 2 sigmoid(w_i n / N), and stays besides."""

    def __init__(self, config: DecoderConfig, sizes: GatedStreamsConfig, name: str) -> None:
        super().__init__(config, sizes, name)
        self.inject = empty_parameter(sizes.count, sizes.count * config.hidden_size)

    def forward(self, streams: torch.Tensor) -> Mixed:
        """Mix streams [T, N, hidden_size]."""
        x, wide = self.mix(streams)
        gains = 2 * (functional.linear(wide, self.inject) / self.count).sigmoid()  # [T, N]
        return Mixed(x, gains.float().unsqueeze(-1))

    def destinations(self, prefix: str) -> Destinations:
        destinations = super().destinations(prefix)
        return destinations | {f"{prefix}.{self.name}.block_inject_weight.weight": self.inject}
