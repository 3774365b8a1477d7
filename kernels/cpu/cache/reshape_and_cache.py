"""Numba kernel that writes keys and values to their slots."""

from __future__ import annotations

import torch

from ...cache.write import CacheWrite
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LANES
from .store_rows import copy_or_store_row, has_format, target_of


@nb.device_function
def _write(key, value, is_bf16, slots, wide, targets, sizes, strides):
    """Write this thread's tokens; if a slot is out of range, write nothing and return False."""
    num_tokens, num_heads, size, v_size, block_size, num_slots, scratch_size = sizes
    key_token, key_head, value_token, value_head = strides
    k_target, v_target = targets
    at = nb.thread_index() * scratch_size
    for token in range(num_tokens):
        if slots[token] >= num_slots:
            return False
    first, end = nb.share(num_tokens)
    for token in range(first, end):
        slot = slots[token]
        if slot < 0:
            continue
        for head in range(num_heads):
            place = slot // block_size, slot % block_size, head
            key_start, value_start = token * key_token + head * key_head, token * value_token + head * value_head
            copy_or_store_row(key, is_bf16, key_start, size, wide, at, k_target, place)
            copy_or_store_row(value, is_bf16, value_start, v_size, wide, at, v_target, place)
    return True


@nb.Kernel
def _reshape_and_cache(arguments):
    values = nb.unpack(arguments, 37)
    is_bf16, key, value, slots, wide = values[1:6]
    targets = values[6:16], values[16:26]
    if not _write(key, value, is_bf16, nb.int64s(slots), nb.floats(wide), targets, values[26:33], values[33:]):
        arguments[0] = 1


def launch_for(write: CacheWrite, v_kind: str | None = None) -> NumbaLaunch | None:
    """Return a launch, or None if there is no kernel for a cache's dtype.

    If a slot is out of range, the launch's status is 1 and it writes nothing.

    v_kind: name of the `RecordForm` of values that are codes of records.
    """
    key, value, k_cache, v_cache = write[:4]
    if not (has_format(k_cache) and has_format(v_cache, v_kind)):
        return None
    (num_tokens, num_heads, size), v_size = key.shape, value.shape[2]
    scratch_size = -(-max(size, v_size) // LANES) * LANES  # whole cache lines
    arguments: tuple[int | str, ...] = (
        key.dtype == torch.bfloat16,
        *("key_ptr", "value_ptr", "slot_mapping_ptr", SCRATCH),
        *target_of("k", k_cache, write.k_scale, copied=key.dtype),
        *target_of("v", v_cache, write.v_scale, copied=key.dtype, kind=v_kind),
        num_tokens,
        num_heads,
        size,
        v_size,
        k_cache.shape[1],
        k_cache.shape[0] * k_cache.shape[1],
        scratch_size,
        *key.stride()[:2],
        *value.stride()[:2],
    )
    work = num_tokens * num_heads * (size + v_size) * 2
    return NumbaLaunch(_reshape_and_cache.address, work, arguments, scratch_size=scratch_size)
