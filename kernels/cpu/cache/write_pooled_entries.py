"""Numba kernel of pooled entries: a thread pools, normalises, rotates and writes the pools that its tokens close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...cache.latent_cache import record_form
from ...core.dtypes import SMALLEST
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LANES, LOG2_E, exp2_of, fill, larger, load_part, multiply_add, store_part
from .qk_norm_rope_and_cache import rotate
from .store_rows import largest_magnitude, store_float8, store_nvfp4_row

# Forms of entries.
_FLOAT32, _BFLOAT16, _INDEX, _RECORD, _NVFP4_RECORD = range(5)


@nb.inlined
def _gate(rows, at, bias, bias_at, count):
    """Return a vector of gates with their bias."""
    return multiply_add(fill(np.float32(1)), load_part(rows, at, count), load_part(bias, bias_at, count))


@nb.inlined
def _within(place, size):
    """Return the place in a ring."""
    return place - size if place >= size else place


@nb.device_function
def _pool(rows, bias, has_gates, starts, sizes, entry):
    """Pool the rows of an entry.

    starts: the first row before the pool, rows before it that count, the start of its block, its first row there.
    """
    row_before, num_before, block, offset = starts
    pool_size, dim, row_slot, bias_position, num_halves, block_size = sizes
    # Columns of a row: its first gate, and the pool's own half.
    gates, own_half = num_halves * dim, (num_halves - 1) * dim
    ones, to_exponent = fill(np.float32(1)), fill(np.float32(LOG2_E))
    for i in range(0, dim, LANES):
        count = dim - i
        total, weights = fill(np.float32(0)), fill(np.float32(0))
        if not has_gates:
            for row in range(pool_size):
                at = block + _within(offset + row, block_size) * row_slot + i
                total = multiply_add(ones, load_part(rows, at, count), total)
            store_part(entry, i, multiply_add(total, fill(np.float32(1.0 / pool_size)), fill(np.float32(0))), count)
            continue
        largest = fill(np.float32(-np.inf))
        for row in range(pool_size - num_before, pool_size):
            at = row_before + row * row_slot + gates + i
            largest = larger(largest, _gate(rows, at, bias, row * bias_position + i, count))
        for row in range(pool_size):
            at = block + _within(offset + row, block_size) * row_slot + own_half + gates + i
            largest = larger(largest, _gate(rows, at, bias, row * bias_position + own_half + i, count))
        shift = multiply_add(largest, fill(np.float32(-1)), fill(np.float32(0)))
        for row in range(pool_size - num_before, pool_size):
            at = row_before + row * row_slot + i
            gate = multiply_add(ones, _gate(rows, at + gates, bias, row * bias_position + i, count), shift)
            weight = exp2_of(multiply_add(gate, to_exponent, fill(np.float32(0))))
            weights = multiply_add(ones, weight, weights)
            total = multiply_add(weight, load_part(rows, at, count), total)
        for row in range(pool_size):
            at = block + _within(offset + row, block_size) * row_slot + own_half + i
            gate = multiply_add(ones, _gate(rows, at + gates, bias, row * bias_position + own_half + i, count), shift)
            weight = exp2_of(multiply_add(gate, to_exponent, fill(np.float32(0))))
            weights = multiply_add(ones, weight, weights)
            total = multiply_add(weight, load_part(rows, at, count), total)
        store_part(entry, i, total, count)
        store_part(entry, dim + i, weights, count)
    if has_gates:
        for i in range(dim):
            entry[i] = entry[i] / entry[dim + i]


@nb.device_function
def _store_codes(entry, first, end, codes, at):
    """Write the numbers of a group as codes at a scale of a power of two, and return its exponent as a byte."""
    largest, not_finite = largest_magnitude(entry, first, end - first)
    largest = max(largest, np.float32(SMALLEST))
    # Round the scale up to a power of two: add one to the exponent unless the mantissa is 0. Divide in float64, because
    # fast math may multiply by the rounded inverse of 448, and the scale of exactly 448 would be 2.
    bits = np.float32(np.float64(largest) / np.float64(448)).view(np.int32)
    exponent = (bits + np.int32(0x7FFFFF)) >> np.int32(23)
    inverse = np.int32((np.int32(254) - exponent) << np.int32(23)).view(np.float32)
    store_float8(entry, first, end - first, inverse, False, codes, at + first)
    if not_finite != np.float32(0):
        return np.uint8(255)
    return np.uint8(exponent)


@nb.device_function
def _store_index_key(entry, dim, codes, at, scales, scale_at):
    """Write an indexer's key as codes, and its scale."""
    largest, not_finite = largest_magnitude(entry, 0, dim)
    largest = max(largest, np.float32(SMALLEST))
    scales[scale_at] = largest / np.float32(448) + not_finite
    store_float8(entry, 0, dim, np.float32(448) / largest, False, codes, at)


@nb.device_function
def _row_before(ids, token, position, sizes):
    """Return the row where the pool before that of a token begins, in a block before; -1 if it is not in the table."""
    row_table, cu_seqlens_q = ids[3], ids[4]
    pool_size, block_size, num_blocks, num_seqs, width, table_stride, row_block, row_slot = sizes
    seq = np.int64(0)
    while seq < num_seqs and token >= cu_seqlens_q[seq + 1]:
        seq += 1
    column = position // block_size - 1
    if seq == num_seqs or column >= width:
        return np.int64(-1)
    block = np.int64(row_table[seq * table_stride + column])
    if block < 0 or block >= num_blocks:
        return np.int64(-1)
    return block * row_block + (block_size - pool_size) * row_slot


@nb.device_function
def _write(rows, weights, ids, entries, entry, sizes, strides, options):
    """Write the entries of this thread's tokens; if an id is out of range, write nothing and return False."""
    bias, norm_weight, cos_sin = weights
    row_slots, entry_slots, positions = ids[0], ids[1], ids[2]
    num_tokens, pool_size, dim, block_size, num_blocks, entry_block_size, num_entry_slots = sizes[:7]
    num_positions, num_seqs, table_width, num_halves, rotary_dim, first_rotated, form = sizes[7:14]
    num_codes, group_size = sizes[14:]
    row_block, row_slot, bias_position, position_stride, table_stride = strides[:5]
    entry_block, entry_slot, rope_block, rope_slot, scale_block, scale_slot = strides[5:]
    has_gates, has_norm, interleaved, eps = options
    numbers, halves, codes, rope, scale_codes, scales = entries
    table_sizes = pool_size, block_size, num_blocks, num_seqs, table_width, table_stride, row_block, row_slot
    for token in range(num_tokens):
        if row_slots[token] >= num_blocks * block_size or entry_slots[token] >= num_entry_slots:
            return False
        if rotary_dim > 0 and (positions[token] < 0 or positions[token] >= num_positions):
            return False
        is_closing = entry_slots[token] >= 0 and entry_slots[token] % pool_size == pool_size - 1
        if num_halves == 2 and row_slots[token] >= 0 and is_closing:
            position = positions[token] - pool_size + 1
            is_first = row_slots[token] % block_size < pool_size
            if is_first and position > 0 and _row_before(ids, token, position, table_sizes) < 0:
                return False
    first, end = nb.share(num_tokens)
    for token in range(first, end):
        slot = row_slots[token]
        if slot < 0 or entry_slots[token] < 0 or entry_slots[token] % pool_size != pool_size - 1:
            continue
        offset, start = slot % block_size - pool_size + 1, slot // block_size * row_block
        if offset < 0:  # in a ring
            offset += block_size
        row_before, num_before, position = start, np.int64(0), np.int64(0)
        if num_halves == 2 or rotary_dim > 0:
            position = positions[token] - pool_size + 1
        if num_halves == 2 and position > 0:
            num_before = pool_size
            row_before = start + (offset - pool_size) * row_slot
            if offset == 0:
                row_before = _row_before(ids, token, position, table_sizes)
        _pool(
            rows, bias, has_gates, (row_before, num_before, start, offset),
            (pool_size, dim, row_slot, bias_position, num_halves, block_size), entry,
        )  # fmt: skip
        if has_norm:
            inverse = nb.inverse_rms(entry, 0, dim, eps)
            for i in range(dim):
                entry[i] = entry[i] * inverse * norm_weight[i]
        if rotary_dim > 0:
            angles = position * position_stride
            rotate(entry, first_rotated, cos_sin, angles, rotary_dim // 2, interleaved)
        for i in range(dim, nb.rounded_up(dim, LANES)):  # codes are rounded 16 at once
            entry[i] = np.float32(0)
        index = entry_slots[token] // pool_size
        block = index // entry_block_size
        place = index - block * entry_block_size
        to = block * entry_block + place * entry_slot
        if form == _FLOAT32:
            for i in range(dim):
                numbers[to + i] = entry[i]
        elif form == _BFLOAT16:
            for i in range(dim):
                nb.store(halves, to + i, entry[i])
        elif form == _INDEX:
            _store_index_key(entry, dim, codes, to, scales, block * scale_block + place * scale_slot)
        else:
            at = block * scale_block + place * scale_slot
            if form == _NVFP4_RECORD:
                store_nvfp4_row(entry, 0, num_codes, np.float32(1), False, codes, to, scale_codes, at)
            else:
                for begin in range(0, num_codes, group_size):
                    scale_code = _store_codes(entry, begin, begin + group_size, codes, to)
                    scale_codes[at + begin // group_size] = scale_code
            at = block * rope_block + place * rope_slot
            for i in range(dim - num_codes):
                nb.store(rope, at + i, entry[num_codes + i])
    return True


@nb.Kernel
def _write_pooled_entries(arguments):
    values = nb.unpack(arguments, 45)
    is_bf16, rows, bias, norm_weight = values[1:5]
    row_slots, entry_slots, positions, row_table, cu_seqlens_q, cos_sin, entry, rope, scale = values[5:14]
    scratch = nb.floats(values[14] + nb.thread_index() * values[15] * 4)
    weights = nb.floats(bias), nb.floats(norm_weight), nb.floats(cos_sin)
    ids = (
        *(nb.int64s(row_slots), nb.int64s(entry_slots), nb.int64s(positions)),
        *(nb.int32s(row_table), nb.int32s(cu_seqlens_q)),
    )
    entries = (
        *(nb.floats(entry), nb.bfloats(entry), nb.uint8s(entry)),
        *(nb.bfloats(rope), nb.uint8s(scale), nb.floats(scale)),
    )
    sizes, strides = values[16:32], values[32:43]
    options = bias != 0, norm_weight != 0, values[43] != 0, nb.as_float(values[44])
    if is_bf16:
        is_done = _write(nb.bfloats(rows), weights, ids, entries, scratch, sizes, strides, options)
    else:
        is_done = _write(nb.floats(rows), weights, ids, entries, scratch, sizes, strides, options)
    if not is_done:
        arguments[0] = 1


def form_of(entry_cache: torch.Tensor, kind: str, head_dim: int) -> tuple[int, int, int] | None:
    """Return the number of a form of entries, and codes and numbers of a scale in a record; None for other forms.

    kind: see `entry_kind`.
    """
    if kind == "index":
        return _INDEX, 0, 0
    record = record_form(entry_cache, head_dim)
    if record is not None:
        if record.codes_per_byte == 2:
            return _NVFP4_RECORD, record.num_codes, record.group
        return _RECORD, record.num_codes, record.group
    form = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16}.get(entry_cache.dtype)
    if form is None:
        return None
    return form, 0, 0


def launch_for(
    row_cache: torch.Tensor,
    num_tokens: int,
    num_entry_slots: int,
    num_positions: int,
    form: tuple[int, int, int],
    sizes: dict[str, Any],
) -> Callable[[dict[str, Any]], int]:
    """Return a launch for calls like this one. If an id is out of range, its status is 1 and it writes nothing.

    sizes: the arguments of the Triton kernel. Calls may have other numbers of sequences.
    """
    is_bf16, (num_blocks, block_size, _) = row_cache.dtype == torch.bfloat16, row_cache.shape
    dim, pool_size = sizes["HEAD_DIM"], sizes["POOL_SIZE"]
    # An entry and the sums of its weights, in whole cache lines of 64 bytes.
    scratch_size = -(-2 * dim // 16) * 16
    launches: dict[tuple[int, int, int], NumbaLaunch] = {}

    def launch_of(num_seqs: int, width: int, table_stride: int) -> NumbaLaunch:
        num_halves = 2 if num_seqs else 1
        arguments: tuple[int | str, ...] = (
            is_bf16,
            *("row_ptr", "bias_ptr", "weight_ptr", "row_slots_ptr", "entry_slots_ptr", "positions_ptr"),
            *("row_table_ptr", "cu_seqlens_q_ptr", "cos_sin_ptr", "entry_ptr", "rope_ptr", "scale_ptr", SCRATCH),
            scratch_size,
            num_tokens,
            pool_size,
            dim,
            block_size,
            num_blocks,
            sizes["ENTRY_BLOCK_SIZE"],
            num_entry_slots,
            num_positions,
            num_seqs,
            width,
            num_halves,
            sizes["ROTARY_DIM"],
            sizes["FIRST_ROTATED"],
            *form,
            sizes["stride_row_block"],
            sizes["stride_row_slot"],
            num_halves * dim,
            sizes["stride_cos_sin_position"],
            table_stride,
            *(sizes[f"stride_{part}_{axis}"] for part in ("entry", "rope", "scale") for axis in ("block", "slot")),
            sizes["INTERLEAVED"],
            nb.bits(sizes["eps"]),
        )
        work = num_tokens * num_halves * dim * 16
        return NumbaLaunch(_write_pooled_entries.address, work, arguments, scratch_size=scratch_size)

    def launch(tensors: dict[str, Any]) -> int:
        table, layout = tensors["row_table_ptr"], (0, 0, 0)
        if table is not None:
            layout = len(table), table.shape[1], table.stride(0)
        if layout not in launches:
            launches[layout] = launch_of(*layout)
        wide = {}
        for name in ("bias_ptr", "weight_ptr"):
            if tensors[name] is not None:
                wide[name] = tensors[name].float().contiguous()
        return launches[layout](tensors | wide)

    return launch
