"""A gated delta net in place of a layer's attention, over the cache's state slots."""

from __future__ import annotations

import torch
from torch import nn

from paged.kernels.common.operation import Bound
from paged.kernels.recurrent.causal_conv1d import causal_conv1d
from paged.kernels.recurrent.gated_delta_rule import gated_delta_rule
from paged.kernels.recurrent.gated_rms_norm import gated_rms_norm
from paged.kernels.recurrent.metadata import RecurrentState
from paged.metadata import AttentionMetadata, OutputRows
from paged.models.layers.config import DecoderConfig, RecurrentConfig
from paged.models.layers.decoder import Linear, empty_parameter
from paged.models.loading.weights import ConvertedSlot, WeightSlots


class GatedDeltaNet(nn.Module):
    """A gated delta net (Yang et al., 2024), as in Qwen3-Next and Qwen3.5. state: the layer's slots in the cache."""

    state: RecurrentState

    def __init__(self, config: DecoderConfig, layer: RecurrentConfig) -> None:
        super().__init__()
        self.config = layer
        keys, values, heads = layer.key_size, layer.value_size, layer.num_heads
        parts: tuple[dict[str, int], dict[str, int]]
        if layer.by_head:
            parts = {"in_proj_qkvz": 2 * keys + 2 * values}, {"in_proj_ba": 2 * heads}
        else:
            parts = {"in_proj_qkv": layer.channels, "in_proj_z": values}, {"in_proj_b": heads, "in_proj_a": heads}
        self.in_proj, self.gates_proj = (Linear(config.hidden_size, one) for one in parts)
        self.out_proj = Linear(values, {"out_proj": config.hidden_size})
        self.conv_weight = empty_parameter(layer.channels, layer.conv_width)
        self.A_log, self.dt_bias = empty_parameter(heads), empty_parameter(heads)
        self.norm_weight = empty_parameter(layer.head_dim)
        self.causal_conv1d, self.gated_rms_norm = Bound(causal_conv1d), Bound(gated_rms_norm)
        self.gated_delta_rule = Bound(gated_delta_rule)

    def keep_float32(self) -> None:
        """Convert the decays back to float32, which they are in models of any dtype."""
        self.A_log.data, self.dt_bias.data = self.A_log.float(), self.dt_bias.float()

    def forward(
        self, hidden: torch.Tensor, metadata: AttentionMetadata, outputs: OutputRows | None = None
    ) -> torch.Tensor:
        """Return [num_tokens, hidden_size], or the rows of `outputs`; the states of all tokens are written."""
        layer, batch = self.config, metadata.recurrent
        assert batch is not None
        mixed, z = self._project(self.in_proj, hidden).split_with_sizes((layer.channels, layer.value_size), -1)
        b, a = self._project(self.gates_proj, hidden).chunk(2, -1)
        mixed = self.causal_conv1d(mixed, self.conv_weight, None, self.state, batch=batch)
        x = self.gated_delta_rule(
            mixed, a, b, self.A_log, self.dt_bias, self.state, batch=batch, num_k_heads=layer.num_key_heads
        )
        gated = self.gated_rms_norm(
            x, z.unflatten(-1, x.shape[1:]), self.norm_weight, layer.eps, norm_first=True, activation=layer.gate
        ).flatten(1)
        out: torch.Tensor = self.out_proj(gated if outputs is None else gated[outputs.rows])
        return out

    def _project(self, linear: Linear, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = linear(hidden)
        # Packed weights cannot be sorted at load.
        is_sorted = not self.config.by_head or linear.packed is None
        return out if is_sorted else out[:, self._order(linear).to(out.device)]

    def _order(self, linear: Linear) -> torch.Tensor:
        """Return the stored row of each feature, if all parts of a key head follow each other."""
        layer = self.config
        shared, values = layer.num_heads // layer.num_key_heads, layer.value_size // layer.num_key_heads
        sizes = (layer.key_dim, layer.key_dim, values, values) if linear is self.in_proj else (shared, shared)
        rows = torch.arange(sum(linear.sizes), device="cpu").view(layer.num_key_heads, -1)
        return torch.cat([part.flatten() for part in rows.split(sizes, 1)])

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots: WeightSlots = {
            f"{prefix}.conv1d.weight": self.conv_weight[:, None],
            f"{prefix}.norm.weight": self.norm_weight,
            f"{prefix}.A_log": self.A_log,
            f"{prefix}.dt_bias": self.dt_bias,
            **self.out_proj.weight_slots(prefix),
        }
        for linear in (self.in_proj, self.gates_proj):
            slots |= linear.weight_slots(prefix)
            if self.config.by_head and linear.packed is None:
                (name,) = linear.parts
                slots[f"{prefix}.{name}.weight"] = _sorted(linear.weight, self._order(linear))
        return slots


def _sorted(slot: torch.Tensor, order: torch.Tensor) -> ConvertedSlot:
    def copy(stored: torch.Tensor) -> torch.Tensor:
        return slot.copy_(stored[order.to(stored.device)])

    return ConvertedSlot(slot.shape, slot.dtype, copy)
