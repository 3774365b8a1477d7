"""The layer of experts that stands in for a decoder's MLP."""

from __future__ import annotations

import torch
from torch import nn

from paged.kernels.lora.batch import LoraBatch
from paged.kernels.moe.fused_moe import fused_moe, moe_block_size
from paged.kernels.moe.route_and_align import route_and_align
from paged.kernels.moe.route_tokens import route_tokens
from paged.kernels.moe.routing import Routing
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.decoder import Linear, empty_parameter
from paged.models.loading.weights import WeightSlots


class SparseMoe(nn.Module):
    """A router that sends every token to a few of many gated MLPs, which take no adapters."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.config, self.activation = moe, config.activation
        hidden_size, num_experts, size = config.hidden_size, moe.num_experts, moe.intermediate_size
        self.router = Linear(hidden_size, {moe.router_name: num_experts}, bias=moe.bias)
        self.w1 = empty_parameter(num_experts, 2 * size, hidden_size)
        self.w2 = empty_parameter(num_experts, hidden_size, size)
        self.w1_bias = empty_parameter(num_experts, 2 * size) if moe.bias else None
        self.w2_bias = empty_parameter(num_experts, hidden_size) if moe.bias else None
        self.routing = Routing(moe.top_k, moe.renormalize)
        self.ticket: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, lora: LoraBatch | None = None) -> torch.Tensor:
        logits = self.router(x)
        block_size = moe_block_size(len(x), self.routing.top_k, self.w2)
        aligned = None
        if block_size is None:
            topk_weights, topk_ids = route_tokens(logits, **vars(self.routing))
        else:
            if self.ticket is None:  # made with the weights it would be memory without a value
                self.ticket = torch.zeros(1, dtype=torch.int32, device=x.device)
            topk_weights, topk_ids, aligned = route_and_align(logits, self.routing, block_size, ticket=self.ticket)
        return fused_moe(
            x,
            self.w1,
            self.w2,
            topk_weights,
            topk_ids,
            activation=self.activation,
            w1_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            interleaved=self.config.interleaved,
            aligned=aligned,
        )

    def weight_slots(self, prefix: str) -> WeightSlots:
        names = self.config
        slots = self.router.weight_slots(f"{prefix}.{names.block_name}")
        for expert in range(names.num_experts):
            expert_prefix = f"{prefix}.{names.block_name}.experts.{expert}"
            gate, up = self.w1[expert].chunk(2)
            slots[f"{expert_prefix}.{names.gate_name}.weight"] = gate
            slots[f"{expert_prefix}.{names.up_name}.weight"] = up
            slots[f"{expert_prefix}.{names.down_name}.weight"] = self.w2[expert]
        return slots
