"""Kimi delta attention over the cache's state slots."""

from __future__ import annotations

import torch
from torch import nn

from paged.kernels.core.operation import Bound
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.recurrent.gated_delta_rule import gated_delta_rule
from paged.kernels.recurrent.gated_rms_norm import gated_rms_norm
from paged.kernels.recurrent.metadata import RecurrentBatch
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import Linear, empty_parameter
from paged.models.layers.recurrent import ConvolvedLayer
from paged.models.layers.recurrent_config import KimiDeltaConfig
from paged.models.loading.weights import Destinations


class KimiDelta(ConvolvedLayer):
    """Kimi delta attention (Moonshot AI, "Kimi Linear", 2025).

    The state decays by a factor for each channel of a key. The decay and the output gate are made by one projection
    each, or by two with a small size between them.

    Shapes: T tokens, H heads, K elements of a query, key or value.
    """

    float32_names = ("A_log", "dt_bias")
    A_log: nn.Parameter  # [H], logarithms of decay rates
    dt_bias: nn.Parameter  # [H * K]

    def __init__(self, config: DecoderConfig, layer: KimiDeltaConfig) -> None:
        super().__init__(layer)
        self.config, size, hidden = layer, layer.value_size, config.hidden_size
        self.dt_bias = empty_parameter(size)
        self.in_proj = Linear(hidden, {"q_proj": size, "k_proj": size, "v_proj": size})
        # Projections of the input for beta, the decay and the gate, by their sizes.
        narrow, wide = {"b_proj": layer.num_heads}, dict[str, int]()
        self.decay_proj: Linear | None = None
        self.gate_proj: Linear | None = None
        if layer.decay_rank is None:
            wide["f_proj"] = size
        else:
            narrow["f_a_proj"] = layer.decay_rank
            self.decay_proj = Linear(layer.decay_rank, {"f_b_proj": size})
        if layer.gate_rank is None:
            wide["g_proj"] = size
        else:
            narrow["g_a_proj"] = layer.gate_rank
            self.gate_proj = Linear(layer.gate_rank, {"g_b_proj": size})
        self.gates_proj = Linear(hidden, narrow)
        self.wide_gates_proj: Linear | None = None
        if wide:
            self.wide_gates_proj = Linear(hidden, wide)
        self.out_proj = Linear(size, {"o_proj": hidden})
        self.norm_weight = empty_parameter(layer.head_dim)
        self.gated_rms_norm, self.gated_delta_rule = Bound(gated_rms_norm), Bound(gated_delta_rule)

    def mix(self, hidden: torch.Tensor, batch: RecurrentBatch, lora: LoraBatch | None) -> torch.Tensor:
        layer = self.config
        heads = layer.num_heads, layer.head_dim

        # Project.
        mixed = self.in_proj(hidden, lora)  # [T, 3 * H * K]
        parts = _by_name(self.gates_proj, hidden)
        if self.wide_gates_proj is not None:
            parts |= _by_name(self.wide_gates_proj, hidden)
        if self.decay_proj is None:
            decay = parts["f_proj"]  # [T, H * K], as gate
        else:
            decay = self.decay_proj(parts["f_a_proj"])
        if self.gate_proj is None:
            gate = parts["g_proj"]
        else:
            gate = self.gate_proj(parts["g_a_proj"])

        # Convolve, scan and gate.
        x = self.gated_delta_rule(
            self.convolve(mixed, batch),
            decay.unflatten(-1, heads),
            parts["b_proj"],
            self.A_log,
            self.dt_bias.view(heads),
            self.state,
            batch=batch,
            num_k_heads=layer.num_key_heads,
            lower_bound=layer.lower_bound,
        )  # [T, H, K]
        return self.gated_rms_norm(
            x, gate.unflatten(-1, heads), self.norm_weight, layer.eps, norm_first=True, activation="sigmoid"
        ).flatten(1)

    def destinations(self, prefix: str) -> Destinations:
        destinations = {**super().destinations(prefix), f"{prefix}.o_norm.weight": self.norm_weight}
        if self.config.splits_conv:
            del destinations[f"{prefix}.conv1d.weight"]
            for name, part in zip("qkv", self.conv_weight[:, None].chunk(3), strict=True):
                destinations[f"{prefix}.{name}_conv1d.weight"] = part
        if self.config.wide_rates:
            destinations[f"{prefix}.A_log"] = self.A_log[None, None, :, None]
        for linear in (self.in_proj, self.gates_proj, self.wide_gates_proj, self.decay_proj, self.gate_proj):
            if linear is not None:
                destinations |= linear.destinations(prefix)
        return destinations


def _by_name(linear: Linear, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts of a product of x by the names of their projections."""
    return dict(zip(linear.parts, linear(x).split_with_sizes(linear.sizes, -1), strict=True))
