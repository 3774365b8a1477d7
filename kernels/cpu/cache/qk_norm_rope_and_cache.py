"""Numba kernel of query and key norm, rotary embedding, Hadamard transform and cache write."""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir

from ...cache.write import CacheWrite
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import (
    LANES,
    VECTOR,
    emitted,
    fill,
    lanes_of,
    load_part,
    load_vector,
    multiply,
    multiply_add,
    store_vector,
)
from .store_rows import copy_or_store_row, has_format, load_row, store_as, store_row, target_of

# Tensors that may be None.
OPTIONAL = (
    *("q_weight_ptr", "k_weight_ptr", "v_weight_ptr", "signs_ptr"),
    *("k_scale_ptr", "v_scale_ptr", "k_table_scale_ptr", "v_table_scale_ptr"),
)


@nb.device_function
def rotate(x, start, cos_sin, angles, half, interleaved):
    """Rotate pairs of a row of float32 in place: vectors of pairs in registers, then the remaining pairs."""
    num_vector, second, step = half // LANES * LANES, half, 1
    if interleaved:
        num_vector, second, step = 0, 1, 2
    zero, minus_one = fill(np.float32(0)), fill(np.float32(-1))
    for i in range(0, num_vector, LANES):
        a, b = load_vector(x, start + i), load_vector(x, start + half + i)
        cos, sin = load_vector(cos_sin, angles + i), load_vector(cos_sin, angles + half + i)
        minus_sin = multiply_add(sin, minus_one, zero)
        store_vector(x, start + i, multiply_add(a, cos, multiply_add(b, minus_sin, zero)))
        store_vector(x, start + half + i, multiply_add(b, cos, multiply_add(a, sin, zero)))
    for i in range(num_vector, half):
        first, c, s = start + i * step, cos_sin[angles + i], cos_sin[angles + half + i]
        a, b = x[first], x[first + second]
        x[first] = a * c - b * s
        x[first + second] = b * c + a * s


@emitted()
def _transform_lanes(builder, row, index, factors):
    """Multiply 16 numbers by factors, then by Sylvester's matrix: a step adds or subtracts the partners of lanes."""
    vector = multiply.emit(builder, load_vector.emit(builder, row, index), factors)
    for half in (1, 2, 4, 8):
        partners = lanes_of(builder, vector, vector, [lane ^ half for lane in range(LANES)])
        signs = ir.Constant(VECTOR, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
        vector = multiply_add.emit(builder, vector, signs, partners)
    store_vector.emit(builder, row, index, vector)


@nb.device_function
def _transform(row, start, signs, size):
    """Replace a row by H (signs row); see `hadamard` in kernels/cache/definition.py. size: a multiple of 16."""
    block = size & -size
    factor = fill(np.float32(1) / np.sqrt(np.float32(block)))
    one, minus_one = fill(np.float32(1)), fill(np.float32(-1))
    for i in range(0, size, LANES):
        _transform_lanes(row, start + i, multiply(load_vector(signs, i), factor))
    half = LANES
    while half < block:
        for begin in range(start, start + size, 2 * half):
            for i in range(begin, begin + half, LANES):
                a, b = load_vector(row, i), load_vector(row, i + half)
                store_vector(row, i, multiply_add(a, one, b))
                store_vector(row, i + half, multiply_add(b, minus_one, a))
        half *= 2


@nb.device_function
def _norm_by(row, start, weight, size, eps):
    """Normalise a row in place."""
    inverse, num_whole = fill(nb.inverse_rms(row, start, size, eps)), size // LANES * LANES
    for i in range(0, num_whole, LANES):
        normed = multiply(load_vector(row, start + i), inverse)
        store_vector(row, start + i, multiply(normed, load_vector(weight, i)))
    for i in range(num_whole, size, LANES):
        normed = multiply(load_vector(row, start + i), inverse)
        store_vector(row, start + i, multiply(normed, load_part(weight, i, size - i)))


@nb.device_function
def _normed_row(x, start, weight, constants, wide, at, size, eps):
    """Write a row to `wide` from `at` on, normalised if there is a weight."""
    is_bf16, is_bf16_weight, _, _ = constants
    load_row(x, is_bf16, start, size, wide, at)
    if weight != 0 and is_bf16_weight:
        _norm_by(wide, at, nb.bfloats(weight), size, eps)
    elif weight != 0:
        _norm_by(wide, at, nb.floats(weight), size, eps)


@nb.device_function
def _rotated_head(x, start, weight, constants, angles, wide, at, sizes):
    """Write one head to `wide` from `at` on, after norm, rotation and transform as far as there are any."""
    _, _, cos_sin, signs = constants
    size, half, interleaved, eps = sizes
    _normed_row(x, start, weight, constants, wide, at, size, eps)
    rotate(wide, at, nb.floats(cos_sin), angles, half, interleaved)
    if signs != 0:
        _transform(wide, at, nb.floats(signs), size)


@nb.device_function
def _write(rows, constants, ids, targets, sizes, strides, head_sizes):
    """Process this thread's tokens; if an id is out of range, write nothing and return False."""
    q, k, v, q_weight, k_weight, v_weight = rows
    slots, positions, wide = ids
    k_target, v_target = targets
    num_tokens, num_q_heads, num_kv_heads, v_size, block_size, num_slots, num_positions, scratch_size = sizes
    q_token, q_head, k_token, k_head, v_token, v_head, position_stride = strides
    is_bf16, size, eps = constants[0], head_sizes[0], head_sizes[3]
    at = nb.thread_index() * scratch_size
    for token in range(num_tokens):
        if slots[token] >= num_slots or positions[token] < 0 or positions[token] >= num_positions:
            return False
    first, end = nb.share(num_tokens)
    for token in range(first, end):
        angles, slot = positions[token] * position_stride, slots[token]
        for head in range(num_q_heads):
            start = token * q_token + head * q_head
            _rotated_head(q, start, q_weight, constants, angles, wide, at, head_sizes)
            store_as(is_bf16, wide, at, size, np.float32(1), q, start)
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(num_kv_heads):
            place = block, offset, head
            _rotated_head(k, token * k_token + head * k_head, k_weight, constants, angles, wide, at, head_sizes)
            store_row(wide, at, size, k_target, place)
            start = token * v_token + head * v_head
            if v_weight == 0:
                copy_or_store_row(v, is_bf16, start, v_size, wide, at, v_target, place)
            else:
                _normed_row(v, start, v_weight, constants, wide, at, v_size, eps)
                store_row(wide, at, v_size, v_target, place)
    return True


@nb.Kernel
def _qk_norm_rope_and_cache(arguments):
    values = nb.unpack(arguments, 53)
    slots, positions, wide = values[11:14]
    ids = nb.int64s(slots), nb.int64s(positions), nb.floats(wide)
    head_sizes = values[42], values[43], values[44] != 0, nb.as_float(values[45])
    targets = values[14:24], values[24:34]
    if not _write(values[5:11], values[1:5], ids, targets, values[34:42], values[46:], head_sizes):
        arguments[0] = 1


def launch_for(
    q: torch.Tensor,
    write: CacheWrite,
    cos_sin_cache: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    interleaved: bool,
    norms_values: bool = False,
    v_kind: str | None = None,
) -> NumbaLaunch | None:
    """Return a launch, or None if there is no kernel for a cache's dtype.

    If an id is out of range, the launch's status is 1 and it writes nothing.

    weight: one of the norms' weights.
    norms_values: whether values have a norm, which an ordinary attention's have not.
    v_kind: name of the `RecordForm` of values that are codes of records.
    """
    if not (has_format(write.k_cache) and has_format(write.v_cache, v_kind)):
        return None
    (num_tokens, num_q_heads, size), (_, num_kv_heads, v_size) = q.shape, write.value.shape
    k_cache, v_cache = write.k_cache, write.v_cache
    scratch_size = -(-max(size, v_size) // LANES) * LANES  # whole cache lines
    arguments: tuple[int | str, ...] = (
        q.dtype == torch.bfloat16,
        weight is not None and weight.dtype == torch.bfloat16,
        *("cos_sin_cache_ptr", "signs_ptr", "q_ptr", "k_ptr", "v_ptr"),
        *("q_weight_ptr", "k_weight_ptr", "v_weight_ptr"),
        *("slot_mapping_ptr", "positions_ptr", SCRATCH),
        *target_of("k", k_cache, write.k_scale),
        *target_of("v", v_cache, write.v_scale, copied=None if norms_values else q.dtype, kind=v_kind),
        num_tokens,
        num_q_heads,
        num_kv_heads,
        v_size,
        k_cache.shape[1],
        k_cache.shape[0] * k_cache.shape[1],
        len(cos_sin_cache),
        scratch_size,
        size,
        cos_sin_cache.shape[1] // 2,
        interleaved,
        nb.bits(eps),
        *(step for tensor in (q, write.key, write.value) for step in tensor.stride()[:2]),
        cos_sin_cache.stride(0),
    )
    work = num_tokens * (num_q_heads + 2 * num_kv_heads) * size * 4
    return NumbaLaunch(_qk_norm_rope_and_cache.address, work, arguments, scratch_size=scratch_size)
