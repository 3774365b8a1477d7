"""Several residual streams that a layer mixes before and behind each of its parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.core.operation import Bound
from paged.kernels.layers.definition import join_streams
from paged.kernels.layers.mix_streams import mix_streams
from paged.models.layers.config import DecoderConfig, GatedStreamsConfig, StreamsConfig
from paged.models.layers.decoder import RmsNorm, empty_parameter
from paged.models.loading.weights import Destinations


class Mixed(NamedTuple):
    """The input of a layer's part, and how its output joins N streams.

    Attributes:
        x: the input after its norm, [T, hidden_size].
        joins: gains of the output and shares of the streams, see `mix_streams`.
    """

    x: torch.Tensor
    joins: torch.Tensor

    def rows(self, rows: torch.Tensor) -> Mixed:
        """Return these rows of all tensors."""
        return Mixed(self.x[rows], self.joins[rows])

    def join(self, output: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Return the new streams, [T, N, hidden_size]. output: [T, hidden_size]."""
        return join_streams(streams, output, self.joins, compute=torch.float32).to(streams.dtype)


class HyperConnection(nn.Module):
    """Streams to a part's input by `mix_streams`; its weights are float32 in models of any dtype.

    prefix: beginning of the names of its three tensors in a checkpoint, below the module that has them. is_head:
    whether no part follows.
    """

    def __init__(self, config: DecoderConfig, sizes: StreamsConfig, prefix: str, *, is_head: bool = False) -> None:
        super().__init__()
        count, num_weights, num_factors = sizes.count, sizes.count, 1
        if not is_head and sizes.num_iterations:
            num_weights, num_factors = (2 + count) * count, 3
        elif not is_head:
            num_weights, num_factors = 2 * count, 2
        self.prefix, self.eps, self.norm_eps, self.magnitude = prefix, sizes.eps, config.norms.eps, sizes.magnitude
        self.num_iterations = 0
        if num_factors == 3:
            self.num_iterations = sizes.num_iterations
        self.fn = empty_parameter(num_weights, count * config.hidden_size)
        self.base = empty_parameter(num_weights)
        self.scale = empty_parameter(num_factors)
        # A site with an output has an operation of its own, because a `Bound` knows calls by their first argument.
        self.mix, self.join_and_mix = Bound(mix_streams), Bound(mix_streams)

    def keep_float32(self) -> None:
        """Convert the parameters back to float32."""
        self.float()

    def forward(
        self,
        streams: torch.Tensor,
        norm: RmsNorm | None,
        output: torch.Tensor | None = None,
        before: Mixed | None = None,
    ) -> tuple[Mixed, torch.Tensor]:
        """Return the input of the next part and the streams, [T, N, hidden_size], which `output` has joined.

        norm: of the input. output: of the part whose input was `before`, [T, hidden_size].
        """
        assert norm is not None
        operation, joins = self.mix, None
        if before is not None:
            operation, joins = self.join_and_mix, before.joins
        x, joined, next_joins = operation(
            streams,
            output,
            joins,
            self.fn,
            self.base,
            self.scale,
            norm.weight,
            eps=self.eps,
            norm_eps=self.norm_eps,
            magnitude=self.magnitude,
            num_iterations=self.num_iterations,
        )
        return Mixed(x, next_joins), joined

    def destinations(self, parent: str) -> Destinations:
        """Return the three tensors; parent: name of the module that has them."""
        return {f"{parent}.{self.prefix}_{part}": getattr(self, part) for part in ("fn", "base", "scale")}


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

    def forward(
        self,
        streams: torch.Tensor,
        norm: RmsNorm | None,
        output: torch.Tensor | None = None,
        before: Mixed | None = None,
    ) -> tuple[Mixed, torch.Tensor]:
        """Return the input of the next part and the streams, as `HyperConnection.forward`. norm: None."""
        if output is not None and before is not None:
            streams = before.join(output, streams)
        x, wide = self.mix(streams)
        gains = 2 * (functional.linear(wide, self.inject) / self.count).sigmoid()  # [T, N]
        return Mixed(x, gains.float()), streams

    def destinations(self, prefix: str) -> Destinations:
        destinations = super().destinations(prefix)
        return destinations | {f"{prefix}.{self.name}.block_inject_weight.weight": self.inject}
