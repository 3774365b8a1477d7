"""First-order errors of routing and experts. docs/bounds.md derives them."""

from __future__ import annotations

import math

import torch

from paged.bench.bounds.first_order import ELEMENTARY, SLOPE, Defined, U, gamma, independent, rounding, unit
from paged.bench.bounds.layers import activation_error
from paged.bench.bounds.products import is_short_int4, product_error, spread_error, step_error
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.layers.definition import gated_activation
from paged.kernels.quantization import definition as quantization
from paged.kernels.quantization.packing import FP8_BLOCK


def _routing(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the error of routing weights: scores by exp, twice if they are renormalised."""
    numbers = logits.double().nan_to_num(neginf=0, posinf=0)
    sizes = (numbers.amax(1) - numbers.amin(1)).maximum(numbers.abs().amax(1))
    return (2 * (U * sizes + ELEMENTARY + gamma(logits.shape[1])) + ELEMENTARY)[:, None] * weights.abs()


def routed(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    weights = want["topk_weights"]
    return {"topk_weights": rounding(weights, torch.float32) + _routing(arguments["router_logits"], weights)}


def _expert_weight(arguments: Arguments, name: str, expert: int, num_columns: int) -> tuple[torch.Tensor, bool]:
    """Return a projection's weights, and whether code times scale is rounded."""
    values, scale = arguments[name][expert], arguments.get(f"{name}_scale")
    if scale is None:
        return values.double(), False
    scales: list[torch.Tensor | None] = []
    for option in ("zeros", "tensor_scale"):
        tensor = arguments.get(f"{name}_{option}")
        scales.append(None if tensor is None else tensor[expert])
    w = quantization.dequantize_codes(values, scale[expert], *scales, num_columns=num_columns)
    return w, is_short_int4(values, scale[expert], num_columns)


def _projected(
    arguments: Arguments, name: str, expert: int, x: torch.Tensor, errors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x @ w^T + bias of an expert, and its error. errors: independent errors of x.

    PyTorch rounds the product, and its sum with a bias, to the dtype of rows.
    """
    u = unit(arguments["hidden_states"].dtype)
    w, is_short = _expert_weight(arguments, name, expert, x.shape[1])
    if w.shape[1] != x.shape[1]:
        raise ValueError(f"{name}: {w.shape[1]} columns, expected {x.shape[1]}")
    if arguments[name].dtype == torch.float8_e4m3fn:
        errors = step_error(x, errors + ELEMENTARY * x.abs(), "e4m3", FP8_BLOCK)
        x = quantization.rounded_groups(x, "e4m3", FP8_BLOCK)
    product = x @ w.T
    error = product_error(x, w) + spread_error(errors, w) + u * product.abs()
    if is_short:
        error += 2 * u * independent(x.abs() @ w.abs().T, x.square() @ w.square().T)
    biases = arguments.get(f"{name}_bias")
    if biases is not None:
        product = product + biases[expert].double()
        error += (u + U) * product.abs()
    return product, error


def fused_moe(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, ids, weights = arguments["hidden_states"].double(), arguments["topk_ids"].long(), arguments["topk_weights"]
    u, activation = unit(arguments["hidden_states"].dtype), arguments.get("activation", "silu")
    num_experts = len(arguments["w1"])
    expert_map = arguments.get("expert_map")
    if expert_map is not None:
        is_known = (ids >= 0) & (ids < len(expert_map))
        ids = torch.where(is_known, expert_map.long()[ids.clamp(0, len(expert_map) - 1)], -1)
    error = rounding(want["out"], arguments["hidden_states"].dtype)
    for expert in range(num_experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        rows = x[tokens]
        hidden, hidden_error = _projected(arguments, "w1", expert, rows, torch.zeros_like(rows))
        activated, activated_error = _activated(hidden, hidden_error, activation, bool(arguments.get("interleaved")))
        activated_error = activated_error + u * activated.abs()
        part, part_error = _projected(arguments, "w2", expert, activated, activated_error)
        part_error += (u + gamma(ids.shape[1])) * part.abs()  # the weighted part, and the sum over experts
        error.index_add_(0, tokens, weights[tokens, places].double().abs()[:, None] * part_error)
    return {"out": error}


def _activated(
    hidden: torch.Tensor, error: torch.Tensor, activation: str, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if activation == "relu2":
        positive = hidden.clamp(min=0)
        return positive.square(), (2 * positive + error) * error + ELEMENTARY * positive.square()
    if interleaved:
        (gate, up), (gate_error, up_error) = (t.unflatten(-1, (-1, 2)).unbind(-1) for t in (hidden, error))
    else:
        (gate, up), (gate_error, up_error) = (t.chunk(2, -1) for t in (hidden, error))
    factor = up
    if activation == "swiglu_oai":
        factor = 1 + up.clamp(-7, 7)
    factor_of_1 = {"swiglu_oai": 0.0, "situ": 25 * math.atanh(1 / 25)}.get(activation, 1.0)
    alone = gated_activation(gate, torch.full_like(up, factor_of_1), activation)
    moved = SLOPE * gate_error * factor.abs() + (alone.abs() + SLOPE * gate_error) * up_error
    return gated_activation(gate, up, activation), moved + activation_error(gate, up, activation)
