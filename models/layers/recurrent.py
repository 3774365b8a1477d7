"""Layers over the cache's state slots: gated delta nets, Mamba-2 and short convolutions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.core.operation import Bound
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.recurrent.causal_conv1d import causal_conv1d
from paged.kernels.recurrent.gated_delta_rule import gated_delta_rule
from paged.kernels.recurrent.gated_rms_norm import gated_rms_norm
from paged.kernels.recurrent.mamba2_scan import mamba2_scan
from paged.kernels.recurrent.metadata import RecurrentBatch, RecurrentState
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import Linear, empty_parameter
from paged.models.layers.recurrent_config import GatedDeltaConfig, Mamba2Config, RecurrentConfig, ShortConvConfig
from paged.models.loading.weights import ConvertedDestination, Destinations, join_destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class RecurrentLayer(nn.Module):
    """Base of layers that keep a state of fixed size for each sequence.

    state: the layer's slots in the cache. float32_names: parameters that are float32 in models of any dtype.
    """

    state: RecurrentState
    out_proj: Linear
    float32_names: tuple[str, ...] = ()

    def __init__(self, layer: RecurrentConfig) -> None:
        super().__init__()
        for name in self.float32_names:
            self.register_parameter(name, empty_parameter(layer.num_heads))

    def set_state(self, state: RecurrentState) -> None:
        """Give the layer its slots in the cache."""
        self.state = state

    def keep_float32(self) -> None:
        """Convert the parameters in `float32_names` back to float32."""
        for name in self.float32_names:
            parameter = self.get_parameter(name)
            parameter.data = parameter.float()

    def forward(
        self, hidden: torch.Tensor, metadata: AttentionMetadata, outputs: OutputRows | None = None
    ) -> torch.Tensor:
        """Return [num_tokens, hidden_size], or the rows of `outputs`; the states of all tokens are written."""
        assert metadata.recurrent is not None
        mixed, lora = self.mix(hidden, metadata.recurrent, metadata.lora), metadata.lora
        if outputs is not None:
            mixed, lora = mixed[outputs.rows], outputs.lora
        out: torch.Tensor = self.out_proj(mixed, lora)
        return out

    def mix(self, hidden: torch.Tensor, batch: RecurrentBatch, lora: LoraBatch | None) -> torch.Tensor:
        """Return the input of `out_proj`."""
        raise NotImplementedError

    def destinations(self, prefix: str) -> Destinations:
        destinations = self.out_proj.destinations(prefix)
        for name in self.float32_names:
            destinations[f"{prefix}.{name}"] = self.get_parameter(name)
        return destinations


class ConvolvedLayer(RecurrentLayer):
    """A causal convolution; a subclass adds the operations before and after it."""

    def __init__(self, layer: RecurrentConfig, *, conv_bias: bool = False) -> None:
        super().__init__(layer)
        # [channels, width], by tap in memory: a thread then loads the taps of eight channels at once.
        by_tap = torch.empty(layer.conv_width, layer.channels)
        self.conv_weight = nn.Parameter(by_tap.t(), requires_grad=False)
        self.conv_bias = empty_parameter(layer.channels) if conv_bias else None
        self.causal_conv1d = Bound(causal_conv1d)

    def convolve(self, x: torch.Tensor, batch: RecurrentBatch, activation: str | None = "silu") -> torch.Tensor:
        """Return the convolution of x [num_tokens, channels]."""
        return self.causal_conv1d(x, self.conv_weight, self.conv_bias, self.state, batch=batch, activation=activation)

    def destinations(self, prefix: str) -> Destinations:
        parts = {"conv1d.weight": self.conv_weight[:, None], "conv1d.bias": self.conv_bias}
        return super().destinations(prefix) | join_destinations(prefix, **parts)


class ShortConv(ConvolvedLayer):
    """A convolution between two gates: out_proj(C * conv(B * x)), as in LFM2 (Liquid AI, 2025)."""

    def __init__(self, config: DecoderConfig, layer: ShortConvConfig) -> None:
        super().__init__(layer, conv_bias=layer.bias)
        self.in_proj = Linear(config.hidden_size, {"in_proj": 3 * layer.size}, bias=layer.bias)
        self.out_proj = Linear(layer.size, {"out_proj": config.hidden_size}, bias=layer.bias)

    def mix(self, hidden: torch.Tensor, batch: RecurrentBatch, lora: LoraBatch | None) -> torch.Tensor:
        before, after, x = self.in_proj(hidden, lora).chunk(3, -1)
        return self.convolve(before * x, batch, None).mul_(after)

    def destinations(self, prefix: str) -> Destinations:
        return super().destinations(prefix) | self.in_proj.destinations(prefix)


class Mamba2(ConvolvedLayer):
    """Mamba-2 (Dao and Gu, 2024)."""

    float32_names = ("A_log", "dt_bias", "D")
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    D: nn.Parameter

    def __init__(self, config: DecoderConfig, layer: Mamba2Config) -> None:
        super().__init__(layer, conv_bias=layer.conv_bias)
        self.config, size = layer, layer.value_size
        self.sizes = size, layer.channels, layer.num_heads
        self.in_proj = Linear(config.hidden_size, {"in_proj": sum(self.sizes)}, bias=layer.bias)
        self.out_proj = Linear(size, {"out_proj": config.hidden_size}, bias=layer.bias)
        self.norm_weight = None if layer.eps is None else empty_parameter(size)
        self.mamba2_scan, self.gated_rms_norm = Bound(mamba2_scan), Bound(gated_rms_norm)

    def mix(self, hidden: torch.Tensor, batch: RecurrentBatch, lora: LoraBatch | None) -> torch.Tensor:
        layer, projected = self.config, self.in_proj(hidden, lora)
        if any(factor != 1 for factor in layer.in_factors):
            sizes = layer.value_size, layer.value_size, layer.key_size, layer.key_size, layer.num_heads
            for part, factor in zip(projected.split_with_sizes(sizes, -1), layer.in_factors, strict=True):
                part.mul_(factor)
        z, mixed, dt = projected.split_with_sizes(self.sizes, -1)
        x = self.mamba2_scan(
            self.convolve(mixed, batch),
            dt,
            self.A_log,
            self.dt_bias,
            self.D,
            self.state,
            batch=batch,
            num_groups=layer.num_key_heads,
            dt_limits=layer.dt_limits,
        )
        if self.norm_weight is None or layer.eps is None:
            return x.flatten(1).mul_(functional.silu(z))
        group_size = layer.value_size // layer.num_key_heads
        z = z.unflatten(-1, x.shape[1:])
        return self.gated_rms_norm(
            x, z, self.norm_weight, layer.eps, norm_first=layer.norm_first, group_size=group_size
        ).flatten(1)

    def destinations(self, prefix: str) -> Destinations:
        parts = {"norm.weight": self.norm_weight}
        return super().destinations(prefix) | join_destinations(prefix, self.in_proj, **parts)


class GatedDeltaNet(ConvolvedLayer):
    """A gated delta net (Yang et al., 2024), as in Qwen3-Next and Qwen3.5."""

    float32_names = ("A_log", "dt_bias")
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, config: DecoderConfig, layer: GatedDeltaConfig) -> None:
        super().__init__(layer)
        self.config = layer
        keys, values, heads = layer.key_size, layer.value_size, layer.num_heads
        gates = {"in_proj_b": heads, "in_proj_a": heads}
        if layer.by_head:
            parts, gates = {"in_proj_qkvz": 2 * keys + 2 * values}, {"in_proj_ba": 2 * heads}
        elif layer.splits_qkv:
            parts = {"q_proj": keys, "k_proj": keys, "v_proj": values, "in_proj_z": values}
        else:
            parts = {"in_proj_qkv": layer.channels, "in_proj_z": values}
        self.in_proj = Linear(config.hidden_size, parts)
        self.gates_proj = Linear(config.hidden_size, gates)
        self.out_proj = Linear(values, {"out_proj": config.hidden_size})
        self.norm_weight = empty_parameter(layer.head_dim)
        self.gated_rms_norm, self.gated_delta_rule = Bound(gated_rms_norm), Bound(gated_delta_rule)

    def mix(self, hidden: torch.Tensor, batch: RecurrentBatch, lora: LoraBatch | None) -> torch.Tensor:
        layer = self.config
        mixed, z = self._project(self.in_proj, hidden, lora).split_with_sizes((layer.channels, layer.value_size), -1)
        b, a = self._project(self.gates_proj, hidden, lora).chunk(2, -1)
        x = self.gated_delta_rule(
            self.convolve(mixed, batch),
            a,
            b,
            self.A_log,
            self.dt_bias,
            self.state,
            batch=batch,
            num_k_heads=layer.num_key_heads,
            beta_scale=layer.beta_scale,
        )
        return self.gated_rms_norm(
            x, z.unflatten(-1, x.shape[1:]), self.norm_weight, layer.eps, norm_first=True, activation=layer.gate
        ).flatten(1)

    def _project(self, linear: Linear, hidden: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        out: torch.Tensor = linear(hidden, lora)
        if self.config.by_head and linear.packed is not None:  # loading cannot sort packed weights
            out = out[:, self._order(linear).to(out.device)]
        return out

    def _order(self, linear: Linear) -> torch.Tensor:
        """Return the stored row of each feature, for a checkpoint that stores all parts of a key head together."""
        layer = self.config
        if linear is self.in_proj:
            values = layer.value_size // layer.num_key_heads
            sizes = [layer.key_dim, layer.key_dim, values, values]
        else:
            sizes = [layer.num_heads // layer.num_key_heads] * 2
        rows = torch.arange(sum(linear.sizes), device="cpu").view(layer.num_key_heads, -1)
        return torch.cat([part.flatten() for part in rows.split(sizes, 1)])

    def destinations(self, prefix: str) -> Destinations:
        destinations = {**super().destinations(prefix), f"{prefix}.norm.weight": self.norm_weight}
        if self.config.splits_conv:
            sizes = self.config.key_size, self.config.key_size, self.config.value_size
            del destinations[f"{prefix}.conv1d.weight"]
            for name, part in zip("qkv", self.conv_weight[:, None].split(sizes), strict=True):
                destinations[f"{prefix}.{name}_conv1d.weight"] = part
        for linear in (self.in_proj, self.gates_proj):
            destinations |= linear.destinations(prefix)
            if self.config.by_head and linear.packed is None:
                (name,) = linear.parts
                destinations[f"{prefix}.{name}.weight"] = _sorted(linear.weight, self._order(linear))
        return destinations


def _sorted(destination: torch.Tensor, order: torch.Tensor) -> ConvertedDestination:
    def copy(stored: torch.Tensor) -> torch.Tensor:
        return destination.copy_(stored[order.to(stored.device)])

    return ConvertedDestination(destination.shape, destination.dtype, copy)
