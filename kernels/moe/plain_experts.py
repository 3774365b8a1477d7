"""Products of plain experts on a CPU with numba: by numba kernels, or for many rows by the CPU's libraries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..core.device import backend
from ..cpu import products
from ..layers import linear as linear_op
from .definition import activate
from .weights import ExpertLinear, MoeCall


class SortedEntries(NamedTuple):
    """Entries of a routing sorted by expert; entries without an expert come last.

    ends: int32 [num_experts], the end of each expert's entries.
    rows, experts: int64 [num_entries], row and expert of each sorted entry; arbitrary without an expert.
    positions: int64 [num_entries], sorted position of each entry, -1 without an expert.
    """

    ends: torch.Tensor
    rows: torch.Tensor
    experts: torch.Tensor
    positions: torch.Tensor


def bind(gate_up: ExpertLinear, down: ExpertLinear, topk_ids: torch.Tensor) -> Callable[[MoeCall, object], None]:
    """Return a function that runs `kernels.moe.fused_moe` into `call.out`, for calls like this one.

    Entries are sorted by expert, and each expert in use has one product. All entries are gathered, activated and summed
    at once, so the number of other operations is fixed.
    """
    from ..cpu.layers.linear import max_rows

    by_row = backend().is_invariant
    rows_of_an_expert = min(max_rows(gate_up.w), max_rows(down.w))
    by_kernels = by_row or topk_ids.numel() <= rows_of_an_expert * len(gate_up.w)
    if by_kernels:
        return partial(_run, partial(_by_kernels, by_row=by_row))
    return partial(_run, _by_libraries)


def _run(
    parts_of: Callable[[MoeCall, SortedEntries], tuple[torch.Tensor, torch.Tensor]], call: MoeCall, _: object
) -> None:
    from ..cpu.moe.fused_moe import combine_parts, sort_entries

    entries = sort_entries(call.topk_ids, len(call.gate_up.w), call.expert_map)
    parts, positions = parts_of(call, entries)
    combine_parts(parts, positions, call.topk_weights, call.out)


def _by_kernels(call: MoeCall, entries: SortedEntries, *, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' results, and each entry's row in them, -1 without an expert.

    by_row: as in `kernels.cpu.layers.linear.linear`.
    """
    from ..cpu.layers.gated_activation import silu_and_mul
    from ..cpu.layers.linear import grouped_linear, linear_and_silu

    x, gate_up, down, (ends, rows, experts, positions) = call.hidden_states, call.gate_up, call.down, entries
    is_silu = call.activation == "silu" and not call.interleaved
    activated = None
    if is_silu and gate_up.bias is None and not by_row:
        activated = linear_and_silu(x, gate_up.w, ends, rows)
    if activated is None:
        projected = grouped_linear(x, gate_up.w, ends, rows, by_row=by_row)
        projected = _with_bias(projected, gate_up, experts)
        if is_silu:
            activated = silu_and_mul(projected, x.dtype)
        else:
            activated = _activated(call, projected)
    return _with_bias(grouped_linear(activated, down.w, ends, by_row=by_row), down, experts), positions


def _by_libraries(call: MoeCall, entries: SortedEntries) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `_by_kernels` does. With few idle experts, all get equally many rows and share one product."""
    x, gate_up, down, (ends, rows, experts, positions) = call.hidden_states, call.gate_up, call.down, entries
    lengths = products.padded_lengths([0, *ends.tolist()], len(rows), gate_up.w.dtype)
    if lengths:
        # An expert's padded entries begin where the previous expert's end. Rows of padding are computed and not read.
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        padded = torch.arange(len(rows)) + (starts[:-1] - functional.pad(ends, (1, -1)))[experts]
        rows = rows.new_zeros(sum(lengths)).index_copy_(0, padded, rows)
        positions = padded[positions]
    projected = _linear(x[rows], gate_up, experts, ends, lengths)
    return _linear(_activated(call, projected), down, experts, ends, lengths), positions


def _linear(
    x: torch.Tensor, linear: ExpertLinear, experts: torch.Tensor, ends: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Return each expert's product with its rows, up to its end or by `lengths`.

    Rows beyond the last end are undefined.
    """
    if lengths and len(set(lengths)) == 1:
        out = torch.bmm(x.unflatten(0, (len(lengths), -1)), linear.w.mT)
        if linear.bias is not None:
            out = out + linear.bias.unsqueeze(1).to(out.dtype)
        return out.flatten(0, 1)
    if lengths:
        biases: Any = [None] * len(lengths)
        if linear.bias is not None:
            biases = linear.bias.to(x.dtype)
        parts = zip(x.split(lengths), linear.w, biases, strict=True)
        return torch.cat([functional.linear(*part) for part in parts if len(part[0])])
    return _with_bias(_multiply_groups(x, linear.w, ends), linear, experts)


def _multiply_groups(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if products.has_grouped_product(x, w):
        product: torch.Tensor = functional.grouped_mm(x, w.mT, offs=ends)
        return product
    out = x.new_empty(len(x), w.shape[1])
    for expert, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end > start:
            out[start:end] = linear_op.linear(x[start:end], w[expert])
    return out


def _with_bias(out: torch.Tensor, linear: ExpertLinear, experts: torch.Tensor) -> torch.Tensor:
    if linear.bias is None:
        return out
    return out + linear.bias[experts].to(out.dtype)


def _activated(call: MoeCall, projected: torch.Tensor) -> torch.Tensor:
    activated = activate(projected, call.activation, call.interleaved, compute=torch.float32)
    return activated.to(call.hidden_states.dtype)
