"""First-order errors of convolutions and scans. docs/bounds.md derives them."""

from __future__ import annotations

import torch

from paged.bench.bounds.first_order import (
    ELEMENTARY,
    LARGEST_EXPONENT,
    SLOPE,
    Defined,
    U,
    gamma,
    independent,
    rounding,
    unit,
)
from paged.bench.bounds.layers import norm_error
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.recurrent import definition as recurrent
from paged.kernels.recurrent.metadata import CHUNK_SIZE, Rings, Row


def convolution(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    absolute = {**arguments, "activation": None}
    for name in ("x", "weight", "bias"):
        if arguments.get(name) is not None:
            absolute[name] = arguments[name].abs()
    state = arguments["state"]
    absolute["state"] = type(state)(state.conv.abs(), state.state, state.ring_k, state.ring_u, state.ring_g)
    magnitude = card.expected(absolute)["out"]  # sum of |x| |w|
    out = rounding(want["out"], arguments["x"].dtype)
    out += (SLOPE * gamma(arguments["weight"].shape[1] + 1) + 2 * ELEMENTARY + U * magnitude) * magnitude
    return {"out": out, "conv": rounding(want["conv"], state.conv.dtype)}


class _Tokens:
    """What a scan reads of its tokens: q, k [T, HV, K], v [T, HV, V] and gates, with relative errors.

    g and gate_error are [T, HV, 1], or [T, HV, K] for decays of channels; beta and delta_error are [T, HV]. erase has
    the vectors that read S and are written, [T, HV, K] each, or is empty.
    """

    def __init__(self, arguments: Arguments, is_corrected: bool) -> None:
        mixed = arguments["mixed"].double()
        _, num_heads, value_dim, key_dim = arguments["state"].rings().state.shape
        groups = arguments["num_k_heads"] if is_corrected else arguments["num_groups"]
        keys, values = groups * key_dim, num_heads * value_dim
        if is_corrected:
            q, k, v = mixed.split([keys, keys, values], 1)
        else:
            v, k, q = mixed.split([values, keys, keys], 1)
        q, k = (t.unflatten(1, (groups, key_dim)).repeat_interleave(num_heads // groups, 1) for t in (q, k))
        self.v = v.unflatten(1, (num_heads, value_dim))
        gate = arguments["a" if is_corrected else "dt"].double() + arguments["dt_bias"].double()
        gate = gate.view(len(gate), num_heads, -1)  # [T, HV, 1 or K]
        rate = arguments["A_log"].double().exp()[:, None]
        lower_bound = arguments.get("lower_bound")
        delta = torch.nn.functional.softplus(gate, threshold=40)
        self.beta = torch.ones_like(gate[:, :, 0])
        self.erase: list[torch.Tensor] = []
        if arguments.get("erase_read") is not None:
            self.erase = [arguments["erase_read"].double(), arguments["erase_write"].double()]
        elif is_corrected:
            eps = arguments.get("eps", 1e-6)
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps) for t in (q, k))
            q = q * key_dim**-0.5
            self.beta = arguments.get("beta_scale", 1.0) * arguments["b"].double().sigmoid()
        else:
            if arguments.get("dt_limits") is not None:
                delta = delta.clamp(*arguments["dt_limits"])
            self.v = delta * self.v
        self.q, self.k = q, k
        self.g = -delta * rate
        # softplus and exp of the sums of two numbers, whose errors exp makes relative.
        gate_error = 2 * ELEMENTARY + U * gate.abs().clamp(max=LARGEST_EXPONENT)
        self.delta_error = gate_error[:, :, 0]
        rate_error = 2 * ELEMENTARY + U * arguments["A_log"].double().abs().clamp(max=LARGEST_EXPONENT)[:, None]
        self.gate_error = gate_error + rate_error
        if lower_bound is not None:
            self.g = lower_bound * torch.sigmoid(rate * gate)
            exponent_error = (rate * gate).abs().clamp(max=LARGEST_EXPONENT) * (U + rate_error)
            self.gate_error = 2 * ELEMENTARY + exponent_error
        self.is_corrected = is_corrected and not self.erase


def scan(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Follow the norm of each row of the state, and of its error, token by token.

    exp(g) (I - beta k k^T) does not lengthen a row, because k has length 1 and beta is at most 2.
    """
    is_delta_rule = card.name == "gated_delta_rule"
    tokens, batch, rings = _Tokens(arguments, is_delta_rule), arguments["batch"], arguments["state"].rings()
    rank = rings.rank
    dtype = arguments["mixed"].dtype
    errors: Tensors = {}
    for name in ("conv", "state", "ring_k", "ring_u", "ring_g"):
        if name not in want:
            continue
        dtype_of_part = getattr(arguments["state"], name).dtype
        if dtype_of_part == torch.int8:  # a code beside a tie may be the other one
            errors[name] = want[name].abs().amax(-1, keepdim=True).expand_as(want[name]) / 126
        else:
            errors[name] = rounding(want[name], dtype_of_part)
    errors["out"] = rounding(want["out"], dtype)
    value_dim = tokens.v.shape[2]
    for row in batch.rows():
        is_scan = row.length > batch.max_append
        u = unit(dtype) if is_scan else 0.0
        S = recurrent.state_at(row, rings, torch.float64)  # [HV, V, K]
        start_error = _read_error(row, rings, S)
        if not is_scan and row.write_slot != row.read_slot:
            errors["state"][row.write_slot] += start_error.unsqueeze(-1)
        state_errors, out_error, u_error, k_error = _follow(tokens, row, S, start_error, u)
        span = slice(row.first, row.first + row.length)
        if not is_delta_rule:
            sizes = (
                arguments["D"].double().abs()[:, None]
                * arguments["mixed"][span, : tokens.v[0].numel()].double().view(row.length, -1, value_dim).abs()
            )
            out_error = out_error + ELEMENTARY * sizes
        errors["out"][span] += out_error.flatten(1)
        if is_scan:
            errors["state"][row.write_slot] += state_errors[-1].unsqueeze(-1)
            if row.snapshot_slot >= 0:
                errors["state"][row.snapshot_slot] += state_errors[row.snapshot_len - row.start - 1].unsqueeze(-1)
            continue
        base = row.cursor if row.write_slot == row.read_slot else 0
        at = row.write_slot, slice(rank * base, rank * (base + row.length))
        errors["ring_k"][at] += k_error * want["ring_k"][at].abs()
        errors["ring_u"][at] += u_error
        of_gates = errors["ring_g"][row.write_slot, base : base + row.length]
        of_gates += (tokens.gate_error[span] * tokens.g[span].abs()).view_as(of_gates)
    return errors


def _read_error(row: Row, rings: Rings, S: torch.Tensor) -> torch.Tensor:
    """Return the error of the state's rows [HV, V] after entries of a ring are added."""
    if row.read_slot < 0 or row.cursor == 0:
        return torch.zeros(S.shape[:2], dtype=torch.float64)
    entries = row.read_slot, slice(0, rings.rank * row.cursor)
    keys = rings.k[entries].double().norm(dim=-1).repeat_interleave(S.shape[0] // rings.k.shape[2], 1)  # [n, HV]
    size: torch.Tensor = rings.read_state(row.read_slot, torch.float64).norm(dim=-1)
    size = size + (rings.u[entries].double().abs() * keys.unsqueeze(-1)).sum(0)
    g = rings.g[row.read_slot, : row.cursor].double().view(row.cursor, len(S), -1)  # [cursor, HV, 1 or K]
    gates: torch.Tensor = 1 + g.abs().sum(0).amax(-1).clamp(max=LARGEST_EXPONENT)  # [HV]
    return (gamma(row.cursor) + 2 * ELEMENTARY) * gates[:, None] * size


def _follow(
    tokens: _Tokens, row: Row, S: torch.Tensor, start_error: torch.Tensor, u: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return the errors of the rows of each token's state, of outputs and of u [length, HV, V], and of k.

    u: unit roundoff of the operands of a scan's products: rows of the inverse, u and w, the state, and weighted rows.
    """
    key_dim = S.shape[2]
    k_error = 0.0
    if tokens.is_corrected:
        k_error = norm_error(key_dim)
    product = gamma(key_dim) + 2 * ELEMENTARY + k_error
    total, squares = torch.zeros_like(start_error), torch.zeros_like(start_error)
    largest = torch.zeros_like(start_error)
    states, outs, us = [], [], []
    chunk: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # k, u and decay since the chunk's start
    roundings = 4  # of the operands of a scan's products
    if tokens.g.shape[2] > 1:
        roundings = 6  # keys of both sides are scaled before they are multiplied
    for index in range(row.length):
        token = row.first + index
        q, k, v, g, beta = tokens.q[token], tokens.k[token], tokens.v[token], tokens.g[token], tokens.beta[token]
        decay, size = g.exp(), S.norm(dim=-1)  # [HV, 1 or K], [HV, V]
        # Key, u, and the size of the numbers whose sum u is, of each product that the token adds; [HV, K], [HV, V].
        updates: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        before = S
        S = S * decay.unsqueeze(1)
        if tokens.erase:
            read, write = tokens.erase[0][token], tokens.erase[1][token]
            read_size = read.norm(dim=-1)[:, None]
            updates = [(write, torch.einsum("hvk,hk->hv", before, read), size * read_size), (k, v, v.abs())]
        elif tokens.is_corrected:
            new = beta[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
            updates = [(k, new, beta[:, None] * (v.abs() + size))]
        else:
            updates = [(k, v, v.abs())]
        added = torch.zeros_like(v)
        for key, new, reach in updates:
            S = S + new.unsqueeze(-1) * key.unsqueeze(1)
            largest = largest.maximum(reach)
            added = added + reach * key.norm(dim=-1)[:, None]
        length = k.norm(dim=-1)[:, None]
        gates = tokens.gate_error[token].amax(-1, keepdim=True)
        # exp(g) moves by g times its relative error.
        moved = (g.abs().clamp(max=LARGEST_EXPONENT) * decay).amax(-1, keepdim=True) * size
        local = product * (added + S.norm(dim=-1)) + gates * (added + moved)
        local = local + roundings * u * largest * length
        faded = decay.amax(-1, keepdim=True)
        total, squares = faded * total + local, faded.square() * squares + local.square()
        state_error = independent(total, squares) + start_error
        states.append(state_error)
        if (row.start + index) % CHUNK_SIZE == 0:
            chunk = []
        chunk = [(key, entry, remaining * decay) for key, entry, remaining in chunk]
        chunk += [(key, new, torch.ones_like(decay)) for key, new, _ in updates]
        keys, entries, rests = (torch.stack(part) for part in zip(*chunk, strict=True))
        terms = keys * q * rests  # [n, HV, K]
        scores = terms.sum(-1, keepdim=True)
        inside = independent((scores * entries).abs().sum(0), (scores * entries).square().sum(0))
        if tokens.g.shape[2] > 1:
            spread = independent(terms.abs().sum(-1, keepdim=True), terms.square().sum(-1, keepdim=True)) * entries
            inside = inside + independent(spread.abs().sum(0), spread.square().sum(0))
        q_size = q.norm(dim=-1)[:, None]
        outs.append(q_size * (state_error + (2 * product + u) * S.norm(dim=-1) + u * size) + 2 * u * inside)
        for number, (_, _, reach) in enumerate(updates):
            if tokens.is_corrected:
                us.append((product + gates) * reach + beta[:, None] * state_error)
            elif not tokens.erase:
                us.append((tokens.delta_error[token] + 2 * ELEMENTARY)[:, None] * reach)
            elif number == 0:
                us.append(product * reach + read_size * state_error)
            else:
                us.append(torch.zeros_like(reach))
    return torch.stack(states), torch.stack(outs), torch.stack(us), k_error + ELEMENTARY
