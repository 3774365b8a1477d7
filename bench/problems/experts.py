"""Layers of experts and batches for them: sizes of a model, weights, and the spread of tokens over experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import paged
from paged.bench.limits import Cost
from paged.bench.problems.formats import Format, quantize
from paged.bench.timing import Call
from paged.kernels.moe.weights import ExpertLinear


@dataclass(frozen=True)
class MoeModel:
    """The sizes of a layer. num_local_experts: number of experts of one rank, which has the first ones."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_local_experts: int

    @property
    def is_whole(self) -> bool:
        return self.num_local_experts == self.num_experts


@dataclass(frozen=True)
class MoeLayer:
    """The weights of one layer. expert_map: None unless the layer holds one rank's part."""

    gate_up: ExpertLinear
    down: ExpertLinear
    expert_map: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `fused_moe`."""
        return {"expert_map": self.expert_map, **self.gate_up.options("w1"), **self.down.options("w2")}

    def arguments(self, batch: MoeBatch) -> list[torch.Tensor]:
        """Positional arguments of `fused_moe`."""
        return [batch.hidden_states, self.gate_up.w, self.down.w, batch.topk_weights, batch.topk_ids]

    def call(self, batch: MoeBatch) -> Call:
        return lambda: paged.fused_moe(*self.arguments(batch), **self.options)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights and scales, as they are stored."""
        num_bytes = 0
        for tensor in (*self.gate_up, *self.down):
            if tensor is not None:
                num_bytes += tensor[0].nbytes
        return num_bytes


@dataclass(frozen=True)
class MoeBatch:
    """One batch's inputs: hidden states, and the experts of each token."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def rows(self, tokens: slice) -> MoeBatch:
        """Return some of the batch's tokens as a batch."""
        return MoeBatch(self.hidden_states[tokens], self.topk_weights[tokens], self.topk_ids[tokens])


@dataclass(frozen=True)
class MoeCase:
    """A batch for the experts of a model.

    routing: "balanced" draws experts evenly, "zipf" draws the i-th with a probability that falls as 1 / i. format:
    format of quantised weights; None for weights of the hidden states' dtype.
    """

    model: MoeModel
    num_tokens: int
    routing: str
    format: Format | None = None

    @property
    def name(self) -> str:
        model = self.model.name
        if self.format is not None:
            model = f"{model}-{self.format}"
        return f"{model}.{self.routing}.{self.num_tokens}"

    def small(self) -> MoeCase:
        """Return the case at a CPU's size: a sixteenth of the widths and of the experts, at most 64 tokens.

        Quantised weights keep an eighth of the widths, and groups keep a quarter of their columns, so that a row has
        several groups.
        """
        model, part, layout = self.model, 16, self.format
        if layout is not None:
            part = 8
            if layout.kind.startswith("int"):
                layout = layout._replace(group_k=layout.group_k // 4)
        fewest_local_experts = 1
        if model.is_whole:
            fewest_local_experts = 2 * model.top_k
        narrow = replace(
            model,
            name=f"{model.name}/{part}",
            num_experts=max(model.num_experts // 16, 2 * model.top_k),
            hidden_size=model.hidden_size // part,
            intermediate_size=model.intermediate_size // part,
            num_local_experts=max(model.num_local_experts // 16, fewest_local_experts),
        )
        return replace(self, model=narrow, num_tokens=min(self.num_tokens, 64), format=layout)

    def layer(self, device: torch.device, dtype: torch.dtype) -> MoeLayer:
        """Make random weights that keep the variance of activations."""
        model = self.model
        num_experts, hidden_size, intermediate_size = (
            model.num_local_experts,
            model.hidden_size,
            model.intermediate_size,
        )
        w1 = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device, dtype=dtype)
        w2 = torch.randn(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
        w1.div_(math.sqrt(hidden_size))
        w2.div_(math.sqrt(intermediate_size))
        expert_map = None
        if not model.is_whole:
            ids = torch.arange(model.num_experts, device=device, dtype=torch.int32)
            expert_map = torch.where(ids < model.num_local_experts, ids, -1)
        if self.format is None:
            return MoeLayer(ExpertLinear(w1), ExpertLinear(w2), expert_map)
        return MoeLayer(quantize(w1, self.format), quantize(w2, self.format), expert_map)

    def batch(self, device: torch.device, dtype: torch.dtype) -> MoeBatch:
        """Draw distinct experts for each token: the largest logarithms of probabilities plus Gumbel noise."""
        model = self.model
        scores = -torch.empty(self.num_tokens, model.num_experts, device=device).exponential_().log()
        if self.routing == "zipf":
            # Give experts a random order of popularity: otherwise one rank would hold all popular experts.
            scores -= (torch.randperm(model.num_experts, device=device) + 1).log()
        weights, ids = scores.topk(model.top_k)
        hidden_states = torch.randn(self.num_tokens, model.hidden_size, device=device, dtype=dtype)
        return MoeBatch(hidden_states, weights.softmax(-1), ids.int())

    def histogram(self, batch: MoeBatch) -> list[int]:
        """Return the number of entries of each local expert."""
        counts = torch.bincount(batch.topk_ids.flatten(), minlength=self.model.num_experts)
        histogram: list[int] = counts[: self.model.num_local_experts].tolist()
        return histogram

    def cost(self, layer: MoeLayer, batch: MoeBatch) -> Cost:
        """Return the cost of the three products of every routed entry, without padding: F = 6 (T K) H I.

        Weights of experts with entries are read once; hidden states are read and written once. Activations between the
        products and the summed parts are overhead and do not count.
        """
        histogram, model = self.histogram(batch), self.model
        active = sum(entries > 0 for entries in histogram)
        num_bytes = active * layer.expert_bytes + 2 * batch.hidden_states.nbytes
        return Cost(6 * sum(histogram) * model.hidden_size * model.intermediate_size, num_bytes)
