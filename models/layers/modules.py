"""Modules that layers are made of: linear layers, norms, MLPs. Each knows the checkpoint names of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.core.operation import Bound
from paged.kernels.cpu.products import pack
from paged.kernels.layers.linear import linear, linear_and_silu
from paged.kernels.layers.rms_norm import fused_add_rms_norm, rms_norm
from paged.kernels.layers.silu_and_mul import silu_and_mul
from paged.kernels.lora.add_lora import add_lora
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.lora.weights import LoraWeights
from paged.models.layers.config import DecoderConfig, NormConfig
from paged.models.loading.weights import ConvertedDestination, Destinations
from paged.models.quantization.layouts import ROUTER, Quantization, Widened
from paged.models.quantization.packed_weights import CpuProducts, PackedWeights, widening
from paged.models.quantization.rounding import as_products

# Least and largest number of rows that an MLP computes at once on a CPU, because more rows multiply faster.
# `_BETWEEN_BYTES` limits the tensors between the products: larger ones exceed the limit of `keep_freed_memory`, and
# every layer gets fresh pages. See models/limits.md.
_CPU_ROWS, _MOST_CPU_ROWS = 512, 2048
_BETWEEN_BYTES = 24 << 20


@runtime_checkable
class KeepsFloat32(Protocol):
    """A module with weights that are float32 in models of any dtype."""

    def keep_float32(self) -> None:
        """Convert these weights back to float32."""


def empty_parameter(*shape: int) -> nn.Parameter:
    """Return memory for a weight that is loaded, never trained."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """One product for several projections of the same input; `parts` maps checkpoint names to output sizes.

    adapters: LoRA weights for rows that have an adapter. packed: the weights if they are quantised; `weight` is then
    absent.
    """

    adapters: LoraWeights | None = None
    rounded: str | None = None  # the format that `round_to` was given

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.parts, self.in_features = dict(parts), in_features
        out_features = sum(parts.values())
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self.packed: PackedWeights | CpuProducts | None = None
        self.widened: Widened | None = None
        self.add_lora = Bound(add_lora)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Output features of each part."""
        return tuple(self.parts.values())

    def forward(self, x: torch.Tensor, lora: LoraBatch | None = None) -> torch.Tensor:
        if self.packed is None:
            out = linear(x, self.weight, self.bias)
        else:
            out = self.packed(x, self.bias)
        if lora is None or self.adapters is None:
            return out
        return self.add_lora(out, x, self.adapters, batch=lora)

    @property
    def has_invariant_rows(self) -> bool:
        """See `Network.has_invariant_rows`."""
        if isinstance(self.packed, PackedWeights):
            return False
        return self.packed is None or self.packed.has_invariant_rows

    def quantize(self, prefix: str, quantization: Quantization) -> None:
        """Hold the weights of projections `prefix`.name packed, if the checkpoint packs them.

        Raises:
            UnsupportedError: the projections have different formats.
            CheckpointError: the sizes are not multiples of groups or words.
        """
        names = self._names(prefix)
        layout = quantization.common_layout(names)
        if isinstance(layout, Widened):
            self.widened = layout
        elif layout is not None:
            for name, size in zip(names, self.sizes, strict=True):
                layout.check(name, size, self.in_features)
            self.packed = PackedWeights(layout, self.in_features, self.sizes)
            del self.weight

    def bytes_to_pack(self, dtype: torch.dtype) -> int:
        """Return the bytes that `pack` would reorder."""
        if isinstance(self.packed, PackedWeights):
            return self.packed.bytes_to_pack(dtype)
        if self.packed is not None or self.weight.is_mkldnn:
            return 0
        return self.weight.nbytes

    def pack(self, dtype: torch.dtype) -> None:
        """Reorder the weights for faster products on a CPU; see `pack` and `CpuProduct`.

        dtype: dtype of activations.
        """
        if isinstance(self.packed, PackedWeights):
            weights = self.packed.for_cpu(dtype)
            if isinstance(weights, torch.Tensor):
                self.packed = None
                self.weight = nn.Parameter(weights, requires_grad=False)
            else:
                self.packed = weights
        if self.packed is None:
            self.weight = nn.Parameter(pack(self.weight), requires_grad=False)

    def round_to(self, form: str) -> None:
        """Round the weights to int8 or int4 for a CPU; a router's weights stay plain. See `as_products`."""
        self.rounded = form
        is_router = any(ROUTER.match(name) for name in self.parts)
        self.packed = None
        if not is_router:
            self.packed = as_products(self.weight, form)
        if self.packed is not None:
            del self.weight

    def take_products(self, new: Linear, dtype: torch.dtype) -> bool:
        """Take over the weights of a newly loaded layer if they are held in a CPU's order; return whether they were.

        The new layer loses its weights.
        """
        if isinstance(self.packed, PackedWeights) or (self.packed is None and new.packed is None):
            return False
        if isinstance(new.packed, PackedWeights):
            new.packed.derive_from_weights()
        if self.rounded is None:
            new.pack(dtype)
        else:
            new.round_to(self.rounded)
        self.packed, new.packed = new.packed, None
        if self.packed is None:
            self.weight = new.weight
            del new.weight
        return True

    def destinations(self, prefix: str) -> Destinations:
        names = self._names(prefix)
        destinations: Destinations = {}
        if isinstance(self.packed, PackedWeights):
            destinations = self.packed.destinations(names)
        start = 0
        for name, size in zip(names, self.sizes, strict=True):
            if self.packed is None and self.widened is None:
                destinations[f"{name}.weight"] = self.weight[start : start + size]
            elif self.widened is not None:
                for end, destination in widening(self.widened, self.weight[start : start + size]).items():
                    destinations[f"{name}.{end}"] = destination
            if self.bias is not None:
                destinations[f"{name}.bias"] = self.bias[start : start + size]
            start += size
        return destinations

    def _names(self, prefix: str) -> list[str]:
        if not prefix:
            return list(self.parts)
        return [f"{prefix}.{name}" for name in self.parts]


class RmsNorm(nn.Module):
    """RMS norm of x, or of its sum with a residual stream.

    Weights stored minus 1, or times a factor, are float32 in models of any dtype, because 1 + weight in bfloat16 would
    move the logits by half as much as all other roundings (see models/limits.md). In float32 the result equals
    transformers' bit for bit.
    """

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps, self.is_zero_centred, self.factor = config.eps, config.zero_centred, config.factor
        self.rms_norm, self.fused_add_rms_norm = Bound(rms_norm), Bound(fused_add_rms_norm)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed, residual). With a residual, both arguments change in place; without, the residual is x."""
        if residual is None:
            return self.rms_norm(x, self.weight, self.eps), x
        return self.fused_add_rms_norm(x, residual, self.weight, self.eps)

    @property
    def has_float32_weight(self) -> bool:
        """Whether the weight differs from the stored one."""
        return self.is_zero_centred or self.factor != 1

    def destinations(self, prefix: str) -> Destinations:
        if not self.has_float32_weight:
            return {f"{prefix}.weight": self.weight}
        weight, factor, offset = self.weight, self.factor, int(self.is_zero_centred)
        destination = ConvertedDestination(
            weight.shape, weight.dtype, lambda stored: weight.copy_(stored).add_(offset).mul_(factor)
        )
        return {f"{prefix}.weight": destination}


class LayerNorm(RmsNorm):
    """A norm that subtracts the mean, with or without a bias (Ba et al., 2016)."""

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__(size, config)
        self.bias = empty_parameter(size) if config.bias else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual.add_(x)
        bias = None if self.bias is None else self.bias.float()
        wide = functional.layer_norm(residual.float(), self.weight.shape, self.weight.float(), bias, self.eps)
        return wide.to(x.dtype), residual

    def destinations(self, prefix: str) -> Destinations:
        destinations = super().destinations(prefix)
        if self.bias is not None:
            destinations[f"{prefix}.bias"] = self.bias
        return destinations


def stream_norm(config: DecoderConfig) -> RmsNorm:
    """Return a norm of hidden states."""
    if config.norms.subtracts_mean:
        return LayerNorm(config.hidden_size, config.norms)
    return RmsNorm(config.hidden_size, config.norms)


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), with the configuration's factors.

    inputs: checkpoint names of the projections of x.
    """

    inputs: tuple[str, ...] = ("gate_proj", "up_proj")

    def __init__(self, config: DecoderConfig, size: int) -> None:
        """size: intermediate size."""
        super().__init__()
        self.activation, self.silu_and_mul = config.activation, Bound(silu_and_mul)
        self.gate_factor, self.out_factor = config.mlp_factors
        parts = dict.fromkeys(self.inputs, size)
        if config.fused_mlp:
            parts = {"gate_up_proj": 2 * size}
        self.gate_up_proj = Linear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None = None) -> torch.Tensor:
        """Return the MLP's output; may overwrite x with it."""
        is_long = x.device.type == "cpu" and len(x) > _CPU_ROWS and lora is None
        if not is_long or torch.compiler.is_dynamo_compiling() or len(x) <= (at_once := self._rows_at_once(x)):
            return self._project(x, lora)
        for rows in x.split(at_once):
            rows.copy_(self._project(rows, None))
        return x

    @property
    def has_invariant_rows(self) -> bool:
        """See `Network.has_invariant_rows`. PyTorch's activations differ where a thread's share of the rows ends."""
        return type(self) is GatedMlp and self.activation == "silu"

    def _rows_at_once(self, x: torch.Tensor) -> int:
        if x.dtype != torch.float32:
            return _CPU_ROWS
        fitting = _BETWEEN_BYTES // (2 * self.down_proj.in_features * x.itemsize) // _CPU_ROWS * _CPU_ROWS
        return max(min(fitting, _MOST_CPU_ROWS), _CPU_ROWS)

    def _project(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        gate_up, activated, is_plain = self.gate_up_proj, None, lora is None and self.gate_factor == 1
        if self.activation == "silu" and is_plain and gate_up.packed is None and gate_up.bias is None:
            activated = linear_and_silu(x, gate_up.weight)
        if activated is None:
            between = gate_up(x, lora)
            if self.gate_factor != 1:
                between.chunk(2, -1)[0].mul_(self.gate_factor)
            activated = self.silu_and_mul(between, activation=self.activation)
        projected: torch.Tensor = self.down_proj(activated, lora)
        if self.out_factor != 1:
            projected.mul_(self.out_factor)
        return projected

    def destinations(self, prefix: str) -> Destinations:
        return self.gate_up_proj.destinations(prefix) | self.down_proj.destinations(prefix)


class PlainMlp(GatedMlp):
    """down(activation(up(x))).

    The activations are "gelu_tanh", "relu2" (So et al., 2021) and "xielu" (Huang and Schlag, 2024), which has learned
    parameters. PyTorch computes them, and in float32 where a step of the formula would round.
    """

    inputs = ("up_proj",)

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__(config, size)
        self.learned = nn.ParameterDict()
        if self.activation == "xielu":
            self.learned["alpha_n"], self.learned["alpha_p"] = empty_parameter(1), empty_parameter(1)
            self.learned["beta"], self.learned["eps"] = empty_parameter(), empty_parameter()

    def _project(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(self._activate(self.gate_up_proj(x, lora)), lora)
        return projected

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        if self.activation == "relu2":
            return x.relu_().square_()
        wide = x.float()
        learned = {name: parameter.float() for name, parameter in self.learned.items()}
        beta, eps = learned["beta"], learned["eps"]
        rising = functional.softplus(learned["alpha_p"]) * wide * wide
        falling = (beta + functional.softplus(learned["alpha_n"])) * (torch.expm1(torch.minimum(wide, eps)) - wide)
        out: torch.Tensor = torch.where(wide > 0, rising, falling) + beta * wide
        return out.to(x.dtype)

    def destinations(self, prefix: str) -> Destinations:
        destinations = super().destinations(prefix)
        for name, parameter in self.learned.items():
            destinations[f"{prefix}.act_fn.{name}"] = parameter
        return destinations
