"""Several residual streams that a layer mixes before and behind each of its parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from paged.kernels.core.operation import Bound
from paged.kernels.layers.definition import join_streams
from paged.kernels.layers.gate_streams import gate_streams
from paged.kernels.layers.mix_streams import mix_streams
from paged.models.layers.config import DecoderConfig, GatedStreamsConfig, StreamsConfig
from paged.models.layers.modules import RmsNorm, empty_parameter
from paged.models.loading.weights import Destinations


class OpenStreams(NamedTuple):
    """N residual streams, and how the output of the part that runs joins them.

    Attributes:
        streams: [T, N, hidden_size].
        joins: gains of the output and shares of the streams, see `mix_streams`; None if no part runs.
        weights: of the streams in the next part's input, float32 [T, N]; None if that part makes its own.
    """

    streams: torch.Tensor
    joins: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    @classmethod
    def of_factors(cls, streams: torch.Tensor, factors: torch.Tensor) -> OpenStreams:
        """Return streams whose weights and joins lie side by side, float32 [T, N + columns of joins].

        All weights and joins of a model are such views, because a bound `mix_streams` keeps their strides.
        """
        count = streams.shape[1]
        return cls(streams, factors[:, count:], factors[:, :count])

    def rows(self, rows: torch.Tensor) -> OpenStreams:
        """Return these rows of all tensors."""
        assert self.joins is not None
        streams, joins = self.streams[rows], self.joins[rows]
        if self.weights is None:
            return OpenStreams(streams, joins)
        return OpenStreams.of_factors(streams, torch.cat([self.weights[rows], joins], 1))

    def closed(self, output: torch.Tensor) -> torch.Tensor:
        """Return the new streams, [T, N, hidden_size]. output: the part's, [T, hidden_size]."""
        joined = join_streams(self.streams, output, self.joins, compute=torch.float32)
        return joined.to(self.streams.dtype)

    def mixed(self, closed: torch.Tensor) -> torch.Tensor:
        """Return the sum of the new streams by their weights, or their mean, [T, hidden_size]."""
        if self.weights is None:
            return closed.mean(1)
        return (self.weights.unsqueeze(-1) * closed).sum(1).to(closed.dtype)


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
        self, before: OpenStreams, norm: RmsNorm | None, output: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, OpenStreams]:
        """Return the input of the next part, [T, hidden_size], and the streams, which `output` has joined.

        norm: of the input. output: of the part before, [T, hidden_size]; None if no part runs.
        """
        assert norm is not None
        operation = self.mix if output is None else self.join_and_mix
        x, joined, joins = operation(
            before.streams,
            output,
            before.joins,
            self.fn,
            self.base,
            self.scale,
            norm.weight,
            weights=before.weights,
            eps=self.eps,
            norm_eps=self.norm_eps,
            magnitude=self.magnitude,
            num_iterations=self.num_iterations,
        )
        if before.weights is None:
            return x, OpenStreams(joined, joins)
        return x, OpenStreams.of_factors(joined, joins)

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


class GatedResidual(nn.Module):
    """Streams to a part's input by `gate_streams`. Checkpoints never pack these weights.

    name: name of the module in a checkpoint; empty if `destinations` is given the module's own name. is_last: whether
    no part follows.
    """

    def __init__(
        self, config: DecoderConfig, sizes: GatedStreamsConfig, name: str = "", *, is_last: bool = False
    ) -> None:
        super().__init__()
        self.name, self.rank = name, sizes.rank
        wide, num_weights = sizes.count * config.hidden_size, sizes.rank
        if not is_last:
            num_weights += sizes.count  # the rows that make gains of the part's output
        self.norm = StreamsRmsNorm(config, sizes.count)
        self.down = empty_parameter(num_weights, wide)
        self.up = empty_parameter(wide, sizes.rank)
        # Two operations, as in `HyperConnection`.
        self.gate, self.join_and_gate = Bound(gate_streams), Bound(gate_streams)

    def forward(
        self, before: OpenStreams, norm: RmsNorm | None, output: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, OpenStreams]:
        """Return the input of the next part and the streams, as `HyperConnection.forward`. norm: None."""
        operation = self.gate if output is None else self.join_and_gate
        x, joined, next_gains = operation(
            before.streams, output, before.joins, self.norm.weight, self.down, self.up, eps=self.norm.eps
        )
        return x, OpenStreams(joined, next_gains)

    def destinations(self, prefix: str) -> Destinations:
        """Return the tensors; prefix: name of the module's parent."""
        path = ".".join(filter(None, (prefix, self.name)))
        destinations = {
            **self.norm.destinations(f"{path}.hc_norm"),
            f"{path}.input_mix_weight_down.weight": self.down[: self.rank],
            f"{path}.input_mix_weight_up.weight": self.up,
        }
        if len(self.down) > self.rank:
            destinations[f"{path}.block_inject_weight.weight"] = self.down[self.rank :]
        return destinations
