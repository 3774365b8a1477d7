"""Numba kernel of query and key norm, rotary embedding and cache write."""

from __future__ import annotations

import numpy as np
import torch

from ...cache.write import CacheWrite
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LANES, fill, load_vector, multiply_add, store_vector


@nb.device_function
def _rotate(x, start, cos_sin, angles, out, to, size, half, interleaved):
    """Rotate one head, possibly in place: vectors of pairs in registers, then the remaining pairs."""
    num_vector, second, step = half // LANES * LANES, half, 1
    if interleaved:
        num_vector, second, step = 0, 1, 2
    zero, minus_one = fill(np.float32(0)), fill(np.float32(-1))
    for i in range(0, num_vector, LANES):
        a, b = load_vector(x, start + i), load_vector(x, start + half + i)
        cos, sin = load_vector(cos_sin, angles + i), load_vector(cos_sin, angles + half + i)
        minus_sin = multiply_add(sin, minus_one, zero)
        store_vector(out, to + i, multiply_add(a, cos, multiply_add(b, minus_sin, zero)))
        store_vector(out, to + half + i, multiply_add(b, cos, multiply_add(a, sin, zero)))
    for i in range(num_vector, half):
        first, c, s = i * step, cos_sin[angles + i], cos_sin[angles + half + i]
        a, b = nb.load(x, start + first), nb.load(x, start + first + second)
        nb.store(out, to + first, a * c - b * s)
        nb.store(out, to + first + second, b * c + a * s)
    for i in range(2 * half, size):
        nb.store(out, to + i, nb.load(x, start + i))


@nb.device_function
def _rotate_head(x, start, weight, has_weight, cos_sin, angles, out, to, wide, at, size, half, interleaved, eps):
    """Rotate one head. With a weight, first normalise it in float32 in `wide` from `at` on."""
    if has_weight:
        inverse = nb.inverse_rms(x, start, size, eps)
        for i in range(size):
            wide[at + i] = nb.load(x, start + i) * inverse * nb.load(weight, i)
        _rotate(wide, at, cos_sin, angles, out, to, size, half, interleaved)
    else:
        _rotate(x, start, cos_sin, angles, out, to, size, half, interleaved)


@nb.device_function
def _write(q, k, v, k_cache, v_cache, q_weight, k_weight, ids, sizes, strides):
    """Process this thread's tokens; if an id is out of range, write nothing and return False."""
    slots, positions, cos_sin, wide = ids
    num_tokens, num_q_heads, num_kv_heads, size, v_size, half, block_size, num_slots, num_positions = sizes[:9]
    has_weight, interleaved, eps = sizes[9:]
    q_token, q_head, k_token, k_head, v_token, v_head = strides[:6]
    k_block, k_slot, k_slot_head, v_block, v_slot, v_slot_head, position_stride = strides[6:]
    at = nb.thread_index() * size
    for token in range(num_tokens):
        if slots[token] >= num_slots or positions[token] < 0 or positions[token] >= num_positions:
            return False
    first, end = nb.share(num_tokens)
    for token in range(first, end):
        angles, slot = positions[token] * position_stride, slots[token]
        for head in range(num_q_heads):
            start = token * q_token + head * q_head
            _rotate_head(
                q, start, q_weight, has_weight, cos_sin, angles, q, start, wide, at, size, half, interleaved, eps
            )
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(num_kv_heads):
            start, to = token * k_token + head * k_head, block * k_block + offset * k_slot + head * k_slot_head
            _rotate_head(
                k, start, k_weight, has_weight, cos_sin, angles, k_cache, to, wide, at, size, half, interleaved, eps
            )
            start, to = token * v_token + head * v_head, block * v_block + offset * v_slot + head * v_slot_head
            for i in range(v_size):
                v_cache[to + i] = v[start + i]
    return True


@nb.Kernel
def _qk_norm_rope_and_cache(arguments):
    values = nb.unpack(arguments, 38)
    is_bf16, has_bf16_weight, q, k, v, k_cache, v_cache, q_weight, k_weight = values[1:10]
    slots, positions, cos_sin, wide = values[10:14]
    ids = nb.int64s(slots), nb.int64s(positions), nb.floats(cos_sin), nb.floats(wide)
    sizes = (*values[14:23], q_weight != 0, values[23] != 0, nb.as_float(values[24]))
    strides = values[25:]
    if not is_bf16:
        caches = nb.floats(k_cache), nb.floats(v_cache), nb.floats(q_weight), nb.floats(k_weight)
        is_done = _write(nb.floats(q), nb.floats(k), nb.floats(v), *caches, ids, sizes, strides)
    elif has_bf16_weight:
        caches = nb.bfloats(k_cache), nb.bfloats(v_cache), nb.bfloats(q_weight), nb.bfloats(k_weight)
        is_done = _write(nb.bfloats(q), nb.bfloats(k), nb.bfloats(v), *caches, ids, sizes, strides)
    else:
        mixed = nb.bfloats(k_cache), nb.bfloats(v_cache), nb.floats(q_weight), nb.floats(k_weight)
        is_done = _write(nb.bfloats(q), nb.bfloats(k), nb.bfloats(v), *mixed, ids, sizes, strides)
    if not is_done:
        arguments[0] = 1


def launch_for(
    q: torch.Tensor,
    write: CacheWrite,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    *,
    eps: float,
    interleaved: bool,
) -> NumbaLaunch:
    """Return a launch for caches of q's dtype. If an id is out of range, its status is 1 and it writes nothing."""
    (num_tokens, num_q_heads, size), (_, num_kv_heads, v_size) = q.shape, write.value.shape
    k_cache, v_cache = write.k_cache, write.v_cache
    arguments: tuple[int | str, ...] = (
        q.dtype == torch.bfloat16,
        q_weight is not None and q_weight.dtype == torch.bfloat16,
        *("q_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "q_weight_ptr", "k_weight_ptr"),
        *("slot_mapping_ptr", "positions_ptr", "cos_sin_cache_ptr", SCRATCH),
        num_tokens,
        num_q_heads,
        num_kv_heads,
        size,
        v_size,
        cos_sin_cache.shape[1] // 2,
        k_cache.shape[1],
        k_cache.shape[0] * k_cache.shape[1],
        len(cos_sin_cache),
        interleaved,
        nb.bits(eps),
        *(step for tensor in (q, write.key, write.value) for step in tensor.stride()[:2]),
        *(step for tensor in (k_cache, v_cache) for step in tensor.stride()[:3]),
        cos_sin_cache.stride(0),
    )
    work = num_tokens * (num_q_heads + 2 * num_kv_heads) * size * 4
    return NumbaLaunch(_qk_norm_rope_and_cache.address, work, arguments, scratch_size=size)
