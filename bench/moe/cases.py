"""Cases of the MoE benchmark: published sizes of models, numbers of tokens, and how the tokens spread."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import paged
from paged.bench.limits import Cost
from paged.bench.moe.formats import FORMATS, MXFP4, NVFP4, Format, quantize
from paged.bench.timing import Call
from paged.kernels.moe.weights import ExpertLinear

ROUTINGS = ("balanced", "zipf")
# The sizes that goals are set for come first, so that a budget that runs out costs little.
TOKENS = (1, 128, 16384, 32768, 16, 1024, 4, 256, 64, 4096, 2, 8, 32, 512, 2048, 8192)


@dataclass(frozen=True)
class MoeModel:
    """The sizes of a layer. num_local_experts: those of one rank, the first ones."""

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
# Of the first model with quantised weights. 128 columns a group are usual in GPTQ's and AWQ's checkpoints.
QUANTIZED_TOKENS = (1, 16384, 128, 16, 1024)
QUANTIZED_FORMATS = (
    FORMATS["e4m3 block"],
    FORMATS["e4m3 channel"],
    FORMATS["e4m3 tensor"],
    Format("int8", 1, 128),
    Format("int4", 1, 128),
    Format("int4", 1, 128, zeros=True, in_words=True),
    NVFP4,
)
# With experts in MXFP4, as it is published.
GPT_OSS = MoeModel("gpt-oss-20b", 32, 4, 2880, 2880, 32)
# Run as it is, for a comparison of experts on a CPU.
CPU_MODEL = MoeModel("small-cpu", 16, 4, 256, 256, 16)


@dataclass(frozen=True)
class MoeLayer:
    """The weights of one layer. expert_map: None unless the layer holds a rank's part."""

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
        """Of one expert's weights and scales, as they are stored."""
        num_bytes = 0
        for tensor in (*self.gate_up, *self.down):
            if tensor is not None:
                num_bytes += tensor[0].nbytes
        return num_bytes


@dataclass(frozen=True)
class MoeBatch:
    """One batch's inputs: hidden states and where each token goes."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def rows(self, tokens: slice) -> MoeBatch:
        """Some of its tokens."""
        return MoeBatch(self.hidden_states[tokens], self.topk_weights[tokens], self.topk_ids[tokens])


@dataclass(frozen=True)
class MoeCase:
    """A batch for the experts of a model.

    routing: "balanced" draws experts evenly, "zipf" the i-th with a probability that falls as 1 / i. format: of
    quantised weights, None for those of the hidden states' dtype.
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
        """A CPU's sizes: a sixteenth of the widths and of the experts, at most 64 tokens.

        Quantised weights keep an eighth of the widths, and groups of a row a quarter of their columns, so that there
        are several groups.
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
        """Return the number of entries of each local expert."""
        counts = torch.bincount(batch.topk_ids.flatten(), minlength=self.model.num_experts)
        histogram: list[int] = counts[: self.model.num_local_experts].tolist()
        return histogram

    def cost(self, layer: MoeLayer, batch: MoeBatch) -> Cost:
        """The three products of every routed entry, without padding: F = 6 (T K) H I.

        Weights of experts that got entries are read once, hidden states read and written once; activations between the
        products and the parts that are summed after them are overhead and do not count.
        """
        histogram, model = self.histogram(batch), self.model
        active = sum(entries > 0 for entries in histogram)
        num_bytes = active * layer.expert_bytes + 2 * batch.hidden_states.nbytes
        return Cost(6 * sum(histogram) * model.hidden_size * model.intermediate_size, num_bytes)


def _cases() -> tuple[MoeCase, ...]:
    """Return the cases by importance; the first three are among those of every model, too."""
    cases = [MoeCase(MODELS[0], num_tokens, "balanced") for num_tokens in TOKENS[:3]]
    for routing in ROUTINGS:
        for num_tokens in TOKENS:
            cases += [MoeCase(model, num_tokens, routing) for model in MODELS]
    for num_tokens in QUANTIZED_TOKENS:
        cases += [MoeCase(MODELS[0], num_tokens, "balanced", layout) for layout in QUANTIZED_FORMATS]
    cases += [MoeCase(GPT_OSS, num_tokens, "balanced", MXFP4) for num_tokens in QUANTIZED_TOKENS]
    return tuple(dict.fromkeys(cases))


CASES = _cases()
CPU_CASES = tuple(MoeCase(CPU_MODEL, 2**exponent, "balanced") for exponent in range(10))
