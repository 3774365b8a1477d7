"""The mixtures of experts that bench_moe times: published sizes, numbers of tokens, and how the tokens spread."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from paged.bench.limits import Cost, moe_cost

ROUTINGS = ("balanced", "zipf")
# The sizes that goals are set for come first, so that a budget that runs out costs little.
TOKENS = (1, 16384, 128, 32768, 16, 1024, 4, 256, 64, 4096, 2, 8, 32, 512, 2048, 8192)


@dataclass(frozen=True)
class MoeModel:
    """num_local_experts: those of one rank, the first ones."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_local_experts: int

    @property
    def is_whole(self) -> bool:
        return self.num_local_experts == self.num_experts


MODELS = (
    MoeModel("Qwen3-30B-A3B", 128, 8, 2048, 768, 128),
    MoeModel("Mixtral-8x7B", 8, 2, 4096, 14336, 8),
    MoeModel("Qwen3-Next-80B-A3B", 512, 10, 2048, 512, 512),
    MoeModel("DeepSeek-V3-rank-of-8", 256, 8, 7168, 2048, 32),
)


@dataclass(frozen=True)
class MoeLayer:
    """The weights of one layer; expert_map where it holds a rank's part."""

    w1: torch.Tensor
    w2: torch.Tensor
    expert_map: torch.Tensor | None


@dataclass(frozen=True)
class MoeBatch:
    """One batch's inputs: hidden states and where each token goes."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


@dataclass(frozen=True)
class MoeCase:
    """routing: "balanced" draws experts evenly, "zipf" the i-th with a probability that falls as 1 / i."""

    model: MoeModel
    num_tokens: int
    routing: str

    @property
    def name(self) -> str:
        return f"{self.model.name}.{self.routing}.{self.num_tokens}"

    def small(self) -> MoeCase:
        """A CPU's sizes: a sixteenth of the widths and of the experts, at most 64 tokens."""
        model = self.model
        narrow = replace(
            model,
            num_experts=max(model.num_experts // 16, 2 * model.top_k),
            hidden_size=model.hidden_size // 16,
            intermediate_size=model.intermediate_size // 16,
            num_local_experts=max(model.num_local_experts // 16, 1 if not model.is_whole else 2 * model.top_k),
        )
        return replace(self, model=narrow, num_tokens=min(self.num_tokens, 64))

    def layer(self, device: torch.device, dtype: torch.dtype) -> MoeLayer:
        """Random weights that keep the variance of what passes through them."""
        model = self.model
        sizes = (model.num_local_experts, 2 * model.intermediate_size, model.hidden_size)
        w1 = torch.randn(sizes, device=device, dtype=dtype).mul_(1 / math.sqrt(model.hidden_size))
        sizes = (model.num_local_experts, model.hidden_size, model.intermediate_size)
        w2 = torch.randn(sizes, device=device, dtype=dtype).mul_(1 / math.sqrt(model.intermediate_size))
        expert_map = None
        if not model.is_whole:
            ids = torch.arange(model.num_experts, device=device, dtype=torch.int32)
            expert_map = torch.where(ids < model.num_local_experts, ids, -1)
        return MoeLayer(w1, w2, expert_map)

    def batch(self, device: torch.device, dtype: torch.dtype) -> MoeBatch:
        """Distinct experts a token, drawn without replacement (the largest of logarithms plus Gumbel noise)."""
        model = self.model
        scores = -torch.empty(self.num_tokens, model.num_experts, device=device).exponential_().log()
        if self.routing == "zipf":
            # A random order of popularity, so that no rank holds all the popular ones.
            scores -= (torch.randperm(model.num_experts, device=device) + 1).log()
        weights, ids = scores.topk(model.top_k)
        hidden_states = torch.randn(self.num_tokens, model.hidden_size, device=device, dtype=dtype)
        return MoeBatch(hidden_states, weights.softmax(-1), ids.int())

    def histogram(self, batch: MoeBatch) -> list[int]:
        """Entries of each expert that is here."""
        counts = torch.bincount(batch.topk_ids.flatten(), minlength=self.model.num_experts)
        histogram: list[int] = counts[: self.model.num_local_experts].tolist()
        return histogram

    def cost(self, batch: MoeBatch) -> Cost:
        model = self.model
        return moe_cost(
            self.histogram(batch),
            num_tokens=self.num_tokens,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            element_size=batch.hidden_states.element_size(),
        )


CASES = tuple(MoeCase(model, num_tokens, routing) for routing in ROUTINGS for num_tokens in TOKENS for model in MODELS)
