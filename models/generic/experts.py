"""Our mixture of experts, which replaces experts behind transformers' experts interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations import moe

from paged.kernels.core.operation import Bound
from paged.kernels.moe.expert_products import run_experts
from paged.kernels.moe.fused_moe import fused_moe
from paged.models.quantization.rounding import as_experts

# Attribute of transformers' experts that holds our experts.
_OURS = "paged_experts"
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class ModuleExperts(nn.Module):
    """`fused_moe` with the weights of a module's experts.

    products: products of gate and up, and of down, if the weights are rounded; the plain weights are then freed.
    """

    products: tuple[Any, Any] | None = None

    def __init__(self, theirs: Any, activation: str) -> None:
        """theirs: experts with `gate_up_proj` [num_experts, 2 * size, hidden_size] and `down_proj`."""
        super().__init__()
        self.activation, self.fused_moe = activation, Bound(fused_moe)
        self.w1, self.w2 = theirs.gate_up_proj, theirs.down_proj

    @staticmethod
    def attach(theirs: Any) -> None:
        """Let transformers' experts use ours, if ours compute the same."""
        has_our_form = getattr(theirs, "has_gate", False) and getattr(theirs, "is_concatenated", False)
        for option in ("has_bias", "is_transposed", "has_post_expert_norm"):
            if getattr(theirs, option, True):
                has_our_form = False
        if not has_our_form or type(theirs)._apply_gate is not moe._default_apply_gate:
            return
        inputs = torch.linspace(-6, 6, 64)
        outputs = theirs.act_fn(inputs)
        for name, activation in _ACTIVATIONS.items():
            if torch.allclose(outputs, activation(inputs), 0, 1e-6):
                setattr(theirs, _OURS, ModuleExperts(theirs, name))

    @staticmethod
    def of(theirs: Any) -> ModuleExperts | None:
        """Return the experts that replace a module's; None if it runs its own code."""
        return getattr(theirs, _OURS, None)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs, [num_tokens, hidden_size], for x of the same shape."""
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.float().contiguous()
        if self.products is not None:
            return run_experts(x, *self.products, weights, ids, activation=self.activation)
        return self.fused_moe(x, self.w1, self.w2, weights, ids, activation=self.activation)

    def round_to(self, form: str, theirs: Any) -> None:
        """Round the weights to int8 or int4 for a CPU, see `as_experts`; `theirs` loses its own."""
        w1, w2 = as_experts(self.w1, form), as_experts(self.w2, form)
        if w1 is None or w2 is None:
            return
        self.rounded = nn.ModuleList((w1, w2))
        self.products = w1.multiply, w2.multiply
        del self.w1, self.w2, theirs.gate_up_proj, theirs.down_proj
