"""Query and key norm, rotary embedding and cache write by numba."""

from __future__ import annotations

import torch

from paged.kernels.cache.write import CacheWrite
from paged.kernels.common.id_checks import check_all_ids
from paged.kernels.common.numba_ops.kernel import (
    Kernel,
    as_float,
    bfloats,
    bits,
    device_function,
    floats,
    int64s,
    load,
    share,
    store,
    thread_index,
    unpack,
)
from paged.kernels.common.numba_ops.rms_norm import inverse_rms
from paged.kernels.common.rotation import positions_of


@device_function
def _rotate_head(x, start, weight, has_weight, cos_sin, angles, out, to, wide, at, size, half, interleaved, eps):
    """One head: normalised and rotated in float32, in `wide` from `at` on, then stored."""
    for i in range(size):
        wide[at + i] = load(x, start + i)
    if has_weight:
        inverse = inverse_rms(wide, at, size, eps)
        for i in range(size):
            wide[at + i] = wide[at + i] * inverse * load(weight, i)
    first, second, step = at, at + half, 1
    if interleaved:
        second, step = at + 1, 2
    for i in range(half):
        a, b, cos, sin = (
            wide[first + i * step],
            wide[second + i * step],
            cos_sin[angles + i],
            cos_sin[angles + half + i],
        )
        wide[first + i * step] = a * cos - b * sin
        wide[second + i * step] = b * cos + a * sin
    for i in range(size):
        store(out, to + i, wide[at + i])


@device_function
def _write(q, k, v, k_cache, v_cache, q_weight, k_weight, ids, sizes, strides):
    """The tokens of this thread; False, and nothing is written, where an id is out of range."""
    slots, positions, cos_sin, wide = ids
    num_tokens, num_q_heads, num_kv_heads, size, v_size, half, block_size, num_slots, num_positions = sizes[:9]
    has_weight, interleaved, eps = sizes[9:]
    q_token, q_head, k_token, k_head, v_token, v_head = strides[:6]
    k_block, k_slot, k_slot_head, v_block, v_slot, v_slot_head, position_stride = strides[6:]
    at = thread_index() * size
    for token in range(num_tokens):
        if slots[token] >= num_slots or positions[token] < 0 or positions[token] >= num_positions:
            return False
    first, end = share(num_tokens)
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


@Kernel
def _qk_norm_rope_and_cache(arguments):
    values = unpack(arguments, 38)
    is_bf16, has_bf16_weight, q, k, v, k_cache, v_cache, q_weight, k_weight = values[1:10]
    slots, positions, cos_sin, wide = values[10:14]
    ids = int64s(slots), int64s(positions), floats(cos_sin), floats(wide)
    sizes = (*values[14:23], q_weight != 0, values[23] != 0, as_float(values[24]))
    strides = values[25:]
    if not is_bf16:
        caches = floats(k_cache), floats(v_cache), floats(q_weight), floats(k_weight)
        is_done = _write(floats(q), floats(k), floats(v), *caches, ids, sizes, strides)
    elif has_bf16_weight:
        caches = bfloats(k_cache), bfloats(v_cache), bfloats(q_weight), bfloats(k_weight)
        is_done = _write(bfloats(q), bfloats(k), bfloats(v), *caches, ids, sizes, strides)
    else:
        mixed = bfloats(k_cache), bfloats(v_cache), floats(q_weight), floats(k_weight)
        is_done = _write(bfloats(q), bfloats(k), bfloats(v), *mixed, ids, sizes, strides)
    if not is_done:
        arguments[0] = 1


def qk_norm_rope_and_cache(
    q: torch.Tensor,
    write: CacheWrite,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    *,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """Implementation by numba of `kernels.cache.qk_norm_rope_and_cache`, for caches of q's type."""
    k, v, k_cache, v_cache, slots, *_ = write
    (num_tokens, num_q_heads, size), (_, num_kv_heads, v_size) = q.shape, v.shape
    slots, positions = slots.contiguous(), positions.contiguous()
    weights = [None if weight is None else weight.contiguous() for weight in (q_weight, k_weight)]
    wide = torch.empty(torch.get_num_threads() * size)
    is_wrong = _qk_norm_rope_and_cache(
        num_tokens * (num_q_heads + 2 * num_kv_heads) * size * 4,
        q.dtype == torch.bfloat16,
        weights[0] is not None and weights[0].dtype == torch.bfloat16,
        *(tensor.data_ptr() for tensor in (q, k, v, k_cache, v_cache)),
        *(0 if weight is None else weight.data_ptr() for weight in weights),
        *(tensor.data_ptr() for tensor in (slots, positions, cos_sin_cache, wide)),
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
        bits(eps),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        cos_sin_cache.stride(0),
    )
    if is_wrong:
        check_all_ids("qk_norm_rope_and_cache", write.slots, positions_of(positions, cos_sin_cache), by_triton=False)
    return q
