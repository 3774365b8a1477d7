"""Time mixing and channel mixing of RWKV-7 over the cache's state slots."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.core.operation import Bound
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.recurrent.causal_conv1d import causal_conv1d
from paged.kernels.recurrent.gated_delta_rule import gated_delta_rule
from paged.kernels.recurrent.metadata import RecurrentBatch, RecurrentState
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import Linear, PlainMlp, empty_parameter
from paged.models.layers.recurrent import RecurrentLayer
from paged.models.layers.recurrent_config import Rwkv7Config
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows

# A logarithm of a decay lies between this and 0.
_LEAST_DECAY = -math.exp(-0.5)
# Names of the shifted inputs in checkpoints, in the order of a stacked tensor.
_SHIFTED = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")


class TokenShift:
    """The input of the token before, which is a convolution whose taps are 1 and 0. The cache keeps one row for it."""

    def __init__(self) -> None:
        self.causal_conv1d = Bound(causal_conv1d)

    def set_state(self, state: RecurrentState) -> None:
        """Take the slots of the rows."""
        self.state = state
        by_tap = torch.zeros(2, state.conv.shape[2], dtype=state.conv.dtype, device=state.conv.device)
        by_tap[0] = 1
        self.taps = by_tap.t()  # [size, 2], by tap in memory like the weights of other convolutions

    def change(self, x: torch.Tensor, batch: RecurrentBatch) -> torch.Tensor:
        """Return the previous token's x minus x, [T, size]; before the first token, x is 0."""
        before: torch.Tensor = self.causal_conv1d(x, self.taps, None, self.state, batch=batch, activation=None)
        return before.sub_(x)


class Rwkv7TimeMix(RecurrentLayer):
    """Time mixing of RWKV-7 (Peng et al., 2025): a delta rule with free erase vectors and a decay for each channel.

    Shapes: T tokens, D hidden size, H heads, K elements of a query or key, V of a value.
    """

    float32_names = ("decay_bias",)
    decay_bias: nn.Parameter  # [H * K]

    def __init__(self, config: DecoderConfig, layer: Rwkv7Config) -> None:
        super().__init__(layer)
        self.config, hidden = layer, config.hidden_size
        keys, values = layer.key_size, layer.value_size
        self.shift = TokenShift()
        self.shifts = empty_parameter(len(_SHIFTED), hidden)
        self.decay_bias = empty_parameter(keys)
        self.erase_weight = empty_parameter(keys)  # of keys that erase
        self.rate_weight = empty_parameter(keys)  # of the erase rate, in keys that write
        self.bonus_weight = empty_parameter(layer.num_heads, layer.key_dim)
        self.norm_weight, self.norm_bias = empty_parameter(values), empty_parameter(values)
        self.r_proj = Linear(hidden, {"r_proj": keys})
        self.k_proj = Linear(hidden, {"k_proj": keys})
        self.v_proj = Linear(hidden, {"v_proj": values})
        self.out_proj = Linear(values, {"o_proj": hidden})
        self.decay_in, self.decay_out = _low_rank("w_lora", hidden, layer.decay_rank, keys)
        self.erase_in, self.erase_out = _low_rank("a_lora", hidden, layer.erase_rank, keys, bias=True)
        self.gate_in, self.gate_out = _low_rank("g_lora", hidden, layer.gate_rank, values)
        self.value_in: Linear | None = None
        self.value_out: Linear | None = None
        if not layer.is_first:
            self.value_in, self.value_out = _low_rank("v_lora", hidden, layer.value_rank, values, bias=True)
        self.gated_delta_rule = Bound(gated_delta_rule)

    def set_state(self, state: RecurrentState) -> None:
        super().set_state(state)
        self.shift.set_state(state)
        self.log_rates = torch.zeros(self.config.num_heads, device=state.conv.device)  # the decay has no rate

    def forward(
        self,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
        first_values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, D]. first_values: [T, H * V], which the first layer fills and later ones read."""
        assert metadata.recurrent is not None
        assert first_values is not None
        assert outputs is None, "the MLP's shift needs all rows"
        mixed = self._mix_values(hidden, metadata.recurrent, metadata.lora, first_values)
        out: torch.Tensor = self.out_proj(mixed, metadata.lora)
        return out

    def _mix_values(
        self, hidden: torch.Tensor, batch: RecurrentBatch, lora: LoraBatch | None, first_values: torch.Tensor
    ) -> torch.Tensor:
        layer = self.config
        heads = layer.num_heads, layer.key_dim

        # Project.
        change = self.shift.change(hidden, batch)
        shifted = torch.addcmul(hidden, change, self.shifts[:, None])  # [6, T, D]
        for_r, for_decay, for_k, for_v, for_erase, for_gate = shifted.unbind()
        r = self.r_proj(for_r, lora)  # [T, H * K], as k
        k = self.k_proj(for_k, lora)
        v = self.v_proj(for_v, lora)  # [T, H * V], as gate
        decay = self.decay_out(self.decay_in(for_decay).tanh_())  # [T, H * K], before its bias
        erase_rate = self.erase_out(self.erase_in(for_erase)).sigmoid_()  # [T, H * K]
        gate = self.gate_out(self.gate_in(for_gate).sigmoid_())
        if self.value_in is None or self.value_out is None:
            first_values.copy_(v)
        else:
            v = torch.lerp(v, first_values, self.value_out(self.value_in(for_v)).sigmoid_())

        # Scan.
        erased = self._normalised((k * self.erase_weight).unflatten(-1, heads).float())  # [T, H, K]
        k = torch.addcmul(k, k * (erase_rate - 1), self.rate_weight)
        x = self.gated_delta_rule(
            torch.cat([r, k, v], -1),
            decay.unflatten(-1, heads),
            None,
            self.log_rates,
            self.decay_bias.view(heads),
            self.state,
            batch=batch,
            num_k_heads=layer.num_heads,
            lower_bound=_LEAST_DECAY,
            erase_read=-erased,
            erase_write=erased * erase_rate.unflatten(-1, heads),
        )  # [T, H, V]

        # Normalise each head, add the bonus of the token itself, and gate.
        normed = functional.group_norm(
            x.flatten(1).float(), layer.num_heads, self.norm_weight.float(), self.norm_bias.float(), layer.eps
        )
        weights = ((r * k).unflatten(-1, heads).float() * self.bonus_weight).sum(-1, keepdim=True)  # [T, H, 1]
        bonus = weights * v.unflatten(-1, (layer.num_heads, layer.head_dim))  # [T, H, V]
        mixed: torch.Tensor = (normed + bonus.flatten(1)).to(gate.dtype)
        return mixed.mul_(gate)

    def _normalised(self, keys: torch.Tensor) -> torch.Tensor:
        if self.config.divides_by_sum:
            return keys * (keys.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        return functional.normalize(keys, dim=-1)

    def destinations(self, prefix: str) -> Destinations:
        destinations = super().destinations(prefix)
        del destinations[f"{prefix}.decay_bias"]
        destinations |= {
            f"{prefix}.w_lora.lora.2.bias": self.decay_bias,
            f"{prefix}.k_k": self.erase_weight,
            f"{prefix}.k_a": self.rate_weight,
            f"{prefix}.r_k": self.bonus_weight,
            f"{prefix}.g_norm.weight": self.norm_weight,
            f"{prefix}.g_norm.bias": self.norm_bias,
        }
        if self.config.stacks_shifts:
            destinations[f"{prefix}.x_x"] = self.shifts
        else:
            for name, weight in zip(_SHIFTED, self.shifts, strict=True):
                destinations[f"{prefix}.{name}"] = weight[None, None]
        for linear in (self.r_proj, self.k_proj, self.v_proj, *self._low_rank_projections()):
            destinations |= linear.destinations(prefix)
        return destinations

    def _low_rank_projections(self) -> list[Linear]:
        linears = [self.decay_in, self.decay_out, self.erase_in, self.erase_out, self.gate_in, self.gate_out]
        if self.value_in is not None and self.value_out is not None:
            linears += [self.value_in, self.value_out]
        return linears


class Rwkv7ChannelMix(PlainMlp):
    """Channel mixing of RWKV-7: an MLP whose input is shifted by a token."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__(config, size)
        self.shift, self.shift_weight = TokenShift(), empty_parameter(config.hidden_size)

    def shifted(self, x: torch.Tensor, batch: RecurrentBatch) -> torch.Tensor:
        """Return the MLP's input for all tokens of a step, [T, D]."""
        return torch.addcmul(x, self.shift.change(x, batch), self.shift_weight)

    def destinations(self, prefix: str) -> Destinations:
        return {**super().destinations(prefix), f"{prefix}.x_k": self.shift_weight}


def _low_rank(name: str, hidden: int, rank: int, size: int, *, bias: bool = False) -> tuple[Linear, Linear]:
    """Return projections from the hidden size to a rank and from there to `size`."""
    return Linear(hidden, {f"{name}.lora.0": rank}), Linear(rank, {f"{name}.lora.2": size}, bias=bias)
