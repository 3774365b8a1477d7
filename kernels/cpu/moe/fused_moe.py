"""Numba kernels around the products of experts: sort entries by expert, sum their parts, add a gated MLP."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...moe.plain_experts import SortedEntries
from ..kernel import Kernel, bfloats, device_function, exp2, floats, int32s, int64s, load, share, unpack
from ..launch import NumbaLaunch
from ..vectors import LANES, LOG2_E, fill, load_part, multiply_add, store_part


@device_function
def _sort(ids, expert_map, ends, rows, experts, positions, sizes):
    """Sort by counting, which keeps the order within an expert."""
    num_entries, top_k, num_experts, num_mapped = sizes
    for i in range(num_experts):
        ends[i] = 0
    for entry in range(num_entries):
        expert: Any = ids[entry]
        if num_mapped > 0:
            expert = expert_map[expert] if 0 <= expert < num_mapped else np.int32(-1)
        positions[entry] = expert if 0 <= expert < num_experts else -1
        if positions[entry] >= 0:
            ends[positions[entry]] += 1
    total = np.int32(0)
    for i in range(num_experts):
        count = ends[i]
        ends[i] = total
        total += count
    for i in range(total, num_entries):
        rows[i], experts[i] = 0, 0
    for entry in range(num_entries):
        expert = positions[entry]
        if expert >= 0:
            to = np.int64(ends[expert])
            rows[to], experts[to], positions[entry] = entry // top_k, expert, to
            ends[expert] += 1


@Kernel
def _sort_entries(arguments):
    values = unpack(arguments, 11)
    _, ids, expert_map, ends, rows, experts, positions = values[:7]
    entries = int64s(rows), int64s(experts), int64s(positions)
    _sort(int32s(ids), int32s(expert_map), int32s(ends), *entries, values[7:])


@device_function
def _combine(parts, positions, weights, out, num_rows, top_k, size, stride):
    first, end = share(num_rows)
    for row in range(first, end):
        entry, to = row * top_k, row * stride
        for i in range(0, size, LANES):
            total = fill(np.float32(0))
            for j in range(entry, entry + top_k):
                weight = fill(weights[j])
                if positions[j] >= 0:
                    total = multiply_add(weight, load_part(parts, positions[j] * size + i, size - i), total)
                else:  # NaN makes the row NaN, too
                    total = multiply_add(weight, fill(np.float32(0)), total)
            store_part(out, to + i, total, size - i)


@Kernel
def _combine_parts(arguments):
    _, has_bf16_parts, is_bf16, parts, positions, weights, out, rows, top_k, size, stride = unpack(arguments, 11)
    ids, factors = int64s(positions), floats(weights)
    if has_bf16_parts:
        _combine(bfloats(parts), ids, factors, bfloats(out), rows, top_k, size, stride)
    elif is_bf16:
        _combine(floats(parts), ids, factors, bfloats(out), rows, top_k, size, stride)
    else:
        _combine(floats(parts), ids, factors, floats(out), rows, top_k, size, stride)


def sort_entries(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> SortedEntries:
    """Sort the entries of contiguous ids [num_tokens, top_k]. Ids that name no expert are left out."""
    num_entries, top_k = topk_ids.numel(), topk_ids.shape[1]
    ends = torch.empty(num_experts, dtype=torch.int32)
    rows, experts, positions = torch.empty(3, num_entries, dtype=torch.int64)
    entries = SortedEntries(ends, rows, experts, positions)
    num_mapped = 0
    if expert_map is not None:
        num_mapped = len(expert_map)
    launch = _sorting(num_entries, top_k, num_experts, num_mapped)
    launch({"topk_ids": topk_ids, "expert_map": expert_map, **entries._asdict()})
    return entries


@lru_cache(maxsize=1024)
def _sorting(*sizes: int) -> NumbaLaunch:
    tensors = "topk_ids", "expert_map", *SortedEntries._fields
    return NumbaLaunch(_sort_entries.address, 0, (*tensors, *sizes))


def combine_parts(parts: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of weight * part over each token's entries to out [num_tokens, size].

    parts: contiguous [num_entries, size], float32 or out's dtype. positions: see `SortedEntries`. weights: [num_tokens,
    top_k].
    """
    launch = _combining(parts.dtype, out.dtype, *weights.shape, parts.shape[1], out.stride(0))
    launch({"parts": parts, "positions": positions, "weights": weights, "out": out})


@lru_cache(maxsize=1024)
def _combining(parts: torch.dtype, out: torch.dtype, *sizes: int) -> NumbaLaunch:
    num_rows, top_k, size, _ = sizes
    are_bf16 = (dtype == torch.bfloat16 for dtype in (parts, out))
    arguments: tuple[int | str, ...] = *are_bf16, "parts", "positions", "weights", "out", *sizes
    return NumbaLaunch(_combine_parts.address, num_rows * top_k * size, arguments)


@device_function
def _add_rows(out, x, gate, num_rows, size, out_stride, x_stride, gate_stride):
    first, end = share(num_rows)
    for row in range(first, end):
        place, to = row * x_stride, row * out_stride
        weight = fill(np.float32(1) / (np.float32(1) + exp2(-np.float32(LOG2_E) * load(gate, row * gate_stride))))
        for i in range(0, size, LANES):
            total = multiply_add(weight, load_part(x, place + i, size - i), load_part(out, to + i, size - i))
            store_part(out, to + i, total, size - i)


@Kernel
def _add_gated(arguments):
    values = unpack(arguments, 10)
    if values[1]:
        _add_rows(bfloats(values[2]), bfloats(values[3]), bfloats(values[4]), *values[5:])
    else:
        _add_rows(floats(values[2]), floats(values[3]), floats(values[4]), *values[5:])


def add_gated(out: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> None:
    """Add x [num_rows, size], times the sigmoid of each row's gate [num_rows, 1], to out; all of one dtype."""
    launch = _adding(x.dtype == torch.bfloat16, *x.shape, out.stride(0), x.stride(0), gate.stride(0))
    launch({"out": out, "x": x, "gate": gate})


@lru_cache(maxsize=1024)
def _adding(is_bf16: bool, *sizes: int) -> NumbaLaunch:
    num_rows, size, *_ = sizes
    return NumbaLaunch(_add_gated.address, num_rows * size, (is_bf16, "out", "x", "gate", *sizes))
