"""Mixture of experts in PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...common.device import backend, loops_of
from ...common.packed.packing import FP8_BLOCK
from ...common.packed.torch_ops.product import quantized_product, rounded_groups
from ...common.torch_ops import linear as linear_op
from ...common.torch_ops.rows import gated_activation
from ..weights import ExpertLinear, MoeCall
from .moe_align_block_size import expert_rows

# Entries up to which each has products of its own, without loops. On 2 cores 4 of 512 x 256 take 86 us instead of 126
# sorted, 16 in float32 no longer, 16 in bfloat16 three times as long as one batch of all experts.
_MAX_UNSORTED = {torch.float32: 16, torch.float16: 8, torch.bfloat16: 8}
# Rows an expert from which oneDNN's products, one each, are faster than PyTorch's grouped ones in float32, MKL's: on 2
# cores of an AMD EPYC 128 rows of 256 x 512 take 112 us instead of 225, some 32 rows 76 instead of 56. On an Intel Xeon
# MKL takes 0.74 to 0.8 of oneDNN's time for 64 to 256 rows of 512 x 512.
# In bfloat16 oneDNN compiles a product for every number of rows, in 2 ms, as do PyTorch's grouped ones: 78 ms for 8,192
# entries of 32 experts in place of 11 where rows are filled up to multiples of the first of these, or beyond as many
# rows of the second.
_ROW_STEPS, _FEW_ROWS = (16, 64), 256
_CPU_INFO = Path("/proc/cpuinfo")
_MIN_ROWS_ALONE = math.inf if _CPU_INFO.exists() and "GenuineIntel" in _CPU_INFO.read_text() else 64


Formats = tuple[str, str]
"""`ExpertLinear.format` of both projections."""


def has_invariant_rows(gate_up: ExpertLinear, down: ExpertLinear, activation: str, interleaved: bool) -> bool:
    """Return whether numba kernels take these experts so that no row's bits depend on the rows beside it."""
    if (gate_up.format, down.format) != ("", "") or activation != "silu" or interleaved:
        return False
    products = loops_of("common.numba_ops.linear", gate_up.w, down.w)
    return products is not None and products.takes_rows(gate_up.w) and products.takes_rows(down.w)


class SortedEntries(NamedTuple):
    """Entries of a routing sorted by expert; entries without an expert come last.

    ends: int32 [num_experts], the end of each expert's entries. rows, experts: int64 [num_entries], row and expert of
    each sorted entry, arbitrary without an expert. positions: int64 [num_entries], new position of each entry, -1
        without one.
    """

    ends: torch.Tensor
    rows: torch.Tensor
    experts: torch.Tensor
    positions: torch.Tensor


def bind(
    x: torch.Tensor, gate_up: ExpertLinear, down: ExpertLinear, topk_ids: torch.Tensor
) -> Callable[[MoeCall, object], None]:
    """Return a function that runs `kernels.moe.fused_moe` in PyTorch, into `call.out`, for calls like this one.

    Entries are sorted by expert, with one product for each expert in use. They are gathered, activated and summed all
    at once: besides the products, the number of operations is fixed. Few entries have a product each.
    """
    formats, num_entries = (gate_up.format, down.format), topk_ids.numel()
    is_plain = formats == ("", "")
    products = None
    if is_plain:
        products = loops_of("common.numba_ops.linear", x, gate_up.w, down.w)
    is_invariant = backend().is_invariant
    if products is not None and not is_invariant:
        most_rows = min(products.max_rows(gate_up.w), products.max_rows(down.w))
        if num_entries > most_rows * len(gate_up.w):
            products = None
    loops = loops_of("moe.numba_ops.fused_moe", x)
    if loops is not None:
        return partial(_by_loops, loops, products, formats, is_invariant)
    if is_plain and num_entries <= _MAX_UNSORTED[x.dtype]:
        return _unsorted
    return partial(_sorted, products, formats)


def _by_loops(loops: Any, products: Any, formats: Formats, by_row: bool, call: MoeCall, _: object) -> None:
    entries = loops.sort_entries(call.topk_ids, len(call.gate_up.w), call.expert_map)
    parts, positions = _parts(call, entries, products, formats, by_row=by_row)
    loops.combine_parts(parts, positions, call.topk_weights, call.out)


def _sorted(products: Any, formats: Formats, call: MoeCall, _: object) -> None:
    parts, positions = _parts(call, sort_entries(_experts(call), len(call.gate_up.w)), products, formats)
    call.out.copy_(weighted_sums(parts_of_entries(parts, positions), call.topk_weights))


def _unsorted(call: MoeCall, _: object) -> None:
    ids = _experts(call).flatten().tolist()
    projected = _vectors(call.hidden_states, call.gate_up, ids).float()
    activated = gated_activation(projected, call.activation, call.interleaved).to(call.hidden_states.dtype)
    call.out.copy_(weighted_sums(_vectors(activated, call.down, ids), call.topk_weights))


def _experts(call: MoeCall) -> torch.Tensor:
    """Return the rows of the weights that entries take, like topk_ids."""
    if call.expert_map is None:
        return call.topk_ids
    return expert_rows(call.topk_ids, call.expert_map)


def parts_of_entries(parts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return each entry's part; 0 for entries of no expert, whose position is -1."""
    return functional.pad(parts, (0, 0, 0, 1))[positions]  # position -1 takes the zeros at the end


def weighted_sums(parts: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of each token's parts, [num_tokens * top_k, hidden_size], in float32."""
    return torch.bmm(topk_weights.unsqueeze(1), parts.float().view(*topk_weights.shape, -1)).squeeze(1)


def _activated(call: MoeCall, projected: torch.Tensor) -> torch.Tensor:
    return gated_activation(projected.float(), call.activation, call.interleaved).to(call.hidden_states.dtype)


def sort_entries(experts: torch.Tensor, num_experts: int) -> SortedEntries:
    """Sort entries [num_tokens, top_k]; those of no expert come last, at position -1."""
    flat, top_k = experts.flatten(), experts.shape[1]
    ids, entries = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat).long().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True, out_int32=True)
    sorted_positions = torch.arange(len(ids), device=ids.device).masked_fill_(ids == num_experts, -1)
    positions = torch.empty_like(entries).index_copy_(0, entries, sorted_positions)
    return SortedEntries(ends, entries // top_k, ids.clamp(max=num_experts - 1), positions)


def _parts(
    call: MoeCall, entries: SortedEntries, loops: Any, formats: Formats, *, by_row: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' results of entries, float32 or in the dtype of hidden_states, and each entry's row in them.

    The row is -1 for entries of no expert.

    loops: numba kernels for the products, or None. by_row: as in their `linear`.
    """
    x, gate_up, down, (ends, rows, experts, positions) = call.hidden_states, call.gate_up, call.down, entries
    if loops is not None:
        is_silu = call.activation == "silu" and not call.interleaved
        activated = None
        if is_silu and gate_up.bias is None and not by_row:
            activated = loops.linear_and_silu(x, gate_up.w, ends, rows)
        if activated is None:
            projected = loops.grouped_linear(x, gate_up.w, ends, rows, by_row=by_row)
            projected = _with_bias(projected, gate_up, experts)
            if is_silu:
                activated = loops_of("common.numba_ops.gated_activation", x).silu_and_mul(projected, x.dtype)
            else:
                activated = _activated(call, projected)
        return _with_bias(loops.grouped_linear(activated, down.w, ends, by_row=by_row), down, experts), positions
    bounds = [0, *ends.tolist()]
    lengths: list[int] = []
    if formats == ("", ""):
        lengths = _padded_lengths(bounds, len(rows), gate_up.w.dtype)
    if lengths:
        # Every expert's entries begin where those before end, padded; what is between them is computed and not read.
        starts = torch.tensor([0, *itertools.accumulate(lengths)], device=ends.device)
        padded = torch.arange(len(rows), device=ends.device) + (starts[:-1] - functional.pad(ends, (1, -1)))[experts]
        rows = rows.new_zeros(sum(lengths)).index_copy_(0, padded, rows)
        positions = padded[positions]
    projected = _linear(x[rows], gate_up, formats[0], experts, ends, lengths)
    return _linear(_activated(call, projected), down, formats[1], experts, ends, lengths), positions


def _vectors(x: torch.Tensor, linear: ExpertLinear, experts: list[int]) -> torch.Tensor:
    """Return each entry's matrix-vector product, for one or several entries per row of x; 0 without an expert."""
    out, per_row = x.new_empty(len(experts), linear.w.shape[1]), len(experts) // len(x)
    for entry, expert in enumerate(experts):
        if 0 <= expert < len(linear.w):
            torch.mv(linear.w[expert], x[entry // per_row], out=out[entry])
            if linear.bias is not None:
                out[entry] += linear.bias[expert]
        else:
            out[entry].zero_()
    return out


def _padded_lengths(bounds: list[int], num_entries: int, dtype: torch.dtype) -> list[int]:
    """Rows that experts get, with padding: all as many where one batch is better than a product each, in bfloat16 those
    of few different products; else none.

    A batch computes an expert a thread, where a product alone shares out an expert's few rows: on 2 cores 8 rows of 256
    x 512 take 16 us instead of 34 in float32, where 32 gain nothing, and 64 rows 22 instead of 38 in bfloat16. That
    pays for the padding, and in bfloat16 for the weights of as many experts without entries. With one thread float32
    gains nothing; in bfloat16 a batch puts weights in order as it goes, where a product alone does so beforehand: 128
    and 256 entries of 32 experts take 0.6 to 0.74 of the time, 32 entries 1.1.
    """
    num_experts, is_wide = len(bounds) - 1, dtype == torch.float32
    is_alone = torch.get_num_threads() == 1
    if bounds[-1] < num_entries or (is_wide and is_alone):
        return []
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    longest, num_idle = max(counts), counts.count(0)
    if longest == 0:
        return []
    max_length = 24.0
    if not is_wide:
        max_length += num_entries / num_experts
    max_idle = num_experts // 8 if is_wide or is_alone else num_experts // 2
    if longest <= max_length and num_idle <= max_idle:
        return [longest] * num_experts
    if dtype != torch.bfloat16 or not linear_op.MULTIPLIES_BF16:
        return []
    steps = (_ROW_STEPS[count > _FEW_ROWS] for count in counts)
    return [-(-count // step) * step for count, step in zip(counts, steps, strict=True)]


def _linear(
    x: torch.Tensor,
    linear: ExpertLinear,
    form: str,
    experts: torch.Tensor,
    ends: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """Return each expert's product with its rows, up to its end or by `lengths`; rows beyond the last end are
    undefined."""
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
    if form:
        x = x.float()
        if form == "e4m3":
            x = rounded_groups(x, FP8_BLOCK, form)
        out = _quantized(x, linear, ends)
    else:
        out = _grouped_mm(x, linear.w, ends)
    return _with_bias(out, linear, experts)


def _with_bias(out: torch.Tensor, linear: ExpertLinear, experts: torch.Tensor) -> torch.Tensor:
    if linear.bias is None:
        return out
    return out + linear.bias[experts].to(out.dtype)


def _quantized(x: torch.Tensor, linear: ExpertLinear, ends: torch.Tensor) -> torch.Tensor:
    """Return each expert's product with its rows of x; unpacks a tile of its weights at a time."""
    assert linear.scale is not None
    out, group = x.new_empty(len(x), linear.w.shape[1]), linear.group(x.shape[1])
    for expert, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end > start:
            zero_point, tensor_scale = linear.zeros, linear.tensor_scale
            if zero_point is not None:
                zero_point = zero_point[expert]
            if tensor_scale is not None:
                tensor_scale = tensor_scale[expert]
            quantized_product(
                x[start:end],
                linear.w[expert],
                linear.scale[expert],
                linear.format,
                group,
                out[start:end],
                zero_point=zero_point,
                tensor_scale=tensor_scale,
            )
    return out


def _grouped_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Call PyTorch's grouped product if there are rows and strides are multiples of 16 bytes, as it requires."""
    strides = x.stride(0) | w.stride(0) | w.stride(1)
    has_many_rows = x.dtype == torch.float32 and len(x) >= _MIN_ROWS_ALONE * len(w)
    if len(x) and strides * x.element_size() % 16 == 0 and not has_many_rows:
        out: torch.Tensor = functional.grouped_mm(x, w.mT, offs=ends)
        return out
    out = x.new_empty(len(x), w.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = linear_op.linear(x[start:end], w[expert])
        start = end
    return out
