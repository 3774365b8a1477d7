"""The mixture of experts that replaces a decoder's MLP."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core.device import backend, forward_backend
from paged.kernels.core.operation import Bound
from paged.kernels.cpu.quantization.experts import ExpertProducts
from paged.kernels.layers.linear import linear
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.moe.definition import expert_scores
from paged.kernels.moe.expert_products import add_gated, run_experts
from paged.kernels.moe.fused_moe import fused_moe, has_invariant_rows, moe_block_size, token_counts
from paged.kernels.moe.route_and_align import route_and_align
from paged.kernels.moe.route_tokens import route_tokens
from paged.kernels.moe.routing import Routing
from paged.kernels.moe.weights import ExpertLinear
from paged.kernels.quantization.packing import FP8_BLOCK
from paged.models.layers.config import DecoderConfig, MoeConfig, NormConfig
from paged.models.layers.modules import GatedMlp, Linear, PlainMlp, RmsNorm, empty_parameter
from paged.models.loading.weights import ConvertedDestination, Destinations, join_destinations
from paged.models.quantization.layouts import Fp4, Quantization
from paged.models.quantization.packed_weights import CpuExperts, Mxfp4Experts, PackedWeights, experts_for_cpu
from paged.models.quantization.rounding import as_experts
from paged.step.batch import CapturedStates


class SparseMoe(nn.Module):
    """A router that sends each token to a few MLPs, and optionally one shared MLP for all tokens.

    Only the shared MLP takes adapters. inputs: names of an expert's projections of x in a checkpoint. stacked_names:
    names of tensors that stack a weight of all experts.
    """

    routing: Routing
    expert_map: torch.Tensor | None = None
    ticket: torch.Tensor
    gate_up: ExpertLinear
    down: ExpertLinear
    products: tuple[ExpertProducts, ExpertProducts] | None = None
    biases: tuple[torch.Tensor | None, torch.Tensor | None]  # float32, beside `products`
    rounded: str | None = None  # the format that `round_to` was given
    chosen: list[torch.Tensor] | None = None  # collects expert ids of each call, see `capture_experts`

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.config, self.is_gated = moe, config.gated
        self.activation = moe.activation or config.activation
        mlp: type[GatedMlp] = GatedMlp
        self.inputs: tuple[str, ...] = (moe.gate_name, moe.up_name)
        self.stacked_names = {"w1": "gate_up_proj", "w2": "down_proj"}
        if not config.gated:
            mlp = PlainMlp
            self.inputs = (moe.up_name,)
            self.stacked_names["w1"] = "up_proj"
        self.route_tokens, self.route_and_align = Bound(route_tokens), Bound(route_and_align)
        self.fused_moe = Bound(fused_moe)
        hidden_size, num_experts, size = config.hidden_size, moe.num_experts, moe.intermediate_size
        self.expert_width = width = moe.latent_size or hidden_size
        self.router = Linear(hidden_size, {moe.router_name: num_experts}, bias=moe.bias)
        self.correction_bias = empty_parameter(num_experts) if moe.correction_bias else None
        self.expert_scale = empty_parameter(num_experts) if moe.expert_scale else None
        self.token_table: torch.Tensor | None = None
        if moe.token_table is not None:
            table = torch.empty(config.vocab_size, moe.top_k, dtype=torch.int32)
            self.token_table = nn.Parameter(table, requires_grad=False)
        experts = Mxfp4Experts if moe.is_mxfp4 else empty_parameter
        num_held = len(moe.experts)
        self.w1 = experts(num_held, len(self.inputs) * size, width)
        self.w2 = experts(num_held, width, size)
        self.w1_bias = empty_parameter(num_held, len(self.inputs) * size) if moe.bias else None
        self.w2_bias = empty_parameter(num_held, width) if moe.bias else None
        self.to_latent: Linear | None = None
        self.from_latent: Linear | None = None
        if moe.latent_size is not None:
            self.to_latent = Linear(hidden_size, {"fc1_latent_proj": width})
            self.from_latent = Linear(width, {"fc2_latent_proj": hidden_size})
        self.latent_norm: RmsNorm | None = None
        if moe.latent_eps is not None:
            self.latent_norm = RmsNorm(width, NormConfig(eps=moe.latent_eps))
        if moe.shared_size:
            self.add_module(moe.shared_name, mlp(config, moe.shared_size))
        self.shared_gate = Linear(hidden_size, {moe.shared_gate: 1}) if moe.shared_gate else None

    @property
    def shared(self) -> GatedMlp | None:
        """The shared MLP; the attribute has its checkpoint name, so that adapters find it."""
        if not self.config.shared_size:
            return None
        return cast("GatedMlp", getattr(self, self.config.shared_name))

    def quantize(self, prefix: str, quantization: Quantization) -> None:
        """Hold experts packed, if the checkpoint packs them; all experts of a layer must have one format.

        Raises:
            UnsupportedError: formats differ, or `fused_moe` does not take the format.
            CheckpointError: the sizes are not multiples of groups or words.
        """
        moe = self.config
        kinds = (
            ("w1", self.inputs, moe.intermediate_size),
            ("w2", (moe.down_name,), self.expert_width),
        )
        for attribute, names, rows in kinds:
            of_expert_0 = [f"{prefix}.experts.0.{name}" for name in names]
            layout = quantization.common_layout(of_expert_0)
            if layout is None:
                continue
            if moe.stacked:
                # A quantisation that names classes of modules does not cover a stacked tensor, because the tensor is
                # a parameter. It is packed only if the file packs it.
                stacked = f"{prefix}.experts.{self.stacked_names[attribute]}"
                if quantization.plain is None or stacked in quantization.plain:
                    continue
                raise UnsupportedError(
                    f"{prefix}.experts: quantised in one tensor, expected a tensor for each projection"
                )
            columns = getattr(self, attribute).shape[2]
            layout.check(of_expert_0[0], rows, columns)
            if layout.has_order or (layout.in_blocks and rows % FP8_BLOCK):
                raise UnsupportedError(
                    f"{of_expert_0[0]}: {rows} rows of {layout.form}, supported are experts in their own order, and in "
                    f"blocks multiples of {FP8_BLOCK} rows"
                )
            if layout.form == "e4m3" and not layout.quantizes_input:  # `fused_moe` rounds the input of e4m3 weights
                raise UnsupportedError(
                    f"{of_expert_0[0]}: e4m3 weights without input_activations, expected e4m3 for both in experts"
                )
            if isinstance(layout, Fp4):
                layout = replace(layout, in_experts=True)
            delattr(self, attribute)
            setattr(self, attribute, PackedWeights(layout, columns, [rows] * len(names) * len(moe.experts)))

    def keep_float32(self) -> None:
        """Convert the parameters that are float32 in models of any dtype back to float32."""
        if self.correction_bias is not None:
            self.correction_bias.data = self.correction_bias.float()
        if self.config.float32_router:
            self.router.float()

    def derive_from_weights(self) -> None:
        """Make the routing and the experts' weights; call it when the weights are at their final addresses."""
        moe, device = self.config, self.router.weight.device
        bias: torch.Tensor | None = self.correction_bias
        if bias is None and moe.sums_two_best and moe.num_expert_groups > 1:
            bias = torch.zeros(moe.num_experts, device=device)  # a bias makes each group count its two best experts
        self.routing = Routing(
            moe.top_k,
            moe.renormalize,
            moe.scoring,
            bias,
            moe.num_expert_groups,
            moe.topk_groups,
            moe.routed_scaling_factor,
        )
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        if moe.held is not None:
            self.expert_map = torch.full((moe.num_experts,), -1, dtype=torch.int32, device=device)
            self.expert_map[list(moe.experts)] = torch.arange(len(moe.experts), dtype=torch.int32, device=device)
        self._use_held_weights()

    @property
    def is_packed(self) -> bool:
        """Whether experts are held as the checkpoint packs them."""
        return isinstance(self.w1, PackedWeights | Mxfp4Experts) or isinstance(self.w2, PackedWeights | Mxfp4Experts)

    @property
    def expert_bytes(self) -> int:
        """Memory of the weights of all held experts."""
        num_bytes: int = self.w1.nbytes + self.w2.nbytes
        return num_bytes

    def idle_share(self, num_tokens: int) -> float:
        """Return the share of the experts that no token reaches, if tokens spread evenly."""
        share: float = (1 - self.config.top_k / self.config.num_experts) ** num_tokens
        return share

    def bytes_to_pack(self, dtype: torch.dtype) -> int:
        """Return the bytes that `pack` would reorder."""
        num_bytes = 0
        for weight in (self.w1, self.w2):
            if isinstance(weight, PackedWeights | Mxfp4Experts):
                size = weight.bytes_to_pack(dtype)
                if size == 0:
                    return 0
                num_bytes += size
        return num_bytes

    def pack(self, dtype: torch.dtype) -> None:
        """Reorder packed experts for faster products on a CPU, see `CpuProduct`.

        dtype: dtype of activations.
        """
        for name in ("w1", "w2"):
            weight = getattr(self, name)
            if isinstance(weight, Mxfp4Experts):
                weight = experts_for_cpu(weight.experts(), dtype)
            elif isinstance(weight, PackedWeights):
                weight = experts_for_cpu(weight.experts(len(self.config.experts)), dtype)
            if isinstance(weight, torch.Tensor):
                weight = nn.Parameter(weight, requires_grad=False)
            delattr(self, name)
            setattr(self, name, weight)
        self._use_held_weights()

    def round_to(self, form: str) -> None:
        """Round the experts to int8 or int4 for a CPU; see `as_experts`."""
        self.rounded = form
        for name in ("w1", "w2"):
            products = as_experts(getattr(self, name), form)
            if products is not None:
                delattr(self, name)
                setattr(self, name, products)
        self._use_held_weights()

    def take_products(self, new: SparseMoe, dtype: torch.dtype) -> bool:
        """Take over the experts of a newly loaded layer if they are held in a CPU's order; return whether they were.

        The new layer loses its experts.
        """
        if self.is_packed or not (new.is_packed or self.products):
            return False
        new.derive_from_weights()
        if self.rounded is None:
            new.pack(dtype)
        else:
            new.round_to(self.rounded)
        for name in ("w1", "w2"):
            delattr(self, name)
            setattr(self, name, getattr(new, name))
            delattr(new, name)
        self._use_held_weights()
        return True

    def _use_held_weights(self) -> None:
        self._block_sizes: dict[Hashable, int | None] = {}
        self._options: dict[str, Any] = {
            "activation": self.activation,
            "expert_map": self.expert_map,
            "interleaved": self.config.interleaved,
        }
        if isinstance(self.w1, CpuExperts) or isinstance(self.w2, CpuExperts):
            self.products = _products(self.w1), _products(self.w2)
            self.biases = _float(self.w1_bias), _float(self.w2_bias)
            for name in ("gate_up", "down"):
                vars(self).pop(name, None)
        else:
            self.gate_up, self.down = self._tensors(self.w1, self.w1_bias), self._tensors(self.w2, self.w2_bias)
            self._options |= self.gate_up.options("w1") | self.down.options("w2")

    @property
    def has_invariant_rows(self) -> bool:
        """See `Network.has_invariant_rows`."""
        moe = self.config
        if moe.mixer_margin is not None or moe.interleaved or self.activation != "silu":
            return False
        if self.shared is not None and not self.shared.has_invariant_rows:
            return False
        if self.products is not None:
            return all(experts.has_invariant_rows for experts in self.products)
        return has_invariant_rows(self.gate_up, self.down)

    def token_counts(self, limit: int, dtype: torch.dtype) -> list[int]:
        """Return, for each code path up to `limit` tokens, its least number of tokens."""
        return token_counts(limit, self.routing.top_k, self.down.w, dtype=dtype, **self._tile_options())

    def _tile_options(self) -> dict[str, Any]:
        return {"expert_map": self.expert_map, "w2_scale": self.down.scale, "is_gated": self.is_gated}

    def forward(
        self,
        x: torch.Tensor,
        lora: LoraBatch | None = None,
        *,
        routed_by: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer, [R, hidden_size] -> [R, hidden_size]; may overwrite x.

        routed_by: the router's input, if it is not x. token_ids: [R], if they choose the experts.
        """
        # Choose experts.
        moe = self.config
        if routed_by is None:
            routed_by = x
        logits = self.router(routed_by.to(self.router.weight.dtype))  # [R, num_experts]
        expert_map, aligned = self.expert_map, None
        block_size = None
        if self.products is None and not torch.compiler.is_dynamo_compiling():
            # Choose the block size once for each number of tokens.
            key = len(x), x.dtype, forward_backend() or backend()
            if key not in self._block_sizes:
                sizes = len(x), self.routing.top_k, self.down.w
                self._block_sizes[key] = moe_block_size(*sizes, dtype=x.dtype, **self._tile_options())
            block_size = self._block_sizes[key]
        if moe.mixer_margin is not None:
            topk_weights, topk_ids = choose_by_mixer(logits.float(), moe.mixer_margin)  # both [R, 2]
        elif self.token_table is not None:
            assert token_ids is not None
            topk_ids = self.token_table[token_ids]  # [R, top_k]
            topk_weights = weights_of_experts(logits.float(), topk_ids, self.routing)
        elif block_size is None:
            topk_weights, topk_ids = self.route_tokens(logits, **vars(self.routing))  # both [R, top_k]
        else:
            num_held: int | None = None
            if expert_map is not None:
                num_held = len(self.config.experts)
            topk_weights, topk_ids, aligned = self.route_and_align(
                logits, self.routing, block_size, expert_map=expert_map, num_local_experts=num_held, ticket=self.ticket
            )
        if self.chosen is not None:
            self.chosen.append(topk_ids.to(torch.int32, copy=True))
        if self.expert_scale is not None:
            topk_weights = topk_weights * self.expert_scale[topk_ids]

        # Multiply.
        routed = x
        if self.to_latent is not None:
            routed = self.to_latent(x)
        if self.config.weighs_inputs:
            routed, topk_weights = (x * topk_weights).to(x.dtype), torch.ones_like(topk_weights)
        if self.products is not None:
            routes = topk_weights, topk_ids
            out = run_experts(routed, *self.products, *routes, biases=self.biases, **self._options)
        else:
            weights = self.gate_up.w, self.down.w
            out = self.fused_moe(routed, *weights, topk_weights, topk_ids, aligned=aligned, **self._options)
        if self.latent_norm is not None:
            out, _ = self.latent_norm(out)
        if self.from_latent is not None:
            out = self.from_latent(out)

        # Add the shared MLP.
        if not self.config.shared_size:
            return out
        shared = self.shared
        assert shared is not None
        if self.shared_gate is None:
            return out.add_(shared(x, lora))
        gate = self.shared_gate(x)  # [R, 1]
        return add_gated(out, shared(x, lora), gate)

    def destinations(self, prefix: str) -> Destinations:
        moe, destinations = self.config, self.router.destinations(prefix)
        if self.correction_bias is not None:
            bias: torch.Tensor = self.correction_bias
            if moe.correction_in_row:
                bias = bias[None]
            destinations[f"{prefix}.{moe.correction_bias}"] = bias
        if self.expert_scale is not None:
            destinations[f"{prefix}.{moe.expert_scale}"] = self.expert_scale
        if self.token_table is not None:
            fill = partial(_fill_table, self.token_table, moe.num_experts)
            destinations[f"{prefix}.{moe.token_table}"] = ConvertedDestination(
                self.token_table.shape, torch.int64, fill
            )
        parts = {moe.shared_name: self.shared, "latent_norm": self.latent_norm}
        destinations |= join_destinations(prefix, self.shared_gate, self.to_latent, self.from_latent, **parts)
        if moe.stacked:
            return destinations | self._stacked_destinations(prefix)
        return destinations | self._expert_destinations(prefix)

    def _stacked_destinations(self, prefix: str) -> Destinations:
        moe, destinations = self.config, Destinations()
        for attribute, weight, bias in (("w1", self.w1, self.w1_bias), ("w2", self.w2, self.w2_bias)):
            name = f"{prefix}.experts.{self.stacked_names[attribute]}"
            if isinstance(weight, Mxfp4Experts):
                destinations |= weight.destinations(name)
            else:
                assert isinstance(weight, torch.Tensor)  # other formats are stored expert by expert
                destinations[name] = weight.mT if moe.transposed else weight
            if bias is not None:
                destinations[f"{name}_bias"] = bias
        return destinations

    def _expert_destinations(self, prefix: str) -> Destinations:
        moe, destinations = self.config, Destinations()
        for weight, kinds in ((self.w1, self.inputs), (self.w2, (moe.down_name,))):
            assert not isinstance(weight, Mxfp4Experts)  # MXFP4 experts are stored as one tensor
            names: list[str] = []
            for expert in moe.experts:
                names += [f"{prefix}.experts.{expert}.{kind}" for kind in kinds]
            if isinstance(weight, PackedWeights):
                destinations |= weight.destinations(names)
            else:
                parts = weight.view(len(names), -1, weight.shape[2])
                for name, part in zip(names, parts, strict=True):
                    destinations[f"{name}.weight"] = part
        return destinations

    def _tensors(self, weight: torch.Tensor | Mxfp4Experts | PackedWeights, bias: torch.Tensor | None) -> ExpertLinear:
        if isinstance(weight, PackedWeights):
            values, *scales = weight.stacked(len(self.config.experts))
            return ExpertLinear(values, bias, *scales)
        if isinstance(weight, Mxfp4Experts):
            return ExpertLinear(weight.values, bias, weight.scale)
        return ExpertLinear(weight, bias)


@contextmanager
def capture_experts(network: Any, captured: CapturedStates) -> Iterator[None]:
    """Set `captured.routed_experts` to the experts that a forward inside chooses, if the caller wants them."""
    if not captured.has_experts:
        yield
        return
    ids_of_layers: list[list[torch.Tensor]] = []
    modules: list[SparseMoe] = []
    for layer in network.layers:
        ids: list[torch.Tensor] = []
        ids_of_layers.append(ids)
        for module in layer.modules():
            if isinstance(module, SparseMoe):
                module.chosen = ids
                modules.append(module)
    try:
        yield
        first = torch.cat(next(ids for ids in ids_of_layers if ids))  # [num_tokens, top_k]
        routed = first.new_full((len(first), len(ids_of_layers), first.shape[1]), -1)
        for index, ids in enumerate(ids_of_layers):
            if ids:
                routed[:, index] = torch.cat(ids)
        captured.routed_experts = routed
    finally:
        for module in modules:
            module.chosen = None


def choose_by_mixer(logits: torch.Tensor, margin: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose two experts of each token one after the other (SparseMixer; Liu et al., 2023).

    An expert is a candidate if its logit differs from the best one by at most `margin`, relative to the larger of both
    sizes. The routing weight is the best expert's softmax over the candidates. The second choice leaves the first out.

    logits: float32 [T, num_experts]. Returns weights float32 and ids int32, both [T, 2].
    """
    weights: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    candidates = logits
    for _ in range(2):
        best, expert = candidates.max(-1, keepdim=True)  # both [T, 1]
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > margin
        shares = candidates.masked_fill(is_far, -math.inf).softmax(-1)
        weights.append(shares.gather(-1, expert))
        ids.append(expert)
        candidates = candidates.scatter(-1, expert, -math.inf)
    return torch.cat(weights, -1), torch.cat(ids, -1).int()


def weights_of_experts(logits: torch.Tensor, ids: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the routing weights, float32 [T, top_k], of experts that are chosen already.

    logits: float32 [T, num_experts]. ids: [T, top_k].
    """
    weights = expert_scores(logits, routing.scoring).gather(-1, ids.long())
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.routed_scaling_factor


def _fill_table(table: torch.Tensor, num_experts: int, stored: torch.Tensor) -> None:
    """Copy a table of expert ids.

    Raises:
        InvalidInputError: an id is out of range.
    """
    least, largest = int(stored.min()), int(stored.max())
    if least < 0 or largest >= num_experts:
        raise InvalidInputError(f"expert ids {least} to {largest}, expected 0 to {num_experts - 1}")
    table.copy_(stored)


def _products(weight: Any) -> ExpertProducts:
    """Return each expert's product. weight: plain [num_experts, out_features, in_features], or CpuExperts."""
    if isinstance(weight, CpuExperts):
        return weight.multiply
    return ExpertProducts([partial(_plain_product, matrix) for matrix in weight], weight.shape[1])


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None:
        return None
    return bias.float()


def _plain_product(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, weight, bias)
