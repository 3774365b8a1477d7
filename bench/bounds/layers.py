"""First-order errors of norms, rotations, activations and streams. docs/bounds.md derives them."""

from __future__ import annotations

import torch
from torch.nn import functional

from paged.bench.bounds.first_order import (
    ELEMENTARY,
    LAMBDA,
    LARGEST_EXPONENT,
    SLOPE,
    TINY,
    Defined,
    U,
    gamma,
    independent,
    rounding,
    unit,
)
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.layers.definition import gated_activation, join_streams, stream_logits


def _rotated_size(want: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the length of each element's pair after rotation, which bounds |a cos| + |b sin|; |x| beyond pairs."""
    rotary_dim = arguments["cos_sin_cache"].shape[1]
    pairs = want[..., :rotary_dim]
    if arguments.get("interleaved"):
        lengths = pairs.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    else:
        lengths = pairs.unflatten(-1, (2, -1)).norm(dim=-2).repeat(*[1] * (want.dim() - 1), 2)
    return torch.cat([lengths, want[..., rotary_dim:].abs()], -1)


def rotation(want: torch.Tensor, arguments: Arguments, norm_size: int = 0) -> torch.Tensor:
    """Return the float32 error of a rotation, after a norm of `norm_size` numbers."""
    relative = ELEMENTARY
    if norm_size:
        relative += norm_error(norm_size)
    return relative * _rotated_size(want, arguments)


def norm_error(size: int) -> float:
    """Return the relative error of a root mean square norm: half of the sum's, and a root, two products, a division."""
    return gamma(size) / 2 + 2 * ELEMENTARY


def rms_norm(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, out = arguments["x"], want["out"]
    return {"out": rounding(out, x.dtype) + norm_error(x.shape[-1]) * out.abs()}


def fused_add_norm(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x = want["x"]
    error = rounding(x, arguments["x"].dtype) + norm_error(x.shape[-1]) * x.abs()
    return {"x": error, "residual": rounding(want["residual"], arguments["residual"].dtype)}


def rotary(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    errors = {}
    for name, rows in want.items():
        errors[name] = rounding(rows, arguments[name].dtype) + rotation(rows, arguments)
    return errors


def activation_error(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the float32 error of an activation of exact numbers: exp turns an argument's error into a relative one."""
    if activation == "silu":
        relative = 2 * ELEMENTARY + U * gate.abs()
        return relative * gated_activation(gate, up, activation).abs() + TINY * gate.abs() * up.abs()
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), 1 + up.clamp(-7, 7).abs()
    if activation == "situ":
        gate, up = 4 * torch.tanh(gate / 4), 25 * torch.tanh(up / 25)
    if activation == "silu_10":
        gate, up = gate.clamp(max=10), up.clamp(-10, 10)
    # 1 + erf and 1 + tanh cancel for negative gates.
    return 2 * ELEMENTARY * gate.abs() * up.abs()


def silu_and_mul(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x = arguments["x"]
    gate, up = x.double().chunk(2, -1)
    error = activation_error(gate, up, arguments.get("activation", "silu"))
    return {"out": rounding(want["out"], x.dtype) + error}


def gated_norm(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, out, weight = arguments["x"], want["out"], arguments["weight"].double().abs()
    size = arguments.get("group_size") or x.shape[-1]
    exponents = gates = arguments["z"].double().abs()
    if not arguments["norm_first"]:
        groups = gates.flatten(1).unflatten(1, (-1, size))
        exponents = groups.amax(-1, keepdim=True).expand_as(groups).reshape(x.shape)
    relative = norm_error(size) + 4 * ELEMENTARY + 2 * U * exponents.clamp(max=LARGEST_EXPONENT)
    # Largest result whose gate is 1: a root mean square is at least the root of eps.
    largest = x.double().abs().flatten(1).unflatten(1, (-1, weight.numel())) * weight
    largest = largest.view(x.shape) * (arguments.get("eps", 1e-6) + TINY) ** -0.5
    return {"out": rounding(out, x.dtype) + relative * out.abs() + TINY * gates.clamp(min=1) * largest}


def _flips(dtype: torch.dtype, rounded: torch.Tensor) -> torch.Tensor:
    """Return the change of a joined number next to a tie, which may round to its other neighbour.

    Fewer than 1 of 1,024 numbers do so, or a single one.
    """
    return 2 * max(unit(dtype), U) * rounded.abs()


def _flipped(flips: torch.Tensor) -> torch.Tensor:
    """Return the error of sums over the last axis whose terms change by `flips`, see `_flips`."""
    return flips.amax(-1) + LAMBDA * (flips.square().sum(-1) / 1024).sqrt()


def mixed_snapshots(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Return the errors of the stream, and of the sum whose weights a softmax of scores makes."""
    names = ("score_norm_weight", "score_weight", "norm_weight")
    score_norm, score, norm_weight = (arguments[name].double() for name in names)
    rows, num_snapshots = arguments["rows"], arguments["num_snapshots"]
    size, eps, norm_eps = rows.shape[-1], arguments.get("eps", 1e-6), arguments.get("norm_eps", 1e-6)
    stream = want["rows"][-1]
    rounded = stream.to(rows.dtype).double()
    mixed_rows = torch.cat([rows[:num_snapshots].double(), rounded[None]])  # [R, T, size]
    flips = torch.zeros_like(mixed_rows)
    if arguments["output"] is not None:
        flips[-1] = _flips(rows.dtype, rounded)

    # Scores, [R, T], and the weights that they make.
    query = score_norm * score
    roots = (mixed_rows.square().mean(-1) + eps).rsqrt()
    scores = (mixed_rows @ query) * roots
    delta = (gamma(size) + 2 * U) * (mixed_rows.abs() @ query.abs()) + _flipped(flips * query.abs())
    delta = delta * roots + norm_error(size) * scores.abs() + 2 * U * scores.abs().amax(0)
    weights = scores.softmax(0)
    weight_error = weights * (delta + (weights * delta).sum(0) + 2 * (num_snapshots + 2) * ELEMENTARY)

    # The sum, then its norm.
    mixed = (weights.unsqueeze(-1) * mixed_rows).sum(0)
    error = weight_error.unsqueeze(-1) * mixed_rows.abs()
    error += weights.unsqueeze(-1) * (flips + gamma(num_snapshots + 1) * mixed_rows.abs())
    error = error.sum(0)
    root = (mixed.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    relative = norm_error(size) + root * error.square().mean(-1, keepdim=True).sqrt()
    x_error = rounding(want["x"], rows.dtype) + root * error * norm_weight.abs() + relative * want["x"].abs()
    stream_error = torch.zeros_like(want["rows"])
    if arguments["output"] is not None:
        stream_error[-1] = rounding(stream, rows.dtype) + U * stream.abs()
    return {"x": x_error, "rows": stream_error}


def gated_streams(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Follow the errors of normalised streams through both products to the gates, and to the next gains."""
    names = ("streams", "output", "gains", "norm_weight", "down", "up")
    streams, output, gains, norm_weight, down, up = (arguments[name] for name in names)
    _, count, size = streams.shape
    dtype, rank = streams.dtype, up.shape[1]
    down, up = down.double(), up.double()
    if output is not None:
        output, gains = output.double().abs(), gains.abs()
    sizes = join_streams(streams.double().abs(), output, gains)
    rounded = want["joined"].to(dtype).double()
    root = (rounded.square().mean(-1, keepdim=True) + arguments.get("eps", 1e-6)).rsqrt()  # [T, N, 1]
    scales = root * norm_weight.double().view(count, size)  # [T, N, size]
    normed, flips = rounded * scales, _flips(dtype, rounded) * scales.abs()
    wide, operand = normed.flatten(1), (normed.abs() * unit(dtype)).flatten(1)

    # Products with `down`, [T, rank + N]; a library rounds them, and their part of N, to the dtype.
    magnitude = wide.abs() @ down.abs().T
    sums = wide @ down.T / count
    error = independent(operand @ down.abs().T, operand.square() @ down.square().T)
    error += (gamma(count * size) + norm_error(size)) * magnitude
    error += _flipped(flips.flatten(1)[:, None] * down.abs())
    error = error / count + 2 * rounding(sums, dtype) + 4 * U * sums.abs()

    # Inner numbers, and the logits of the gates.
    inner = functional.silu(sums[:, :rank])
    inner_error = SLOPE * error[:, :rank] + rounding(inner, dtype) + 2 * ELEMENTARY * inner.abs()
    logits = inner @ up.T  # [T, N * size]
    delta = independent(inner_error @ up.abs().T, inner_error.square() @ up.square().T)
    delta += gamma(rank) * (inner.abs() @ up.abs().T) + rounding(logits, dtype)
    gates = logits.sigmoid()
    gate_error = gates * (1 - gates) * delta + 2 * ELEMENTARY * gates
    gates, gate_error = gates.view_as(normed), gate_error.view_as(normed)
    normed_error = flips + rounding(normed, dtype) + norm_error(size) * normed.abs()
    x_error = (gate_error * normed.abs() + gates * normed_error + gamma(count) * gates * normed.abs()).mean(1)
    sigmoids = sums[:, rank:].sigmoid()
    gains_error = 2 * sigmoids * (1 - sigmoids) * error[:, rank:] + 4 * ELEMENTARY * sigmoids
    return {
        "x": rounding(want["x"], dtype) + x_error,
        "joined": rounding(want["joined"], dtype) + gamma(2) * sizes,
        "next_gains": gains_error,
    }


def mixed_streams(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Return the errors of weights that sums over all streams make, and of the input and the joins that they make."""
    names = ("streams", "output", "joins", "fn", "base", "scale", "norm_weight")
    streams, output, joins, fn, base, scale, norm_weight = (arguments[name] for name in names)
    _, count, size = streams.shape
    eps, norm_eps = arguments.get("eps", 1e-6), arguments.get("norm_eps", 1e-6)
    if output is not None:
        output, joins = output.double().abs(), joins.abs()
    sizes = join_streams(streams.double().abs(), output, joins)  # [num_tokens, count, size]
    rounded = want["joined"].to(streams.dtype).double()
    joined_error = gamma(count + 1) * sizes
    flip = _flips(streams.dtype, rounded)

    # Logits, [num_tokens, num_weights].
    terms = rounded.flatten(1)[:, None] * fn.double()  # [num_tokens, num_weights, count * size]
    flips = flip.flatten(1)[:, None] * fn.double().abs()
    sums = gamma(count * size) * terms.abs().sum(-1) + _flipped(flips)
    logits = stream_logits(rounded, fn, base, scale, norm_eps)
    root = (rounded.flatten(1).square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    sections = torch.tensor([count, count, count * count][: len(scale)])
    factors = scale.double().abs().repeat_interleave(sections)
    products = logits - base.double()
    delta = factors * root * sums + norm_error(count * size) * products.abs() + 4 * U * (logits.abs() + base.abs())

    # The input: weights, then a norm.
    sigmoids = logits.sigmoid()
    sigmoid_error = sigmoids * (1 - sigmoids) * delta + 2 * ELEMENTARY * sigmoids
    weight_error = sigmoid_error[:, :count]
    weights, used_error = sigmoids[:, :count] + eps, weight_error
    next_weights: list[torch.Tensor] = []
    if arguments.get("weights") is not None:
        weights, used_error = arguments["weights"].double(), torch.zeros_like(weight_error)
        next_weights.append(weight_error)
    weights = weights.unsqueeze(-1)
    x = (weights * rounded).sum(1)  # [num_tokens, size]
    x_error = weights.abs() * (flip + gamma(count) * rounded.abs()) + used_error.unsqueeze(-1) * rounded.abs()
    x_error = x_error.sum(1)
    x_root = (x.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    relative = norm_error(size) + x_root * x_error.square().mean(-1, keepdim=True).sqrt()
    normed_error = x_root * x_error * norm_weight.double().abs() + relative * want["x"].abs()

    # The next joins. A change of all logits by delta changes shares by at most 4 delta, before and after any number of
    # iterations, each of which rounds twice.
    magnitude, num_iterations = arguments.get("magnitude", 2.0), arguments.get("num_iterations", 0)
    joins_error = magnitude * sigmoid_error[:, count : 2 * count] + 2 * U * magnitude
    if num_iterations:
        largest = delta[:, 2 * count :].amax(-1, keepdim=True)
        rounds = 4 * ELEMENTARY + 2 * num_iterations * (count + 3) * U
        shares = want["next_joins"][:, -count * count :]
        joins_error = torch.cat([joins_error, (4 * largest + rounds) * shares], -1)
    return {
        "x": rounding(want["x"], streams.dtype) + normed_error,
        "joined": rounding(want["joined"], streams.dtype) + joined_error,
        "next_joins": torch.cat([*next_weights, joins_error], -1),
    }
